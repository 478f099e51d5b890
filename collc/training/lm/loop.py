"""The loop around a step: progress, metrics as JSON lines, checkpoints, a clean stop on Ctrl-C.

It knows nothing of models or plans: `Job` is what it is to do, `run` does it.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from collc.errors import StepError
from collc.training.fitting.interrupt import Interrupt as Interrupt
from collc.training.fitting.metrics import Metrics as Metrics

RECENT = 20  # steps whose median duration predicts the time left


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
    with progress_bar(console) as progress:
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


def progress_bar(console: Console) -> Progress:
    """A bar whose tasks have the fields loss, speed and left."""
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
