"""Checkpoints that are whole or refused, and that restore on another number of devices.

    step_00000200/
      state/          the arrays, written by Orbax, see portable.py
      manifest.json   format, step, notes, a record of each leaf, size and SHA-256 of each file

A checkpoint is written beside its place under a hidden name and renamed when complete, so one that
was cut off while written is never seen. One that was damaged later, or that something else wrote,
fails its manifest; it is refused with a CheckpointError, or set aside with a word where an older one
is whole. It is never deleted or skipped silently.

Of several processes, which share a file system, each calls these functions: all write their arrays,
the first one does the rest, and what one of them cannot do is an error on all.
"""

import gc
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import orbax.checkpoint as ocp

from collc.errors import CheckpointError
from collc.planning.agree import share
from collc.training.checkpoints.files import write_text
from collc.training.checkpoints.manifest import (
    HIDDEN,
    MANIFEST,
    STATE,
    UNCHANGED,
    Checkpoint,
    Damaged,
    damaged,
    manifest_of,
    read,
    steps,
    verify,
)
from collc.training.checkpoints.portable import places, portable, rebuilt, record
from collc.training.checkpoints.resize import rules_for, words
from collc.training.checkpoints.store import as_orbax_reads, lacking
from collc.training.checkpoints.targets import target
from collc.training.checkpoints.together import together

__all__ = [
    "Checkpoint",
    "find",
    "latest",
    "restore",
    "save",
    "steps",
]


@contextmanager
def _quiet() -> Iterator[None]:
    """Orbax logs a traceback for each of its threads and tasks that fails, beside the error that it
    raises.

    What it still had to write then fails later, since its event loop is closed, and says so through
    the hook: after a failure that stays in place. After Ctrl-C its threads go on, and the logs stay
    silent too.
    """
    loggers, hook = [logging.getLogger(name) for name in ("absl", "asyncio")], sys.unraisablehook
    before = [logger.disabled for logger in loggers]

    def others(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    def speak() -> None:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled

    for logger in loggers:
        logger.disabled = True
    sys.unraisablehook = others
    try:
        yield
    except Exception:
        gc.collect()  # a task that failed says so when it is collected
        speak()
        raise
    sys.unraisablehook = hook
    speak()


def save(folder: Path, step: int, state: Any, notes: Mapping[str, Any], keep: int = 2) -> Path:
    """Write `state` as the checkpoint of `step`; then delete others, all but the newest `keep`.

    `state` is a pytree of arrays and numbers, with Shard and Ranked nodes, nnx states and random
    keys. `notes` is anything that JSON can hold and that the reader wants to compare. A checkpoint
    of the same step is replaced. Raises CheckpointError, on every process, if a leaf cannot be held
    or the disk or Orbax does not take it; older checkpoints are then untouched.
    """
    if keep < 1:
        raise CheckpointError(f"keep={keep}: the checkpoint just written stays. Keep 1 or more.")
    target = folder / f"step_{step:08d}"
    beside = folder / f"{HIDDEN}{target.name}"
    first = jax.process_index() == 0

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for cut_off in folder.glob(f"{HIDDEN}*"):
            shutil.rmtree(cut_off, ignore_errors=True)
        (beside / STATE).mkdir(parents=True)

    def write() -> None:
        if arrays:
            with as_orbax_reads(beside / STATE) as path:
                _handler().save(path, args=ocp.args.PyTreeSave(arrays))

    def finish() -> None:
        if arrays:
            with as_orbax_reads(beside / STATE) as path:
                _handler().finalize(path)
                if lacks := lacking(path, arrays):
                    raise CheckpointError(f"what Orbax wrote lacks {lacks}")
        manifest = manifest_of(beside / STATE, step, notes, leaves)
        write_text(beside / MANIFEST, json.dumps(manifest, indent=1, allow_nan=False) + "\n")
        _replace(beside, target)
        for old in list(steps(folder).values())[:-keep]:
            if old != target:
                _discard(old)

    def failed(why: str) -> str:
        return (
            f"The checkpoint of step {step} could not be written to {target}: {why}. "
            "Checkpoints of earlier steps are untouched. If the disk is full, free some space or "
            "choose another run folder."
        )

    arrays, leaves = together(f"lay out checkpoint {step}", lambda: portable(state))
    try:
        with _quiet():
            together(f"begin checkpoint {step}", begin if first else _nothing, failed)
            together(f"write checkpoint {step}", write, failed)
            together(f"finish checkpoint {step}", finish if first else _nothing, failed)
    except Exception:
        # After Ctrl-C threads of Orbax still write there: the next save clears it.
        if first:
            shutil.rmtree(beside, ignore_errors=True)
        raise
    return target


def _nothing() -> None:
    return None


def _handler() -> ocp.PyTreeCheckpointHandler:
    # Not a Checkpointer: where one process fails, the others would wait at its barriers.
    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False)


def _hide(path: Path) -> Path:
    """Out of sight before it is deleted: cut off meanwhile, it must not look like a damaged one."""
    hidden = path.with_name(f"{HIDDEN}old_{path.name}")
    if path.exists():
        os.replace(path, hidden)
    return hidden


def _discard(path: Path) -> None:
    shutil.rmtree(_hide(path), ignore_errors=True)


def _replace(new: Path, old: Path) -> None:
    hidden = _hide(old)
    try:
        os.replace(new, old)
    except OSError:
        if hidden.exists():
            os.replace(hidden, old)
        raise
    shutil.rmtree(hidden, ignore_errors=True)


def _aside(path: Path) -> Path:
    """Another name for a damaged checkpoint, which somebody may want to look at."""
    names = (path.with_name(f"damaged_{path.name}{f'_{n}' if n else ''}") for n in count())
    aside = next(name for name in names if not name.exists())
    os.replace(path, aside)
    return aside


def find(folder: Path, tell: Callable[[str], object] | None = None) -> Checkpoint | None:
    """The newest checkpoint in `folder`, verified; None if there is none. It is the same on all
    processes, each of which has to call this.

    Raises CheckpointError if it is damaged. With `tell` the newest whole one is taken: damaged ones
    after it get a name that is none of a checkpoint, and `tell` hears of each. Where none is whole,
    CheckpointError as before.
    """

    def newest() -> Checkpoint | None:
        found = list(steps(folder).values()) if jax.process_index() == 0 else []
        broken: dict[Path, Damaged] = {}
        for path in reversed(found):
            try:
                whole = verify(path)
            except Damaged as error:
                broken[path] = error
                if tell is not None and path != found[0]:
                    continue
                worst = next(iter(broken.values()))
                if len(broken) == 1:
                    raise worst from None
                what = str(worst).partition(f" {UNCHANGED}")[0]
                raise CheckpointError(
                    f"{what} None of the {len(broken) - 1} before it is whole either. {UNCHANGED} "
                    "Start a fresh run in another folder."
                ) from None
            if tell is not None:
                for one, error in broken.items():
                    what, aside = str(error).partition(f" {UNCHANGED}")[0], _aside(one).name
                    tell(f"{what} It is {aside} now, and step {whole.step} is taken.")
            return whole
        return None

    found = together(f"find a checkpoint in {folder}", newest)
    name = share(f"the checkpoint in {folder}", found.folder.name if found else "none")
    if jax.process_index() == 0 or name == "none":
        return found
    return read(folder / name)[0]


def latest(folder: Path) -> Checkpoint:
    """As `find`, but CheckpointError if there is none."""
    found = find(folder)
    if found is None:
        raise CheckpointError(
            f"There is no finished checkpoint in {folder}. Start a fresh run in another folder."
        )
    return found


def restore(
    checkpoint: Checkpoint, like: Any, resize: Mapping[str, str] = MappingProxyType({})
) -> Any:
    """The state of a verified checkpoint as a pytree shaped, typed and sharded as `like` (arrays
    or ShapeDtypeStructs), on as many devices as that one.

    Ranked leaves come back as they were on equal ranks. On others they stay equal if they were
    equal on all ranks, floats become their mean, and parts whose first dimension says so are cut
    anew; `resize` says otherwise, by patterns of paths: "first", "sum", "mean", "split".

    Raises CheckpointError, on every process, if it holds another tree, other shapes or other dtypes,
    or a ranked leaf that needs a rule.
    """
    return together(
        f"restore {checkpoint.folder.name}", lambda: _restored(checkpoint, like, resize)
    )


def _restored(checkpoint: Checkpoint, like: Any, resize: Mapping[str, str]) -> Any:
    found = places(like)
    there, here = checkpoint.leaves, {place.path: record(place) for place in found}
    for path in sorted(there.keys() | here.keys()):
        old, new = there.get(path), here.get(path)
        if old is None or new is None or not new.fits(old):
            raise CheckpointError(
                f"{checkpoint.folder} holds another state: {words(path)} is "
                f"{old.text if old else 'missing'} there, but {new.text if new else 'missing'} here. "
                "Nothing was changed. Use the model and optimizer of that run, or start a fresh "
                "run in another folder."
            )
    ranked = [path for path, record in here.items() if record.kind == "ranked"]
    rules = rules_for(resize, ranked, list(here))
    leaves = [place for place in found if not place.empty]
    targets = {p.path: target(p, there[p.path], rules.get(p.path)) for p in leaves}
    asked = {p.name: t.asked for p in leaves if (t := targets[p.path]).asked is not None}
    arrays: dict[str, Any] = {}
    if asked:
        args = ocp.args.PyTreeRestore(item=dict.fromkeys(asked, 0), restore_args=asked)
        try:
            with _quiet(), as_orbax_reads(checkpoint.folder / STATE) as path:
                arrays = _handler().restore(path, args=args)
        except Exception as error:  # Orbax raises whatever its backends do
            raise damaged(checkpoint.folder, f"Orbax cannot read its state ({error})") from error
    made = {p.path: targets[p.path].finish(arrays.get(p.name)) for p in leaves}
    return rebuilt(like, made)
