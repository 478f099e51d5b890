"""Where the time of a run went: input by the clock, compute and communication by jax's profiler.

What cannot be measured is None, and the report says why.
"""

import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import jax

from collc.errors import CollcError
from collc.receipts.profile import Profile, Span, read_profile
from collc.training.fitting.progress import clock

WARM = 2  # steps before the profiler starts: the first compiles, the second may once more

_COLLECTIVE = re.compile(
    r"(all[-_](reduce|gather|to[-_]all)|(p?sum|reduce)[-_]scatter|collective[-_](permute|broadcast)"
    r"|ragged[-_]all[-_]to[-_]all|ppermute|pbroadcast|p(sum|max|min)|send|recv)"
    r"([-_](start|done|invariant))?(\.\d+)*([-_](start|done))?"
)


PARTS = ("first step", "steps", "evaluation", "checkpoints", "callbacks")  # of a run's time


class Clock:
    """Seconds by what they were spent on, and since it was made."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._made = time.perf_counter()

    def total(self) -> float:
        return time.perf_counter() - self._made

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - began)


@dataclass(frozen=True)
class Split:
    """What devices did in the profiled steps, as shares of their time, the mean over devices.

    compute: some operation that is no collective ran. communication: collectives ran, and nothing
    else. hidden: collectives ran beside compute, in which it is contained. idle: nothing ran.
    """

    steps: int
    compute: float
    communication: float
    hidden: float
    idle: float


@dataclass(frozen=True)
class Report:
    """How a run went. Of this process, since it was started or resumed.

    Attributes:
      steps: finished in all, and how many of them here.
      seconds: "total", of the run; of the first step, which compiles; of all later ones with their
        input ("steps"); and of "input", "evaluation", "checkpoints" and "callbacks". "input" is the
        time in which the devices had finished a step, and the batch of the next was not there.
      input: share of the time in "steps"; None where there were none.
      compute, communication, hidden, idle: shares of the same time, see `Split`; None where they
        were not measured. On one device there is no communication: collectives count as compute.
      profiled: steps under the profiler, from which these are.
      why: what was not measured, and why; "" if all was.
      skipped: steps that were not finite and changed nothing.
      switches: how often the step was switched.
      stopped: "" at the end, else "SIGINT", "SIGTERM" or "callback", or the error that ended it.
      asked: how many steps were to be finished; 0 where that is not known.
    """

    steps: int
    here: int
    seconds: dict[str, float]
    input: float | None
    compute: float | None
    communication: float | None
    hidden: float | None
    idle: float | None
    profiled: int
    why: str
    skipped: int = 0
    switches: int = 0
    stopped: str = ""
    asked: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.here} steps in {_long(self.seconds.get('total', 0.0))}"]
        if self.here == 0 < self.steps:
            lines[0] += f": all {self.steps} were finished before"
        parts = {name: self.seconds.get(name, 0.0) for name in PARTS}
        parts["other"] = self.seconds.get("total", 0.0) - sum(parts.values())
        said = [f"{name} {_long(x)}" for name, x in parts.items() if x >= 0.05]
        if said:
            lines.append("of which " + ", ".join(said))
        if self.stopped:
            of = f" of {self.asked}" if self.asked else ""
            lines.insert(0, f"stopped by {self.stopped} after step {self.steps}{of}")
        shares = {
            name: getattr(self, name) for name in ("compute", "communication", "input", "idle")
        }
        known = [f"{name} {x:.1%}" for name, x in shares.items() if x is not None]
        if known:
            lines.append("share of time: " + ", ".join(known))
        if self.hidden:
            lines[-1] += f"; {self.hidden:.1%} more communication behind compute"
        if self.profiled:
            lines[-1] += f" ({self.profiled} steps profiled)"
        if self.why:
            lines.append(f"not measured: {self.why}")
        return "\n".join(lines)


def _long(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else clock(seconds)


def report(timer: Clock, split: Split | str, *, steps: int, here: int, **more: Any) -> Report:
    """The report of a run; ``split`` is what the profiler saw, or why it saw nothing."""
    total = timer.seconds.get("steps", 0.0)
    fed = timer.seconds.get("input", 0.0) / total if total else None
    measured = split if isinstance(split, Split) and fed is not None else None

    def share(name: str) -> float | None:
        return None if measured is None or fed is None else getattr(measured, name) * (1 - fed)

    why = split if isinstance(split, str) else ""
    if fed is None:
        after = "after the first one, which compiles" if here else "to do"
        why = f"all shares: there was no step {after}"
    return Report(
        steps=steps,
        here=here,
        seconds={
            name: round(x, 6) for name, x in (("total", timer.total()), *timer.seconds.items())
        },
        input=fed,
        compute=share("compute"),
        communication=share("communication"),
        hidden=share("hidden"),
        idle=share("idle"),
        profiled=measured.steps if measured else 0,
        why=why,
        **more,
    )


def is_collective(operation: str) -> bool:
    """Whether an HLO instruction, by its name, is a collective.

    >>> [is_collective(x) for x in ("all-reduce.1", "ppermute.38", "all-gather-start.2", "psum.3")]
    [True, True, True, True]
    >>> [is_collective(x) for x in ("add.1", "select_all_gather_fusion", "reduce.4", "dot_general.6")]
    [False, False, False, False]
    """
    return _COLLECTIVE.fullmatch(operation) is not None


def split(spans: Iterable[Span], seconds: float, steps: int, alone: bool = False) -> Split | str:
    """What devices did in ``steps`` steps that took ``seconds`` together; or why that is not known.

    ``alone``: there is one device, whose collectives have nobody to send to: they are copies.
    """
    by_device: dict[int, list[Span]] = {}
    for span in spans:
        by_device.setdefault(span.device, []).append(span)
    if not by_device:
        return "compute and communication: the profiler noted nothing of any device"
    busy, sent, both = 0.0, 0.0, 0.0
    for own in by_device.values():
        compute, sends = [], []
        for s in own:
            communicates = is_collective(s.operation) and not alone
            (sends if communicates else compute).append((s.start, s.end))
        busy += _length(compute)
        sent += _length(sends)
        both += _length([*compute, *sends])
    n = len(by_device) * seconds
    if both > 1.05 * n:
        return (
            f"compute and communication: the profiler noted {both / len(by_device):.3f} s of each "
            f"device in {seconds:.3f} s of steps, so it has seen more than the steps"
        )
    return Split(
        steps=steps,
        compute=busy / n,
        communication=(both - busy) / n,
        hidden=(busy + sent - both) / n,
        idle=max(0.0, 1 - both / n),
    )


def _length(spans: Sequence[tuple[float, float]]) -> float:
    """How long the union of intervals is.

    >>> _length([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


class Profiler:
    """Runs jax's profiler over some steps, from step ``WARM`` of this process on.

    ``result``: what it saw, or why it saw nothing, at any time.
    """

    def __init__(self, steps: int, devices: Sequence[Any]) -> None:
        self._wanted, self._seen, self._seconds = steps, 0, 0.0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._alone = len(devices) == 1
        self.result: Split | str = self._cannot(devices) or (
            "compute and communication: the run had too few steps for the profiler, which takes "
            f"{steps} after {WARM} others"
        )
        self._due = not self._cannot(devices)

    def _cannot(self, devices: Sequence[Any]) -> str:
        if not self._wanted:
            return "compute and communication: profile=0"
        if len(devices) > 1 and devices[0].platform == "cpu":
            return (
                f"compute and communication: {len(devices)} virtual CPU devices are threads that "
                "share cores"
            )
        return ""

    @contextmanager
    def step(self, number: int) -> Iterator[bool]:
        """Around the call of step ``number`` of this process and the wait for it; yields whether it
        is profiled, so that it has to be waited for."""
        if not self._due or number < WARM:
            yield False
            return
        if self._folder is None and not self._start():
            yield False
            return
        began = time.perf_counter()
        with jax.profiler.StepTraceAnnotation("collc", step_num=self._seen):
            yield True
        self._seconds += time.perf_counter() - began
        self._seen += 1
        if self._seen == self._wanted:
            self.close()

    def _start(self) -> bool:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        options.host_tracer_level = 1
        self._folder = tempfile.TemporaryDirectory(prefix="collc-profile-")
        try:
            jax.profiler.start_trace(self._folder.name, profiler_options=options)
        except RuntimeError as error:
            self.result = f"compute and communication: the profiler cannot be started: {error}"
            self._folder.cleanup()
            self._folder, self._due = None, False
            return False
        return True

    def close(self) -> None:
        """Stop the profiler if it runs, and read what it saw if that is all that was wanted."""
        folder, self._folder, self._due = self._folder, None, False
        if folder is None:
            return
        with folder:
            try:
                jax.profiler.stop_trace()
                if self._seen == self._wanted:
                    profile: Profile = read_profile(folder.name)
                    self.result = split(profile.spans, self._seconds, self._seen, self._alone)
            except (CollcError, RuntimeError, OSError) as error:
                self.result = f"compute and communication: {error}"
