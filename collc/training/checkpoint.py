"""Checkpoints that are whole or refused.

    step_00000200/
      state/          the arrays, written by Orbax
      manifest.json   format, step, notes, shapes, dtypes; size and SHA-256 of every file of state/

A checkpoint is written beside its place under a hidden name and renamed when complete, so one that
was cut off while written is never seen. One that was damaged later, or that something else wrote,
fails its manifest and is refused with a CheckpointError; it is never deleted or skipped silently.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from collc.errors import CheckpointError

FORMAT = "collc checkpoint 1"
MANIFEST, STATE = "manifest.json", "state"
_NAME = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk, its manifest read and its files verified.

    `arrays` says "dtype[shape]" of every array by its path in the tree; `notes` is what `save` was
    given.
    """

    folder: Path
    step: int
    arrays: dict[str, str]
    notes: dict[str, Any]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _arrays(state: Any) -> dict[str, str]:
    leaves = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _files(folder: Path) -> dict[str, Path]:
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write_text(path: Path, text: str) -> None:
    """Replace a small file as a whole: readers see the old text or the new, never half of it.

    Raises CheckpointError if it cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            with beside.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> CheckpointError:
    """The error of a file that the disk does not take."""
    return CheckpointError(
        f"{path} cannot be written: {error.strerror or error}. Make it writable, or free some space."
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Orbax logs a traceback for each of its threads that fails, beside the error that it raises.

    What it still had to write then fails later, since its event loop is closed, and says so through
    the hook: after a failure that stays in place.
    """
    logger, hook = logging.getLogger("absl"), sys.unraisablehook

    def others(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    before, logger.disabled, sys.unraisablehook = logger.disabled, True, others
    try:
        yield
        sys.unraisablehook = hook
    finally:
        logger.disabled = before


def steps(folder: Path) -> dict[int, Path]:
    """The finished checkpoints in `folder` by step, oldest first. Unfinished ones have another
    name.
    """
    if not folder.is_dir():
        return {}
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir())
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def save(folder: Path, step: int, state: Any, notes: Mapping[str, Any], keep: int = 2) -> Path:
    """Write `state`, a pytree of arrays, as the checkpoint of `step`; then delete all but the
    newest `keep`.

    `notes` is anything that JSON can hold and that the reader wants to compare. A checkpoint of the
    same step is replaced. Raises CheckpointError if the disk or Orbax does not take it; older
    checkpoints are then untouched.
    """
    target = folder / f"step_{step:08d}"
    beside = folder / f".writing_{target.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for cut_off in folder.glob(".writing_*"):
            shutil.rmtree(cut_off, ignore_errors=True)
        beside.mkdir()
        with _quiet(), ocp.StandardCheckpointer() as writer:
            writer.save((beside / STATE).absolute(), state)
        files = {
            name: {"bytes": path.stat().st_size, "sha256": _digest(path)}
            for name, path in _files(beside / STATE).items()
        }
        manifest = {
            "format": FORMAT,
            "step": step,
            "notes": dict(notes),
            "arrays": _arrays(state),
            "files": files,
        }
        write_text(beside / MANIFEST, json.dumps(manifest, indent=1, allow_nan=False) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        os.replace(beside, target)
        for _, old in list(steps(folder).items())[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    # ValueError: Orbax's, also for what it cannot hold, such as an array of size 0
    except (OSError, ValueError, CheckpointError) as error:
        why = (
            str(error).rpartition('": ')[2].rstrip(".")
        )  # Orbax begins with where in its own files it was
        raise CheckpointError(
            f"The checkpoint of step {step} could not be written to {target}: {why}. "
            "Checkpoints of earlier steps are untouched. If the disk is full, free some space or "
            "choose another run folder."
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)  # nothing is there unless it was cut off
    return target


def _damaged(path: Path, found: str) -> CheckpointError:
    others = [step for step, other in steps(path.parent).items() if other != path]
    remedy = (
        f"Move {path.name} out of {path.parent} and resume: step {others[-1]} is taken then."
        if others
        else "There is no other checkpoint in that folder: start a fresh run in another one."
    )
    return CheckpointError(
        f"{path} is not a whole checkpoint of collc: {found}. Nothing was changed. {remedy}"
    )


def verify(path: Path) -> Checkpoint:
    """Read the manifest of one checkpoint and compare every file with it; CheckpointError says what
    does not agree.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        raise _damaged(path, f"its {MANIFEST} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise _damaged(path, f"its {MANIFEST} is not JSON ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise _damaged(path, f"its {MANIFEST} has the format {found!r}, not {FORMAT!r}")
    try:
        step, notes, arrays = (
            int(manifest["step"]),
            dict(manifest["notes"]),
            dict(manifest["arrays"]),
        )
        expected = dict(manifest["files"])
        wanted = {
            name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in expected.items()
        }
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"its {MANIFEST} lacks or garbles an entry ({error})") from error
    if path.name != f"step_{step:08d}":
        raise _damaged(path, f"its {MANIFEST} is that of step {step}")
    found = _files(path / STATE)
    if missing := sorted(wanted.keys() - found.keys()):
        raise _damaged(
            path, f"{STATE}/{missing[0]} is missing ({len(missing)} of {len(wanted)} files are)"
        )
    if foreign := sorted(found.keys() - wanted.keys()):
        raise _damaged(
            path, f"{STATE}/{foreign[0]} was not written by it ({len(foreign)} foreign files)"
        )
    for name, (size, digest) in wanted.items():
        if (actual := found[name].stat().st_size) != size:
            raise _damaged(path, f"{STATE}/{name} has {actual:,} bytes, but {size:,} were written")
        if _digest(found[name]) != digest:
            raise _damaged(path, f"the content of {STATE}/{name} has changed since it was written")
    return Checkpoint(path, step, arrays, notes)


def latest(folder: Path) -> Checkpoint:
    """The newest checkpoint in `folder`, verified. Raises CheckpointError if there is none or it is
    damaged.
    """
    found = steps(folder)
    if not found:
        raise CheckpointError(
            f"There is no finished checkpoint in {folder}. Start a fresh run in another folder."
        )
    return verify(list(found.values())[-1])


def restore(checkpoint: Checkpoint, like: Any) -> Any:
    """The arrays of a verified checkpoint as a pytree shaped, typed and sharded as `like` (arrays
    or ShapeDtypeStructs).

    Raises CheckpointError if it holds another tree, other shapes or other dtypes: Orbax alone would
    cast without a word.
    """
    there, here = checkpoint.arrays, _arrays(like)
    for place in sorted(there.keys() | here.keys()):
        if there.get(place) != here.get(place):
            raise CheckpointError(
                f"{checkpoint.folder} holds another state: {place} is "
                f"{there.get(place, 'missing')} there, but {here.get(place, 'missing')} here. "
                "Nothing was changed. Use the model and optimizer of that run, or start a fresh "
                "run in another folder."
            )
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    try:
        with _quiet(), ocp.StandardCheckpointer() as reader:
            return reader.restore((checkpoint.folder / STATE).absolute(), abstract)
    except Exception as error:  # Orbax raises whatever its backends do
        raise _damaged(checkpoint.folder, f"Orbax cannot read its state ({error})") from error
