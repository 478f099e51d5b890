"""The loop around a step: progress, metrics as JSON lines, checkpoints, a clean stop on Ctrl-C.

It knows nothing of models or plans: `Job` is what it is to do, `run` does it.
"""

import json
import math
import os
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from collc.errors import CheckpointError, StepError
from collc.training.checkpoint import write_text

RECENT = 20  # steps whose median duration predicts the time left


class Interrupt:
    """While entered, SIGINT and SIGTERM are remembered in `signal` instead of stopping the process.

    So a step can be finished and saved. A second one does what it would have done without. The old
    handlers return on exit. Off the main thread, where Python has no signals, it does nothing.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signal = 0
        self._old: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._remember) for number in self.SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, old in self._old.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)
        self._old = {}

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.signal:
            self._restore()
            os.kill(os.getpid(), number)
        self.signal = number


class Metrics:
    """A file of JSON objects, one a line, each with its `step`.

    Opened at step t, it forgets what was written after t (by a run that died after its last
    checkpoint), the lines of a finished run's end, and a last line that was cut off.

    Raises CheckpointError if the file cannot be read or written, or is something else.
    """

    def __init__(self, path: Path, start: int = 0) -> None:
        kept: list[str] = []
        self.last: dict[str, Any] = {}  # the last line that is kept
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            for line in text.splitlines(keepends=True):
                if not line.endswith("\n"):
                    break
                record = json.loads(line)
                if record["step"] <= start and not record.get("final"):
                    kept.append(line)
                    self.last = record
            write_text(path, "".join(kept))
            self._file = path.open("a", encoding="utf-8")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} is not a file of metrics that can be continued ({error!r}). Move it away "
                "to resume without it."
            ) from error

    def write(self, step: int, **values: float) -> None:
        """Append one line; it is on its way to the disk when this returns."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
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

    Raises StepError if the loss is no longer finite; the checkpoints before that are kept and no
    further one is written.
    """
    recent: deque[float] = deque(maxlen=RECENT)
    before, began = float(metrics.last.get("seconds", 0.0)), time.perf_counter()
    step = start
    saved = start or None  # a fresh run has no checkpoint yet
    with _progress(console) as progress:
        bar = progress.add_task(
            "train", total=job.steps, completed=start, loss="", speed="compiling", left=""
        )
        while step < job.steps and not interrupt.signal:
            tick = time.perf_counter()
            loss = job.advance(step)
            duration = time.perf_counter() - tick
            step += 1
            if not math.isfinite(loss):
                raise StepError(
                    f"The loss of step {step} is {loss}. The last checkpoint is that of step "
                    f"{saved or 0}. Train afresh with a lower learning rate."
                )
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
                metrics.write(
                    step,
                    validation_loss=validation,
                    seconds=round(before + time.perf_counter() - began, 3),
                )
                progress.console.print(
                    f"step {step:>5}  loss {loss:.3f}  validation {validation:.3f}  "
                    f"{clock(elapsed)}",
                    highlight=False,
                )
        if saved != step:
            job.save(step)
    return step


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
