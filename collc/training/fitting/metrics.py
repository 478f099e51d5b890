"""Metrics as JSON lines, which a resumed run continues, and as TensorBoard has them."""

import contextlib
import importlib.util
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from collc.errors import CheckpointError
from collc.training.checkpoints.files import unwritable, write_text


class Metrics:
    """A file of JSON objects, one a line, each with its `step`.

    Opened at step t, it forgets what was written after t (by a run that died after its last
    checkpoint) and a last line that was cut off. Opened at step 0, it forgets nothing: what was
    there is kept beside it, and `backup` says where.

    `steps` and `seconds` say how many steps it holds and how long they took.

    Raises CheckpointError if the file cannot be read or written, or is something else.
    """

    def __init__(self, path: Path, start: int = 0) -> None:
        self._path, self.steps, self.seconds = path, 0, 0.0
        self.backup: Path | None = None
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            kept = list(self._kept(text, start)) if start else []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} is not a file of metrics that can be continued ({error!r}). Move it away "
                "to resume without it."
            ) from error
        try:
            if text and not start:
                names = (path.with_suffix(f".{n}{path.suffix}") for n in itertools.count(1))
                self.backup = next(name for name in names if not name.exists())
                os.rename(path, self.backup)
            write_text(path, "".join(kept))
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise unwritable(path, error) from error

    def _kept(self, text: str, start: int) -> Iterator[str]:
        for line in text.splitlines(keepends=True):
            if not line.endswith("\n"):
                break
            record = json.loads(line)
            if record["step"] <= start:
                self._count(record)
                yield line

    def _count(self, record: Mapping[str, Any]) -> None:
        self.steps += "loss" in record
        self.seconds = float(record.get("seconds", self.seconds))

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one line; it is on its way to the disk when this returns. JSON has no NaN and no
        infinity: they are written as null.
        """
        record = {"step": step, **{name: finite(value) for name, value in values.items()}}
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise unwritable(self._path, error) from error
        self._count(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # write has told already
            self._file.close()


def finite(value: Any) -> Any:
    """A value as JSON can hold it: None for NaN and infinities."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def has_finite_loss(metrics: Mapping[str, float]) -> bool:
    """Whether the loss is finite, or there is none: other metrics may be what they like.

    >>> has_finite_loss({"loss": math.nan}), has_finite_loss({"f1": math.nan})
    (False, True)
    """
    return math.isfinite(metrics.get("loss", 0.0))


class TensorBoard:
    """Scalars for TensorBoard in a folder, through tensorboardX.

    Opened at step t, it has TensorBoard forget what an earlier run wrote after t. Raises
    CheckpointError if the package is not there or the folder cannot be written.
    """

    def __init__(self, folder: Path, start: int = 0) -> None:
        if importlib.util.find_spec("tensorboardX") is None:
            raise CheckpointError(
                'tensorboard=True needs tensorboardX. Install it: pip install "collc[tensorboard]"'
            )
        from tensorboardX import SummaryWriter

        try:
            self._writer = SummaryWriter(str(folder), purge_step=start + 1 if start else None)
        except OSError as error:
            raise unwritable(folder, error) from error

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """The values that are numbers, each as a scalar of that name."""
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
