"""The loop of every run: steps, what is written about them, and what callbacks ask for."""

import json
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import jax

from collc.errors import StepError
from collc.planning.agree import distributed, share
from collc.planning.plan import Plan
from collc.training.checkpoints import checkpoint
from collc.training.checkpoints.checkpoint import Checkpoint
from collc.training.fitting.carried import Carried
from collc.training.fitting.feed import place
from collc.training.fitting.interrupt import Interrupt
from collc.training.fitting.metrics import finite
from collc.training.fitting.outputs import Outputs
from collc.training.fitting.progress import Bar
from collc.training.fitting.shares import Clock, Profiler
from collc.training.fitting.source import Source
from collc.training.fitting.switch import Switch


@dataclass(frozen=True)
class Options:
    """What a run was asked for, with its defaults filled in.

    tokens: in a batch; without, speed is in steps. notes: more for each checkpoint to note.
    """

    steps: int
    evaluate: Callable[..., Any] | None
    evaluate_every: int
    save_every: int
    keep: int = 2
    callbacks: tuple[Callable[["Event"], object], ...] = ()
    max_skipped: int = 10
    tokens: int | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


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
    began: float
    metrics: dict[str, Any]
    skipped: Any
    switches: int | None


@dataclass
class Loop:
    """A run: steps with what is around them, from ``step`` finished ones on.

    saved: the step of the last checkpoint. metrics: of the last step waited for.
    """

    step_function: Callable[..., Any]
    carried: Carried
    source: Source
    plan: Plan | None  # over which batches are split
    options: Options
    profiler: Profiler
    step: int = 0
    saved: int = 0
    start: int = 0
    validated: int = 0  # the step of the last evaluation
    bad: int = 0  # steps in a row that were not finite
    skipped: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    wish: dict[str, str] = field(default_factory=dict)
    timer: Clock = field(default_factory=Clock)

    def resume(self, found: Checkpoint, resize: Mapping[str, str] | None = None) -> None:
        """Go on from a checkpoint; ``resize``: see ``checkpoint.restore``."""
        notes, step = found.notes, self.step_function
        self.carried.load(checkpoint.restore(found, self.carried.arrays(), resize or {}))
        self.source.resume(notes, jax.process_index())
        if isinstance(step, Switch) and "active" in notes:
            step.use(notes["active"])
            step.count = notes["switches"]
        self.step = self.saved = self.start = found.step
        self.validated, self.bad = notes.get("validated", 0), notes.get("bad", 0)
        noted = notes.get("metrics", {})
        self.metrics = {name: math.nan if x is None else x for name, x in noted.items()}

    def run(self, outputs: Outputs, interrupt: Interrupt) -> str:
        """All steps, or as many as callbacks and signals let it; returns what stopped it, or ""."""
        self.outputs, self.interrupt = outputs, interrupt
        if (skipped := self.carried.skipped()) is not None:
            self.skipped = int(skipped)
        self._pending: deque[_Pending] = deque()
        self._position = ""
        # On virtual CPU devices executions in flight can deadlock: each step is waited for.
        on_cpu = any(device.platform == "cpu" for device in self.carried.devices())
        self._ahead = 0 if on_cpu else 1
        self._began = self._finished = time.perf_counter()
        self._before = outputs.seconds
        options = self.options
        bar = Bar(outputs.console, self.step, options.steps, options.tokens)
        with closing(self.profiler), bar as self._bar:
            self._evaluate()  # which a signal may have prevented
            stopped = self._decide()
            batch = self._take() if self.step < options.steps and not stopped else None
            while self.step < options.steps and not stopped:
                tick = time.perf_counter()
                other = self._aside()
                batch = self._advance(batch)
                event = Event(self.step, self._evaluate(), self)
                with self.timer.time("callbacks"):
                    for callback in options.callbacks:
                        callback(event)
                stopped = self._decide()
                if self.step % options.save_every == 0 or stopped:
                    self._save()
                seconds = time.perf_counter() - tick - (self._aside() - other)
                self.timer.add("steps" if self.step > self.start + 1 else "first step", seconds)
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
        began = time.perf_counter()
        with self.profiler.step(self.step - self.start) as profiled:
            metrics = self.carried.call(self.step_function, batch)
            if profiled:
                jax.block_until_ready((metrics, self.carried.arrays()))
        self.step += 1
        switches = self.step_function.count if isinstance(self.step_function, Switch) else None
        pending = _Pending(self.step, began, metrics, self.carried.skipped(), switches)
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
        before, self._finished = self._finished, time.perf_counter()
        seconds = max(self._finished - max(before, pending.began), 1e-9)
        extra: dict[str, Any] = {}
        if pending.skipped is None:
            self._check_finite("loss", step)
        else:
            skipped = int(pending.skipped)
            bad = skipped > self.skipped or not math.isfinite(self.metrics.get("loss", 0.0))
            self.bad, self.skipped = self.bad + 1 if bad else 0, skipped
            extra["skipped"] = skipped
        if pending.switches is not None:
            extra["switches"] = pending.switches
        if self.options.tokens:
            extra["tokens_per_s"] = round(self.options.tokens / seconds, 1)
        self.outputs.write(step, **self.metrics, **extra, seconds=round(self._elapsed(), 3))
        self._bar.show(step, self.metrics, self.skipped, seconds)
        if pending.skipped is not None and self.bad >= self.options.max_skipped:
            raise StepError(
                f"The steps {step - self.bad + 1} to {step} were not finite: {self.bad} in a row, and "
                f"max_skipped is {self.options.max_skipped}. The last checkpoint is that of step "
                f"{self.saved}. Lower the learning rate or the loss scale, or look at the data."
            )

    def _check_finite(self, name: str, step: int) -> None:
        """StepError if there is such a metric and it is not finite."""
        if not math.isfinite(value := self.metrics.get(name, 0.0)):
            raise StepError(
                f"The {name.replace('_', ' ')} of step {step} is {value}. The last checkpoint is that "
                f"of step {self.saved}. Train afresh with a lower learning rate."
            )

    def _elapsed(self) -> float:
        """Seconds, with those of the processes before this one."""
        return self._before + time.perf_counter() - self._began

    def _evaluate(self) -> dict[str, float] | None:
        """What ``evaluate`` says after this step, if it is due. A signal puts it off: the process may
        have little time left to save, and the resumed run begins with it.
        """
        options, step = self.options, self.step
        due = step % options.evaluate_every == 0 or step == options.steps
        if options.evaluate is None or not due or self.validated == step:
            return None
        if _agreed("what comes before the evaluation", self.interrupt.signal):
            return None
        self.drain()
        with self.timer.time("evaluation"):
            found = self.carried.evaluate(options.evaluate)
        values = {f"validation_{name}": x for name, x in found.items()}
        self.metrics |= values
        self._check_finite("validation_loss", step)
        self.validated, elapsed = step, self._elapsed()
        self.outputs.write(step, **values, seconds=round(elapsed, 3))
        self._bar.evaluated(step, found, elapsed)
        return found

    def _decide(self) -> str:
        """What callbacks and signals asked for, as process 0 has it: done on all processes."""
        if self.interrupt.signal:
            self.wish["stop"] = signal.Signals(self.interrupt.signal).name
        wish, self.wish = _agreed("what comes after this step", self.wish), {}
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
            notes = {
                **self.options.notes,
                **self.source.notes(self._position),
                "metrics": {name: finite(x) for name, x in self.metrics.items()},
                "validated": self.validated,
                "bad": self.bad,
            }
            if isinstance(self.step_function, Switch):
                notes |= {"active": self.step_function.active, "switches": self.step_function.count}
            folder, keep = self.outputs.checkpoints, self.options.keep
            checkpoint.save(folder, self.step, self.carried.arrays(), notes, keep)
        self.saved = self.step


def _is_ready(x: Any) -> bool:
    return not hasattr(x, "is_ready") or x.is_ready()


def _agreed(topic: str, value: Any) -> Any:
    """The value of process 0, on all processes."""
    return json.loads(share(topic, json.dumps(value))) if distributed() else value
