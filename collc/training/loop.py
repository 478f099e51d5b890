"""The loop around a step: progress, metrics as JSON lines, checkpoints, a clean stop on Ctrl-C.

It knows nothing of models or plans: `Job` is what it is to do, `run` does it.
"""

import contextlib
import itertools
import json
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from collc.errors import CheckpointError, StepError
from collc.training.checkpoint import unwritable, write_text
from collc.training.interrupt import Interrupt

RECENT = 20  # steps whose median duration predicts the time left


class Metrics:
    """A file of JSON objects, one a line, each with its `step`.

    Opened at step t, it forgets what was written after t (by a run that died after its last
    checkpoint), the lines of a finished run's end, and a last line that was cut off. Opened at step
    0, it forgets nothing: what was there is kept beside it, and `backup` says where.

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
            if record["step"] <= start and not record.get("final"):
                self._count(record)
                yield line

    def _count(self, record: Mapping[str, Any]) -> None:
        self.steps += "loss" in record
        self.seconds = float(record.get("seconds", self.seconds))

    def write(self, step: int, **values: float) -> None:
        """Append one line; it is on its way to the disk when this returns."""
        record = {"step": step, **values}
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise unwritable(self._path, error) from error
        self._count(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # write has told already
            self._file.close()


@dataclass(frozen=True)
class Job:
    """What a loop does: the work as functions, how much of it, and how often.

    `advance(t)` takes the model from step t to t + 1 and returns the loss; `evaluate` returns a
    validation loss; `save(t)` writes the checkpoint of t finished steps.
    """

    advance: Callable[[int], float]
    evaluate: Callable[[], float]
    save: Callable[[int], object]
    steps: int
    tokens: int  # in a step
    save_every: int
    evaluate_every: int


def clock(seconds: float) -> str:
    """Minutes and seconds, and hours where there are any.

    >>> clock(59.6), clock(3675)
    ('1:00', '1:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def run(job: Job, start: int, metrics: Metrics, console: Console, interrupt: Interrupt) -> int:
    """Run `job` from step `start` to its end or an interrupt.

    Returns the steps finished, of which a checkpoint exists then.

    Raises StepError if a loss is no longer finite; the checkpoints before that are kept and no
    further one is written.
    """
    recent: deque[float] = deque(maxlen=RECENT)
    before, began = metrics.seconds, time.perf_counter()
    step = start
    saved = start or None  # a fresh run has no checkpoint yet
    with _progress(console) as progress:
        bar = progress.add_task(
            "train",
            total=job.steps,
            completed=start,
            loss="",
            speed="compiling" if start < job.steps else "",
            left="",
        )
        while step < job.steps and not interrupt.signal:
            tick = time.perf_counter()
            loss = job.advance(step)
            duration = time.perf_counter() - tick
            step += 1
            check_finite("loss", loss, step, saved or 0)
            elapsed, speed = before + time.perf_counter() - began, job.tokens / duration
            metrics.write(step, loss=loss, tokens_per_s=round(speed, 1), seconds=round(elapsed, 3))
            if step - start > 1 or step == job.steps:  # the first one compiles: it predicts nothing
                recent.append(duration)
                typical = statistics.median(recent)
                left = f"{clock((job.steps - step) * typical)} left"
                progress.update(
                    bar,
                    completed=step,
                    loss=f"loss {loss:.3f}",
                    speed=f"{job.tokens / typical:,.0f} tokens/s",
                    left=left,
                )
            if step % job.save_every == 0 and step < job.steps:
                job.save(step)
                saved = step
            if step % job.evaluate_every == 0 and step < job.steps and not interrupt.signal:
                validation = job.evaluate()
                check_finite("validation loss", validation, step, saved or 0)
                metrics.write(
                    step,
                    validation_loss=validation,
                    seconds=round(before + time.perf_counter() - began, 3),
                )
                progress.console.print(validated(step, loss, validation, elapsed), highlight=False)
        if saved != step:
            job.save(step)
    return step


def validated(step: int, loss: float, validation: float, seconds: float) -> str:
    """The line that a validation prints.

    >>> validated(400, 2.0, 2.125, 61)
    'step   400  loss 2.000  validation 2.125  1:01'
    """
    return f"step {step:>5}  loss {loss:.3f}  validation {validation:.3f}  {clock(seconds)}"


def check_finite(name: str, loss: float, step: int, saved: int) -> None:
    """StepError if the loss after `step` steps is not finite; `saved` is the last checkpoint's."""
    if not math.isfinite(loss):
        raise StepError(
            f"The {name} of step {step} is {loss}. The last checkpoint is that of step {saved}. "
            "Train afresh with a lower learning rate."
        )


def _progress(console: Console) -> Progress:
    columns = (
        "{task.completed}/{task.total}",
        "{task.fields[loss]}",
        "{task.fields[speed]}",
        "{task.fields[left]}",
    )
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *(TextColumn(column) for column in columns),
        console=console,
    )
