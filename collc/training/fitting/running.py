"""The loop of `fit`: step after step, what is written about them, and what callbacks ask for."""

import json
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from collc.errors import StepError
from collc.planning.agree import distributed, share
from collc.planning.plan import Plan
from collc.training.checkpoints import checkpoint
from collc.training.fitting.carried import Carried
from collc.training.fitting.feed import place
from collc.training.fitting.interrupt import Interrupt
from collc.training.fitting.metrics import Metrics, TensorBoard
from collc.training.fitting.shares import Clock, Profiler
from collc.training.fitting.source import Source
from collc.training.fitting.switch import Switch
from collc.training.lm.loop import RECENT, check_finite, clock, progress_bar


@dataclass(frozen=True)
class Options:
    """What `fit` was asked for, with its defaults filled in."""

    steps: int
    evaluate: Callable[..., Any] | None
    evaluate_every: int
    save_every: int
    keep: int
    callbacks: tuple[Callable[["Event"], object], ...]
    max_skipped: int


@dataclass(frozen=True)
class Outputs:
    """Where a run writes: nowhere without a folder; metrics on the first process only."""

    checkpoints: Path | None
    metrics: Metrics | None
    board: TensorBoard | None
    console: Console

    def write(self, step: int, **values: Any) -> None:
        for sink in (self.metrics, self.board):
            if sink is not None:
                sink.write(step, **values)


@dataclass
class Event:
    """What a callback gets after each step.

    step: how many are finished. validation: what ``evaluate`` returned, if it was called after this
    step. On several processes, what process 0 asks for is done on all.
    """

    step: int
    validation: dict[str, float] | None
    _loop: "Loop" = field(repr=False)

    @property
    def state(self) -> Any:
        """The state after this step. The next step may take its memory: copy what is to stay."""
        return self._loop.carried.state

    @property
    def metrics(self) -> dict[str, float]:
        """Of this step. Waits for it."""
        self._loop.drain()
        return dict(self._loop.metrics)

    def switch(self, name: str) -> None:
        """Run that step of a ``Switch`` from the next one on. StepError for a name that it has not."""
        step = self._loop.step_function
        if not isinstance(step, Switch):
            raise StepError(
                f"event.switch({name!r}): the step is no collc.Switch. Give fit one, with each step "
                "under its name."
            )
        self._loop.wish["switch"] = step.check(name)

    def stop(self) -> None:
        """End the run after this step, with a checkpoint."""
        self._loop.wish["stop"] = "callback"


@dataclass
class _Pending:
    """A step that was started and not yet waited for."""

    step: int
    metrics: dict[str, Any]
    skipped: Any
    switches: int | None


@dataclass
class Loop:
    """The run of `fit`, from ``step`` finished steps on.

    step: finished. saved: that of the last checkpoint. metrics: of the last step waited for.
    """

    step_function: Callable[..., Any]
    carried: Carried
    source: Source
    plan: Plan | None  # over which batches are split
    options: Options
    outputs: Outputs
    profiler: Profiler
    step: int = 0
    bad: int = 0  # steps in a row that were not finite
    skipped: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    wish: dict[str, str] = field(default_factory=dict)
    timer: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.saved = self.start = self.step
        if (skipped := self.carried.skipped()) is not None:
            self.skipped = int(skipped)
        self._pending: deque[_Pending] = deque()
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._position = ""
        # On virtual CPU devices executions in flight can deadlock: each step is waited for.
        on_cpu = any(device.platform == "cpu" for device in self.carried.devices())
        self._ahead = 0 if on_cpu else 1

    def run(self, interrupt: Interrupt) -> str:
        """All steps, or as many as callbacks and signals let it; returns what stopped it, or ""."""
        metrics = self.outputs.metrics
        self._before = metrics.seconds if metrics else 0.0
        self._began = time.perf_counter()
        stopped = ""
        with progress_bar(self.outputs.console) as self._progress:
            self._bar = self._progress.add_task(
                "train",
                total=self.options.steps,
                completed=self.step,
                loss="",
                speed="compiling" if self.step < self.options.steps else "",
                left="",
            )
            batch = self._take() if self.step < self.options.steps else None
            while self.step < self.options.steps and not stopped:
                tick = time.perf_counter()
                other = self._aside()
                batch = self._advance(batch)
                validation = self._evaluate()
                event = Event(self.step, validation, self)
                with self.timer.time("callbacks"):
                    for callback in self.options.callbacks:
                        callback(event)
                stopped = self._decide(interrupt)
                if self.step % self.options.save_every == 0 or stopped:
                    self._save()
                seconds = time.perf_counter() - tick - (self._aside() - other)
                first = self.step == self.start + 1
                self.timer.add("first step" if first else "steps", seconds)
                if not first:
                    self._recent.append(seconds)
            self.drain()
            if self.saved != self.step or self.step == 0:
                self._save()
        return stopped

    def _aside(self) -> float:
        """Seconds spent on other things than steps."""
        asides = ("evaluation", "callbacks", "checkpoints")
        return sum(self.timer.seconds.get(name, 0.0) for name in asides)

    def _advance(self, batch: Any) -> Any:
        """One step; returns the batch of the next one, made while the devices work."""
        with self.profiler.step(self.step - self.start) as profiled:
            metrics = self.carried.call(self.step_function, batch)
            if profiled:
                jax.block_until_ready((metrics, self.carried.arrays()))
        self.step += 1
        switches = self.step_function.count if isinstance(self.step_function, Switch) else None
        pending = _Pending(self.step, metrics, self.carried.skipped(), switches)
        self._pending.append(pending)
        following = None
        if self.outputs.checkpoints:
            self._position = self.source.position()
        if self.step < self.options.steps:
            tick = time.perf_counter()
            try:
                following = self._take()
            except Exception:
                self.drain()
                raise
            if self.step > self.start + 1 and all(map(_is_ready, metrics.values())):
                self.timer.add("input", time.perf_counter() - tick)
        while len(self._pending) > self._ahead:
            self._finish(self._pending.popleft())
        return following

    def _take(self) -> Any:
        batch = self.source.take(self.step)
        return batch if self.plan is None else place(batch, self.plan)

    def drain(self) -> None:
        """Wait for all steps that were started, and write about them."""
        while self._pending:
            self._finish(self._pending.popleft())

    def _finish(self, pending: _Pending) -> None:
        step = pending.step
        self.metrics = {name: float(x) for name, x in pending.metrics.items()}
        extra: dict[str, Any] = {}
        if pending.skipped is None:
            if "loss" in self.metrics:
                check_finite("loss", self.metrics["loss"], step, self.saved)
        else:
            skipped = int(pending.skipped)
            loss = self.metrics.get("loss", 0.0)
            bad = skipped > self.skipped or not abs(loss) < float("inf")
            self.bad, self.skipped = self.bad + 1 if bad else 0, skipped
            extra["skipped"] = skipped
        if pending.switches is not None:
            extra["switches"] = pending.switches
        elapsed = self._before + time.perf_counter() - self._began
        self.outputs.write(step, **self.metrics, **extra, seconds=round(elapsed, 3))
        self._show(step)
        if pending.skipped is not None and self.bad >= self.options.max_skipped:
            raise StepError(
                f"The steps {step - self.bad + 1} to {step} were not finite: {self.bad} in a row, and "
                f"max_skipped is {self.options.max_skipped}. The last checkpoint is that of step "
                f"{self.saved}. Lower the learning rate or the loss scale, or look at the data."
            )

    def _show(self, step: int) -> None:
        if not self._recent and step < self.options.steps:
            return  # the first one compiles: it predicts nothing
        name = "loss" if "loss" in self.metrics else next(iter(self.metrics), "")
        said = f"{name} {self.metrics[name]:.3f}" if name else ""
        said += f"  {self.skipped} skipped" if self.skipped else ""
        typical = statistics.median(self._recent) if self._recent else 0.0
        self._progress.update(
            self._bar,
            completed=step,
            loss=said,
            speed=f"{1 / typical:,.1f} steps/s" if typical else "",
            left=f"{clock((self.options.steps - step) * typical)} left",
        )

    def _evaluate(self) -> dict[str, float] | None:
        evaluate, every = self.options.evaluate, self.options.evaluate_every
        if evaluate is None or (self.step % every and self.step < self.options.steps):
            return None
        self.drain()
        with self.timer.time("evaluation"):
            found = self.carried.evaluate(evaluate)
        if "loss" in found:
            check_finite("validation loss", found["loss"], self.step, self.saved)
        values = {f"validation_{name}": x for name, x in found.items()}
        elapsed = self._before + time.perf_counter() - self._began
        self.outputs.write(self.step, **values, seconds=round(elapsed, 3))
        self.metrics |= values
        said = "  ".join(f"{name} {x:.3f}" for name, x in found.items())
        line = f"step {self.step:>5}  validation {said}  {clock(elapsed)}"
        self._progress.console.print(line, highlight=False)
        return found

    def _decide(self, interrupt: Interrupt) -> str:
        """What callbacks and signals asked for, as process 0 has it: done on all processes."""
        if interrupt.signal:
            self.wish["stop"] = signal.Signals(interrupt.signal).name
        wish, self.wish = self.wish, {}
        if distributed():
            wish = json.loads(share("what comes after this step", json.dumps(wish)))
        if "switch" in wish and isinstance(self.step_function, Switch):
            self.step_function.use(wish["switch"])
        return wish.get("stop", "")

    def _save(self) -> None:
        """The checkpoint of the steps finished, if there is a folder."""
        if self.outputs.checkpoints is None:
            return
        self.drain()
        if self.step == self.start:
            self._position = self.source.position()
        with self.timer.time("checkpoints"):
            notes = {**self.source.notes(self._position), "bad": self.bad}
            if isinstance(self.step_function, Switch):
                notes |= {"active": self.step_function.active, "switches": self.step_function.count}
            folder, keep = self.outputs.checkpoints, self.options.keep
            checkpoint.save(folder, self.step, self.carried.arrays(), notes, keep)
        self.saved = self.step


def _is_ready(x: Any) -> bool:
    return not hasattr(x, "is_ready") or x.is_ready()
