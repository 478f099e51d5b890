"""The manifest of a checkpoint: what is in it, and the digests that tell whether it is whole."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from collc.errors import CheckpointError
from collc.training.checkpoints.files import digest, files_in
from collc.training.checkpoints.portable import Record

FORMAT = "collc checkpoint 3"
HIDDEN = ".writing_"
MANIFEST, STATE = "manifest.json", "state"
UNCHANGED = "Nothing was changed."
_NAME = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk, its manifest read and its files verified.

    `leaves` are the records of the state's leaves by path; `notes` is what `save` was given.
    """

    folder: Path
    step: int
    leaves: dict[str, Record]
    notes: dict[str, Any]


def steps(folder: Path) -> dict[int, Path]:
    """The finished checkpoints in `folder` by step, oldest first. Unfinished ones have another
    name.
    """
    if not folder.is_dir():
        return {}
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir())
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def manifest_of(
    state: Path, step: int, notes: Mapping[str, Any], leaves: Mapping[str, Record]
) -> dict[str, Any]:
    """The manifest of a checkpoint whose arrays lie below `state`. Raises ValueError or TypeError if
    the notes are not JSON.
    """
    files = {
        name: {"bytes": path.stat().st_size, "sha256": digest(path)}
        for name, path in files_in(state).items()
    }
    content = {
        "format": FORMAT,
        "step": step,
        "notes": dict(notes),
        "leaves": {path: asdict(record) for path, record in leaves.items()},
        "files": files,
    }
    plain = json.loads(json.dumps(content, allow_nan=False))  # as it will be read: keys are strings
    return {**plain, "sha256": digest_of(plain)}


def digest_of(content: Mapping[str, Any]) -> str:
    """Of all that a manifest says, however it is laid out."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class Damaged(CheckpointError):
    """What nobody can mend by trying again: the checkpoint itself is not whole."""


def damaged(path: Path, found: str) -> Damaged:
    """The error of a checkpoint that is not as its manifest says."""
    others = [step for step, other in steps(path.parent).items() if other != path]
    remedy = (
        f"Move {path.name} out of {path.parent} and resume: step {others[-1]} is taken then."
        if others
        else "There is no other checkpoint in that folder: start a fresh run in another one."
    )
    return Damaged(f"{path} is not a whole checkpoint of collc: {found}. {UNCHANGED} {remedy}")


def _record(entry: Any) -> Record:
    kind, dtype, value = (str(entry[name]) for name in ("kind", "dtype", "value"))
    shape, lay = (tuple(int(n) for n in entry[name]) for name in ("shape", "lay"))
    return Record(kind, dtype, shape, lay, value)


def read(path: Path) -> tuple[Checkpoint, dict[str, tuple[int, str]]]:
    """A checkpoint as its manifest says, and the size and digest of each of its files."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError) as error:
        raise damaged(path, f"its {MANIFEST} cannot be read ({error.strerror})") from error
    except OSError as error:
        raise CheckpointError(
            f"{path}: its {MANIFEST} cannot be read now ({error.strerror}), which says nothing of the "
            "checkpoint. Look at the file system and at permissions, and try again."
        ) from error
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its {MANIFEST} is not JSON ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        if str(found).startswith(FORMAT.rstrip("0123456789")):
            raise CheckpointError(
                f"{path} was written by another version of collc: its format is {found!r}, here it is "
                f"{FORMAT!r}. Resume with that version, or start a fresh run in another folder."
            )
        raise damaged(path, f"its {MANIFEST} has the format {found!r}, not {FORMAT!r}")
    if manifest.pop("sha256", None) != digest_of(manifest):
        raise damaged(path, f"the content of its {MANIFEST} has changed since it was written")
    try:
        step, notes = int(manifest["step"]), dict(manifest["notes"])
        leaves = {place: _record(entry) for place, entry in dict(manifest["leaves"]).items()}
        expected = dict(manifest["files"])
        wanted = {
            name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in expected.items()
        }
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"its {MANIFEST} lacks or garbles an entry ({error})") from error
    if path.name != f"step_{step:08d}":
        raise damaged(path, f"its {MANIFEST} is that of step {step}")
    return Checkpoint(path, step, leaves, notes), wanted


def verify(path: Path) -> Checkpoint:
    """Read the manifest of one checkpoint and compare every file with it; CheckpointError says what
    does not agree.
    """
    checkpoint, wanted = read(path)
    found = files_in(path / STATE)
    if missing := sorted(wanted.keys() - found.keys()):
        raise damaged(
            path, f"{STATE}/{missing[0]} is missing ({len(missing)} of {len(wanted)} files are)"
        )
    if foreign := sorted(found.keys() - wanted.keys()):
        raise damaged(
            path, f"{STATE}/{foreign[0]} was not written by it ({len(foreign)} foreign files)"
        )
    for name, (size, sha) in wanted.items():
        if (actual := found[name].stat().st_size) != size:
            raise damaged(path, f"{STATE}/{name} has {actual:,} bytes, but {size:,} were written")
        if digest(found[name]) != sha:
            raise damaged(path, f"the content of {STATE}/{name} has changed since it was written")
    return checkpoint
