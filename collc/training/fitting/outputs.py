"""The files of a run, and the lock that keeps other processes out of its folder."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

import jax
from rich.console import Console

from collc.errors import CheckpointError
from collc.training.checkpoints.checkpoint import Checkpoint
from collc.training.checkpoints.files import unwritable
from collc.training.fitting.metrics import Metrics, TensorBoard
from collc.training.fitting.progress import say

CHECKPOINTS, METRICS, TENSORBOARD, LOCK = "checkpoints", "metrics.jsonl", "tensorboard", ".lock"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the folder's lock, which the system releases when the process ends, however it ends.

    Raises CheckpointError if another process has it, or the folder cannot be written. Where the
    file system has no locks there is none.
    """
    lock = path / LOCK
    try:
        file = lock.open("a+", encoding="utf-8")
    except OSError as error:
        raise unwritable(path, error) from error
    with file:
        if fcntl:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                owner = lock.read_text(encoding="utf-8").strip() or "unknown"
                raise CheckpointError(
                    f"The run in {path} is being written by another process (pid {owner}). Wait "
                    "for its end or stop it, or choose a fresh folder."
                ) from error
            except OSError:
                pass
        with suppress(OSError):  # on a full disk the owner stays unnamed
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
        yield


@dataclass(frozen=True)
class Outputs:
    """Where a run writes: nowhere without a folder; metrics on the first process only."""

    checkpoints: Path | None
    metrics: Metrics | None
    board: TensorBoard | None
    console: Console

    @property
    def steps(self) -> int:
        """Those in the metrics, of this process and those before it."""
        return self.metrics.steps if self.metrics else 0

    @property
    def seconds(self) -> float:
        """How long these took."""
        return self.metrics.seconds if self.metrics else 0.0

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        for sink in (self.metrics, self.board):
            if sink is not None:
                sink.write(step, values)


@contextmanager
def opened(
    folder: Path | None,
    found: Checkpoint | None,
    console: Console,
    *,
    resume: bool = False,
    tensorboard: bool = False,
) -> Iterator[Outputs]:
    """The files of a run that goes on from ``found``; says so, also where it should but cannot."""
    start = found.step if found else 0
    mine = folder if jax.process_index() == 0 else None
    metrics = Metrics(mine / METRICS, start) if mine is not None else None
    board = None
    try:
        if resume and found is None:
            backup = metrics and metrics.backup
            kept = f"; the old metrics are kept in {backup}" if backup else ""
            say(console, f"no checkpoint: starting from step 0{kept}")
        elif found is not None and found.step:
            say(console, f"going on from step {found.step} ({found.folder})")
        if mine is not None and tensorboard:
            board = TensorBoard(mine / TENSORBOARD, start)
        yield Outputs(folder and folder / CHECKPOINTS, metrics, board, console)
    finally:
        for sink in (metrics, board):
            if sink is not None:
                sink.close()
