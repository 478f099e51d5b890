"""The loop of every run: steps, and what is written and asked around them."""

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

from collc.errors import CollcError, StepError
from collc.planning.agree import TIMEOUT_S, Box, distributed, share
from collc.planning.plan import Plan
from collc.training.checkpoints import checkpoint
from collc.training.checkpoints.checkpoint import Checkpoint
from collc.training.fitting import switch
from collc.training.fitting.carried import Carried
from collc.training.fitting.event import Event, Started, prefixed
from collc.training.fitting.feed import place
from collc.training.fitting.interrupt import Interrupt
from collc.training.fitting.metrics import finite, has_finite_loss
from collc.training.fitting.options import Options
from collc.training.fitting.outputs import Outputs
from collc.training.fitting.progress import Bar
from collc.training.fitting.shares import Clock, Profiler
from collc.training.fitting.source import Source
from collc.training.fitting.switch import Switch
from collc.training.fitting.waiting import Watch


@dataclass(frozen=True)
class _Failed:
    """In the place of a batch that could not be made: the step before it is finished first."""

    error: Exception


def unwatched(step: int, phase: str) -> None:
    """The beat of a run without a watchdog."""


@dataclass
class Loop:
    """A run: steps with what is around them, from ``step`` finished ones on.

    beat: told the newest step and the phase whenever that changes. agree_s: how long process 0 is
    waited for. saved: the step of the last checkpoint. metrics: of the last step waited for.
    """

    step_function: Callable[..., Any]
    carried: Carried
    source: Source
    plan: Plan | None  # over which batches are split
    options: Options
    profiler: Profiler
    beat: Callable[[int, str], object] = unwatched
    agree_s: float = TIMEOUT_S
    step: int = 0
    saved: int | None = None
    start: int = 0
    validated: int = 0  # the step of the last evaluation
    bad: int = 0  # steps in a row that were not finite
    skipped: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    wish: dict[str, str] = field(default_factory=dict)
    timer: Clock = field(default_factory=Clock)

    def resume(self, found: Checkpoint, resize: Mapping[str, str] | None = None) -> None:
        """Go on from a checkpoint; ``resize``: see ``checkpoint.restore``."""
        notes = found.notes
        arrays = checkpoint.restore(found, self.carried.arrays(), resize or {})
        self.source.resume(notes, jax.process_index())
        switch.resume(self.step_function, notes)
        self.carried.load(arrays)  # last: what is refused changes no module
        self.step = self.saved = self.start = found.step
        self.validated, self.bad = notes.get("validated", 0), notes.get("bad", 0)
        noted = notes.get("metrics", {})
        self.metrics = {name: math.nan if x is None else x for name, x in noted.items()}

    def run(self, outputs: Outputs, interrupt: Interrupt) -> str:
        """All steps, or as many as callbacks and signals let it; returns what stopped it, or "".

        If it fails, the steps finished are saved, and the error has a note of where the run stands.
        """
        self.outputs, self.interrupt = outputs, interrupt
        if (skipped := self.carried.skipped()) is not None:
            self.skipped = int(skipped)
        self._signals = Box()
        self._pending: deque[Started] = deque()
        self._position = ""
        self._told: StepError | None = None  # what has said which checkpoint is the last
        self._whole = True  # the state is that of the steps finished, and worth saving
        # On virtual CPU devices executions in flight can deadlock: each step is waited for.
        on_cpu = any(device.platform == "cpu" for device in self.carried.devices())
        self._ahead = 0 if on_cpu else 1
        self._began = self._finished = time.perf_counter()
        self._before = outputs.seconds
        bar = Bar(outputs.console, self.step, self.options.steps, self.options.tokens)
        with closing(self.profiler), Watch() as self._watch, bar as self._bar:
            try:
                return self._steps()
            except BaseException as error:
                self._rescue(error)
                raise

    def _steps(self) -> str:
        options = self.options
        self._evaluate()  # which a signal may have prevented
        stopped = self._decide()
        self._batch = self._take() if self.step < options.steps and not stopped else None
        while self.step < options.steps and not stopped:
            if isinstance(self._batch, _Failed):
                raise self._batch.error
            tick, other = time.perf_counter(), self._aside()
            started = self._advance()
            event = Event(self.step, self._evaluate(), started, self)
            self.beat(self.step, "callbacks")
            with self.timer.time("callbacks"):
                for callback in options.callbacks:
                    callback(event)
            stopped = self._decide()
            if self._due() or stopped:
                self._save()
            seconds = time.perf_counter() - tick - (self._aside() - other)
            self.timer.add("steps" if self.step > self.start + 1 else "first step", seconds)
        self.drain()
        self._save()
        return stopped

    def _aside(self) -> float:
        """Seconds spent on other things than steps."""
        asides = ("evaluation", "callbacks", "checkpoints")
        return sum(self.timer.seconds.get(name, 0.0) for name in asides)

    def _advance(self) -> Started:
        """One step; the batch of the next one is made while the devices work."""
        began = time.perf_counter()
        self._whole = False
        self.beat(self.step + 1, "step")
        with self.profiler.step(self.step - self.start) as profiled:
            metrics = self.carried.call(self.step_function, self._batch)
            if profiled:
                jax.block_until_ready((metrics, self.carried.arrays()))
        self.step += 1
        moment = self._watch.when(metrics)
        switches = self.step_function.count if isinstance(self.step_function, Switch) else None
        started = Started(self.step, began, metrics, self.carried.skipped(), switches)
        self._pending.append(started)
        if self.outputs.checkpoints:
            self._position = self.source.position()
        self._whole, self._batch = True, None
        if self.step < self.options.steps:
            tick = time.perf_counter()
            self._batch = self._take()
            if self.step > self.start + 1:
                self.timer.add("input", moment.waited(tick))
        while len(self._pending) > self._ahead:
            self._finish(self._pending.popleft())
        return started

    def _take(self) -> Any:
        self.beat(self.step, "input")
        try:
            batch = self.source.take(self.step)
            return batch if self.plan is None else place(batch, self.plan)
        except Exception as error:  # whatever the data raises
            return _Failed(error)

    def drain(self) -> None:
        """Wait for all steps that were started, and write about them."""
        while self._pending:
            self._finish(self._pending.popleft())

    def _finish(self, started: Started) -> None:
        step = started.step
        self.beat(self.step, "wait")
        started.found |= {name: float(x) for name, x in started.metrics.items()}
        self.beat(self.step, "metrics")
        self.metrics = dict(started.found)
        before, self._finished = self._finished, time.perf_counter()
        seconds = max(self._finished - max(before, started.began), 1e-9)
        extra: dict[str, Any] = {}
        if started.skipped is not None:
            skipped = int(started.skipped)
            bad = skipped > self.skipped or not has_finite_loss(self.metrics)
            self.bad, self.skipped = self.bad + 1 if bad else 0, skipped
            extra["skipped"] = skipped
        if started.switches is not None:
            extra["switches"] = started.switches
        if self.options.tokens:
            extra["tokens_per_s"] = round(self.options.tokens / seconds, 1)
        extra["seconds"] = round(self._elapsed(), 3)
        self.outputs.write(step, {**self.metrics, **extra})
        self._bar.show(step, self.metrics, self.skipped, seconds)
        if started.skipped is None and not has_finite_loss(self.metrics):
            raise self._ended(
                f"The loss of step {step} is {self.metrics['loss']}.",
                "Look at the data, or train afresh with a lower learning rate.",
            )
        if started.skipped is not None and self.bad >= self.options.max_skipped:
            raise self._ended(
                f"The steps {step - self.bad + 1} to {step} were not finite: {self.bad} in a row, and "
                f"max_skipped is {self.options.max_skipped}.",
                "Lower the learning rate or the loss scale, or look at the data.",
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
        if self._agreed("what comes before the evaluation", self._signal()):
            return None
        self.drain()
        self.beat(step, "evaluation")
        with self.timer.time("evaluation"):
            found = self.carried.evaluate(options.evaluate)
        values, elapsed = prefixed(found), self._elapsed()
        self.metrics |= values
        self.outputs.write(step, {**values, "seconds": round(elapsed, 3)})
        self._bar.evaluated(step, found, elapsed)
        if not has_finite_loss(found):
            if self._due():
                self._save()
            raise self._ended(
                f"The validation loss of step {step} is {found['loss']}.",
                "Look at what evaluate computes, or train afresh with a lower learning rate.",
            )
        self.validated = step
        return found

    def _decide(self) -> str:
        """What callbacks and signals asked for, as process 0 has it: done on all processes."""
        if stop := self._signal():
            self.wish["stop"] = stop
        wish, self.wish = self._agreed("what comes after this step", self.wish), {}
        if "switch" in wish and isinstance(self.step_function, Switch):
            self.step_function.use(wish["switch"])
        return wish.get("stop", "")

    def _signal(self) -> str:
        """The signal that this process got or, on process 0, any process: one host may be drained."""
        if self.interrupt.signal:
            own = signal.Signals(self.interrupt.signal).name
            self._signals.leave(own)
            return own
        return next(iter(self._signals.words()), "")

    def _due(self) -> bool:
        """Whether there is to be a checkpoint of this step."""
        return self.step % self.options.save_every == 0 or self.step == self.options.steps

    def _save(self) -> None:
        """The checkpoint of the steps finished, if there is a folder and it has none of them."""
        if self.outputs.checkpoints is None or self.saved == self.step:
            return
        self.drain()
        if self.step == self.start:
            self._position = self.source.position()
        self._whole = False  # saving it again would fail again
        self.beat(self.step, "checkpoint")
        with self.timer.time("checkpoints"):
            notes = {
                **self.options.notes,
                **self.source.notes(self._position),
                "metrics": {name: finite(x) for name, x in self.metrics.items()},
                "validated": self.validated,
                "bad": self.bad,
            }
            if isinstance(self.step_function, Switch):
                notes |= self.step_function.notes()
            folder, keep = self.outputs.checkpoints, self.options.keep
            checkpoint.save(folder, self.step, self.carried.arrays(), notes, keep)
        self.saved, self._whole = self.step, True

    def _last(self) -> str:
        """Which checkpoint a run that ends here can go on from."""
        if self.outputs.checkpoints is None:
            return ""
        if self.saved is None:
            return "There is no checkpoint yet."
        return f"The last checkpoint is that of step {self.saved}."

    def _ended(self, why: str, remedy: str) -> StepError:
        """The error of numbers that are not finite, after which nothing is saved."""
        self._whole = False
        self._told = StepError(" ".join(filter(None, (why, self._last(), remedy))))
        return self._told

    def _rescue(self, error: BaseException) -> None:
        """Save what is finished, where that can be, and note on the error where the run stands."""
        if self.outputs.checkpoints is None or not self.step or error is self._told:
            return
        # One of several processes cannot save alone: the others may be at their next step.
        alone = isinstance(error, Exception) and not distributed()
        if self._whole and alone:
            try:
                self._save()
            except CollcError as failed:
                error.add_note(f"collc.fit: step {self.step} could not be saved: {failed}")
        error.add_note(f"collc.fit: {self.step} steps are finished. {self._last()}")

    def _agreed(self, topic: str, value: Any) -> Any:
        """The value of process 0, on all processes."""
        if not distributed():
            return value
        self.beat(self.step, "wait")
        return json.loads(share(topic, json.dumps(value), self.agree_s))
