"""What a terminal shows of a run: lines, and a bar below them."""

import statistics
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

RECENT = 20  # steps whose median duration predicts the time left
LINE_S = 30.0  # from one line to the next in a log, which has no bar


def clock(seconds: float) -> str:
    """Minutes and seconds, and hours where there are any.

    >>> clock(59.6), clock(3675)
    ('1:00', '1:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def say(console: Console, text: str) -> None:
    """Print as it is: no markup (programs have brackets), no colours, no line broken by force."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


class Bar:
    """Shown while entered: steps, what the last one said, how fast they are, the time left. What is no
    terminal gets a line every 30 s instead.

    With ``tokens``, of a batch, the speed is that of tokens. The first step compiles: it predicts
    nothing.
    """

    def __init__(self, console: Console, step: int, steps: int, tokens: int | None = None) -> None:
        self._first, self._steps, self._tokens = step + 1, steps, tokens
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._said, self._line = "", time.monotonic()
        fields: dict[str, Any] = {
            "said": "",
            "speed": "compiling" if step < steps else "",
            "left": "",
        }
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            *(TextColumn(f"{{task.fields[{name}]}}") for name in fields),
            console=console,
        )
        self._task = self._progress.add_task("train", total=steps, completed=step, **fields)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if not self._recent:
            self._progress.update(self._task, speed="")  # nothing compiles any more
        self._progress.stop()

    def show(self, step: int, metrics: Mapping[str, float], skipped: int, seconds: float) -> None:
        """A step is finished: its loss, or first metric, the steps skipped so far, how long it took."""
        name = "loss" if "loss" in metrics else next(iter(metrics), "")
        self._said = f"{name} {metrics[name]:.3f}" if name else ""
        self._said += f"  {skipped} skipped" if skipped else ""
        speed = left = ""
        if step > self._first or step == self._steps:
            self._recent.append(seconds)
            typical = statistics.median(self._recent)
            if self._tokens:
                speed = f"{self._tokens / typical:,.0f} tokens/s"
            else:
                speed = f"{1 / typical:,.1f} steps/s"
            left = f"{clock((self._steps - step) * typical)} left"
        self._progress.update(self._task, completed=step, said=self._said, speed=speed, left=left)
        if not self._progress.console.is_terminal and time.monotonic() - self._line >= LINE_S:
            self._line = time.monotonic()
            words = f"step {step:>5}/{self._steps}", self._said, speed, left
            say(self._progress.console, "  ".join(filter(None, words)))

    def evaluated(self, step: int, found: Mapping[str, float], seconds: float) -> None:
        """A line above the bar: the last step and what its evaluation found, after so long."""
        validation = ", ".join(f"{name} {x:.3f}" for name, x in found.items())
        words = f"step {step:>5}", self._said, f"validation: {validation}", clock(seconds)
        say(self._progress.console, "  ".join(filter(None, words)))
