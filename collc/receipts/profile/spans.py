"""A profile: which device ran which operation when, and whose operation that was."""

import re
from bisect import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from collc.errors import DataError
from collc.receipts.profile.names import Names, Place, is_cut, of_text, of_xplane, placed
from collc.receipts.profile.trace import ENDING, events, located

_PICO = 1e-12
_PER_MICRO = 10**6


@dataclass(frozen=True)
class Span:
    """One operation on one device.

    Attributes:
      device: as the profiler numbers it: the device's ``local_hardware_id``.
      title: of the schedule's leaf, as "ring.all_gather @ gpu"; of other operations the last names of
        JAX's stack, as "mlp/dot_general"; "" of XLA's own.
      round: "r3", or "r0-6" of a loop's rounds, each of which is a span; "" if it is not a round.
      plan: whether it belongs to a schedule.
      start: seconds since the first span began.
      end: likewise.
      operation: the HLO instruction's name.
      module: the program's name.
      run: which execution of the program, from 0; None where the profiler does not say.
    """

    device: int
    title: str
    round: str
    plan: bool
    start: float
    end: float
    operation: str
    module: str
    run: int | None

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Profile:
    """What a profiler noted.

    Attributes:
      file: the trace.
      spans: by start, then device. Loops and calls, which hold other spans, are left out.
      unnamed: how many kernels and copies on GPUs name no operation, such as those of CUDA graphs,
        which XLA's ``--xla_gpu_enable_command_buffer=`` turns off.
    """

    file: str
    spans: tuple[Span, ...] = field(repr=False)
    unnamed: int

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted({s.device for s in self.spans}))

    @cached_property
    def runs(self) -> dict[tuple[str, int], tuple[Span, ...]]:
        """The spans of each (module, run), with times from the first of them on."""
        found: dict[tuple[str, int], list[Span]] = {}
        for span in self.spans:
            if span.run is not None:
                found.setdefault((span.module, span.run), []).append(span)
        return {key: rebased(spans) for key, spans in found.items()}


def rebased(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The spans with times from the first of them on."""
    spans = tuple(spans)
    first = min((s.start for s in spans), default=0.0)
    return tuple(replace(s, start=s.start - first, end=s.end - first) for s in spans)


def read_profile(path: str | Path, *, hlo: str | Iterable[str] = ()) -> Profile:
    """Read what jax.profiler noted of programs on CPU or GPU devices.

    Args:
      path: the folder that jax.profiler.trace was given (of several runs the newest is read), that of
        one run, or a .trace.json.gz or .json file.
      hlo: ``compiled.as_text()`` of the programs, from which scopes are known. By default they are
        taken from the HOST.xplane.pb beside the trace or, of GPUs, from the events.

    Executions are told apart by XLA's run ids, which CPUs note; on GPUs by the
    jax.profiler.StepTraceAnnotation in which an operation began, which is right where each step is
    waited for.

    Raises DataError, which names the file, for one that is missing, empty, truncated, too large, no
    trace, or without operations of XLA; HloError for text that is not understood.
    """
    file = located(Path(path))
    texts = [hlo] if isinstance(hlo, str) else list(hlo)
    read = events(file)
    operations, unnamed = _operations(file, read)
    if not operations:
        graphs = f"; {unnamed} kernels name no operation (CUDA graphs?)" if unnamed else ""
        raise DataError(
            f"{file} has {len(read)} events, and none is an operation of XLA{graphs}. Run a jitted "
            "function inside jax.profiler.trace, and block until its result is there."
        )
    beside = file.with_name(file.name.removesuffix(ENDING) + ".xplane.pb")
    programs = [of_text(text) for text in texts]
    if not texts and file.name.endswith(ENDING) and beside.exists():
        programs = of_xplane(beside)
    names = Names(programs)
    places = [_place(file, names, o) for o in operations]
    if all(place is None for place in places):
        modules = ", ".join(sorted({o.module for o in operations}))
        raise DataError(
            f"{file} has operations of {modules}, but nothing says to which scopes they belong: pass "
            f"hlo=compiled.as_text() of it, or keep {beside.name} beside the trace."
        )
    runs = _numbered(operations)
    first = min(o.start for o in operations)
    spans = [
        Span(
            device=o.device,
            title=place.title,
            round=place.round,
            plan=place.plan,
            start=(o.start - first) * _PICO,
            end=(o.end - first) * _PICO,
            operation=o.name,
            module=o.module,
            run=None if o.execution is None else runs[o.module, o.execution],
        )
        for o, place in zip(operations, (p or Place() for p in places), strict=True)
    ]
    spans.sort(key=lambda s: (s.start, s.device, s.end))
    return Profile(str(file), tuple(spans), unnamed)


@dataclass(frozen=True)
class _Operation:
    """An event of a device. Times in picoseconds, exact. ``execution``: of which program's execution."""

    device: int
    lane: tuple[Any, Any]
    start: int
    end: int
    name: str
    module: str
    execution: str | None
    op_name: str


def _operations(file: Path, found: list[dict[str, Any]]) -> tuple[list[_Operation], int]:
    """The operations that hold no others, and how many events of GPUs are not of any."""
    devices, streams = _devices(file, found), _streams(found)
    steps = sorted(
        (_pico(e["ts"]), _pico(e["ts"] + e.get("dur", 0)))
        for e in found
        if e.get("ph") == "X" and "step_num" in e.get("args", {})
    )
    unnamed = 0
    operations = []
    for e in found:
        args = e.get("args", {})
        device = devices.get(e.get("pid"))
        if e.get("ph") != "X" or (device is not None and not streams.get(_lane(e), True)):
            continue
        if device is None and not ("hlo_op" in args and "device_ordinal" in args):
            continue  # of the host
        if "hlo_op" not in args:
            unnamed += 1
            continue
        start = _pico(e["ts"])
        operations.append(
            _Operation(
                device=_ordinal(file, args) if device is None else device,
                lane=_lane(e),
                start=start,
                end=start + _pico(e.get("dur", 0)),
                name=str(args["hlo_op"]),
                module=str(args.get("hlo_module", "")),
                execution=str(args["run_id"]) if "run_id" in args else _step(steps, start),
                op_name=_op_name(args),
            )
        )
    return _innermost(operations), unnamed


def _devices(file: Path, found: list[dict[str, Any]]) -> dict[Any, int]:
    """GPUs by the number of their process."""
    devices: dict[Any, int] = {}
    for e in found:
        if e.get("ph") == "M" and e.get("name") == "process_name":
            gpu = re.search(r"/device:GPU:(\d+)", str(e.get("args", {}).get("name")))
            if gpu and int(gpu[1]) in devices.values() and devices.get(e.get("pid")) != int(gpu[1]):
                raise DataError(
                    f"{file} has GPU {gpu[1]} twice: it is of several hosts. Name the trace of one."
                )
            if gpu:
                devices[e.get("pid")] = int(gpu[1])
    return devices


def _streams(found: list[dict[str, Any]]) -> dict[tuple[Any, Any], bool]:
    """Whether a thread that has a name is a stream, not a line that a viewer made of them."""
    return {
        _lane(e): str(e.get("args", {}).get("name")).startswith("Stream #")
        for e in found
        if e.get("ph") == "M" and e.get("name") == "thread_name"
    }


def _lane(event: dict[str, Any]) -> tuple[Any, Any]:
    return event.get("pid"), event.get("tid")


def _pico(micros: float) -> int:
    return round(micros * _PER_MICRO)


def _ordinal(file: Path, args: dict[str, Any]) -> int:
    try:
        return int(args["device_ordinal"])
    except (TypeError, ValueError):
        raise DataError(
            f"{file}: {args['hlo_op']} ran on device {args['device_ordinal']!r}, which is no number."
        ) from None


def _op_name(args: dict[str, Any]) -> str:
    """JAX's name as a GPU's event has it: XLA takes the start that a module's names share off."""
    prefix, name = str(args.get("prefix", "")), str(args.get("name", ""))
    if prefix and name and not name.startswith(prefix):
        return f"{prefix}/{name}"
    found = (str(args.get(key, "")) for key in ("name", "tf_op", "long_name"))
    return next((name for name in found if "/" in name), "")


def _step(steps: list[tuple[int, int]], at: int) -> str | None:
    """The last of the steps to begin before, unless it has ended."""
    k = bisect(steps, at, key=lambda step: step[0]) - 1
    return str(k) if k >= 0 and at < steps[k][1] else None


def _innermost(operations: list[_Operation]) -> list[_Operation]:
    """Those that no other runs within, on the same thread or stream."""
    kept: list[_Operation] = []
    open_: dict[tuple[Any, Any], _Operation] = {}
    for o in sorted(operations, key=lambda o: (o.start, -o.end)):
        before = open_.get(o.lane)
        if before is not None and not (o.start < before.end and o.end <= before.end):
            kept.append(before)
        open_[o.lane] = o
    return kept + list(open_.values())


def _place(file: Path, names: Names, o: _Operation) -> Place | None:
    known = names.place(o.module, o.name)
    if known is not None or not o.op_name:
        return known
    if is_cut(o.op_name):
        raise DataError(
            f"{file}: {o.name} is of the scope {o.op_name}, which the profiler may have cut at a comma. "
            f"Pass hlo=compiled.as_text() of {o.module}."
        )
    return placed(o.op_name)


def _numbered(operations: list[_Operation]) -> dict[tuple[str, str], int]:
    """The number of each (module, execution), in the order in which a module's began."""
    numbers: dict[tuple[str, str], int] = {}
    seen: dict[str, int] = {}
    for o in sorted(operations, key=lambda o: o.start):
        if o.execution is not None and (o.module, o.execution) not in numbers:
            numbers[o.module, o.execution] = seen.get(o.module, 0)
            seen[o.module] = seen.get(o.module, 0) + 1
    return numbers
