"""A small disk of memory for the run folder, which can be filled up, and a checkpoint cut off on it."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

BALLAST = "ballast"
SIZE = "24m"
OWN = "COLLC_SOAK_MOUNTS"  # set where the process has a mount namespace of its own


def own_mounts(command: Sequence[str]) -> None:
    """Starts this process anew with mounts of its own, which end with it, however it ends."""
    if os.environ.get(OWN) != str(os.getpid()):
        os.environ[OWN] = str(os.getpid())  # which unshare keeps
        os.execvp("unshare", ["unshare", "--mount", "--propagation", "private", *command])


@contextmanager
def small(folder: Path) -> Iterator[Path]:
    """The folder as a disk of its own. Needs ``own_mounts``."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "soak", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


def fill(disk: Path) -> None:
    """Leaves no byte on it."""
    with (disk / BALLAST).open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass


def free(disk: Path) -> None:
    """Takes back what ``fill`` took."""
    (disk / BALLAST).unlink(missing_ok=True)


def checkpoints(run: Path) -> list[Path]:
    """Those that are whole as far as their names say, the oldest first."""
    return sorted((run / "checkpoints").glob("step_*"))


def truncate(checkpoint: Path, part: float) -> str:
    """Cuts off one of its files, both chosen by ``part``, 0 to 1; returns its name."""
    files = [p for p in sorted(checkpoint.rglob("*")) if p.is_file() and p.stat().st_size]
    file = files[int(part * len(files))]
    os.truncate(file, int(part * 997 % 1 * file.stat().st_size))
    return file.relative_to(checkpoint).as_posix()
