"""How a train step scales: data parallelism from a few devices to thousands, schedule by schedule.

    step          = compute + exposed
    exposed       = what is left of communication beyond the share of compute that can hide it
    communication = the lowered price of one all-reduce of all parameters

Weak scaling keeps the work of a device, strong scaling that of all devices together. Nothing is timed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from collc.errors import CollcError, MachineError
from collc.language.algebra import Schedule
from collc.language.ir import integer
from collc.language.library import find
from collc.machine import nccl
from collc.machine.effort import effort
from collc.machine.growing import Machines, default_counts, machines, mesh
from collc.machine.placement import placed
from collc.machine.price import Price, price

AXES = ("host", "gpu")
NATIVE = "native"
# What is compared where nobody says else: flat, and by host with a scatter and a gather inside.
SCHEDULES = {
    NATIVE: "native.all_reduce @ (host, gpu)",
    "native by host": "native.reduce_scatter @ gpu >> native.all_reduce @ host "
    ">> native.all_gather @ gpu",
    "ring": "ring.all_reduce @ (host, gpu)",
    "ring by host": "ring.reduce_scatter @ gpu >> ring.all_reduce @ host >> ring.all_gather @ gpu",
    "halving": "halving.all_reduce @ (host, gpu)",
    "halving by host": "ring.reduce_scatter @ gpu >> halving.all_reduce @ host >> ring.all_gather @ gpu",
    "tree": "tree.double_all_reduce @ (host, gpu)",
    "tree by host": 'hierarchical("host", "gpu")',
    "8 servers": "server.shards(8) @ (host, gpu)",
}
MOST_WORK = 1 << 21  # sends, and ranks x rounds, of the unlike steps of a schedule


@dataclass(frozen=True)
class Outcome:
    """A step on some devices. Seconds; ``efficiency`` and ``share`` (of communication) are of 1."""

    communication: float
    exposed: float
    seconds: float
    speedup: float
    efficiency: float
    share: float


@dataclass(frozen=True)
class Point:
    """A schedule on a number of devices.

    Attributes:
      compute: seconds of a device.
      abstract: seconds of communication by the abstract model; None where XLA's own takes part.
      error: how far the lowered communication may be off, relative: see ``spread``.
      extrapolated: whether there are more than twice the calibrated devices: only a range is known.
      low, high: the ends of the range; both are ``middle`` where nothing is extrapolated.
      middle: as priced. Schedules are ranked by it.
    """

    devices: int
    schedule: str
    compute: float
    abstract: float | None
    error: float
    extrapolated: bool
    low: Outcome
    high: Outcome
    middle: Outcome


@dataclass(frozen=True)
class LeftOut:
    """A schedule that was not priced on a number of devices, and why."""

    devices: int
    schedule: str
    why: str


@dataclass(frozen=True)
class Reign:
    """Neighbouring numbers of devices, first to last, where a schedule is the best or tied with it."""

    first: int
    last: int
    tied: bool


@dataclass(frozen=True)
class Study:
    """What ``scale`` found. ``compute``: seconds, of a device if weak, of all work if ``strong``."""

    machine: str
    compute: float
    parameters: float
    overlap: float
    strong: bool
    calibrated: int
    schedules: Mapping[str, Schedule]
    points: tuple[Point, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(point.devices for point in self.points))

    def at(self, devices: int) -> tuple[Point, ...]:
        """The schedules on so many devices, the best first; equal steps by their communication."""
        found = [point for point in self.points if point.devices == devices]
        return tuple(sorted(found, key=lambda p: (p.middle.seconds, p.middle.communication)))

    def point(self, devices: int, schedule: str) -> Point | None:
        """One of them; None where it was left out."""
        return next((p for p in self.at(devices) if p.schedule == schedule), None)

    def ties(self, devices: int) -> tuple[str, ...]:
        """The best and all that the model cannot tell from it.

        They take no longer than the best would if its communication took 1 + error times as long.
        """
        best, *_ = own = self.at(devices)
        slower = best.middle.communication * (1 + best.error)
        most = best.compute + _exposed(slower, best.compute, self.overlap)
        return tuple(point.schedule for point in own if point.middle.seconds <= most)

    def reigns(self, schedule: str) -> tuple[Reign, ...]:
        """Where a schedule starts and stops winning. Alone and tied are told apart."""
        found: list[Reign] = []
        before = None
        for n in self.devices:
            ties = self.ties(n)
            if schedule in ties:
                tied = len(ties) > 1
                if found and found[-1].last == before and found[-1].tied == tied:
                    found[-1] = replace(found[-1], last=n)
                else:
                    found.append(Reign(n, n, tied))
            before = n
        return tuple(found)

    def explain(self) -> str:
        """Tables: the best for each number of devices, all steps, both models, who wins where."""
        from collc.machine.scaling_table import lines

        return "\n".join(lines(self))


def scale(
    machine: str | Machines,
    compute_seconds: float,
    parameter_bytes: float,
    devices: Sequence[int] | None = None,
    schedules: Mapping[str, Schedule | str] | None = None,
    *,
    overlap: float = 0.0,
    strong: bool = False,
    calibrated: int | None = None,
) -> Study:
    """How a data-parallel step scales on machines of one kind, of as many hosts as are needed.

    Args:
      machine: a text without a number of hosts, or a function from devices to a Machine. Fewer devices
        than a node has are a part of a node; more are whole nodes.
      compute_seconds: forward and backward of a device (of one device that does all, if ``strong``).
      parameter_bytes: what is all-reduced in a step, as it travels.
      devices: how many. Default: 8 to 4,096, twice as many each time, in parts of a node or whole nodes.
      schedules: all-reduces by name, placed on host and gpu or unplaced. XLA's own is always added.
      overlap: the share of compute beside which communication can run and is hidden, 0 to 1.
      calibrated: devices up to which the prices are trusted; default ``nccl.calibrated``.

    Left out, and listed, is a schedule that needs more than MOST_WORK sends, or ranks x rounds, in steps
    that are not alike: halving and servers over more than about 1,024 ranks.
    Raises MachineError, and what ``find`` does.
    """
    _checked(compute_seconds, parameter_bytes, overlap, calibrated)
    make = machines(machine) if isinstance(machine, str) else machine
    own = _schedules(SCHEDULES if schedules is None else schedules)
    counts = default_counts(make) if devices is None else _counts(devices)
    points: list[Point] = []
    left_out: list[LeftOut] = []
    trusted = calibrated or nccl.calibrated(make(counts[-1]))
    for n in counts:
        on, sizes = make(n), mesh(make(n), n)
        for name, schedule in own.items():
            try:
                if name != NATIVE and (work := effort(schedule, sizes)) > MOST_WORK:
                    left_out.append(LeftOut(n, name, _much(work)))
                    continue
                found = price(schedule, placed(on, sizes), parameter_bytes)
            except CollcError as e:
                if name == NATIVE:
                    raise
                left_out.append(LeftOut(n, name, str(e).splitlines()[0]))
                continue
            step = _Step(n, compute_seconds, overlap, strong)
            error = spread(nccl.error(on, n), n, trusted)
            points.append(_point(name, step, found, error, n > 2 * trusted))
    title = machine if isinstance(machine, str) else str(make(counts[-1]))
    return Study(
        title, compute_seconds, parameter_bytes, overlap, strong, trusted, own,
        tuple(points), tuple(left_out),
    )  # fmt: skip


def spread(error: float, devices: int, calibrated: int) -> float:
    """The model's relative error on so many devices: ``error`` up to twice the calibrated ones.

    Beyond, as much again for each further doubling. A time t is then from t / (1 + e) to t (1 + e).

    >>> spread(0.12, 256, 128), round(spread(0.12, 512, 128), 2), round(spread(0.12, 4096, 128), 2)
    (0.12, 0.24, 0.6)
    """
    return error * (1 + max(0.0, math.log2(devices / (2 * calibrated))))


def _checked(compute: float, size: float, overlap: float, calibrated: int | None) -> None:
    if not (math.isfinite(compute) and compute > 0):
        raise MachineError(f"compute takes {compute} s, which cannot be. Give more than 0.")
    if not (math.isfinite(size) and size > 0):
        raise MachineError(f"parameters of {size} bytes cannot be reduced. Give 1 byte or more.")
    if not 0 <= overlap <= 1:
        raise MachineError(f"overlap {overlap} is no share of the compute. Give 0 to 1.")
    if calibrated is not None and calibrated < 1:
        raise MachineError(f"calibrated on {calibrated} devices. Give 1 or more.")


def _counts(devices: Sequence[int]) -> tuple[int, ...]:
    found = [integer(n) for n in devices]
    if not found or any(n is None or n < 1 for n in found):
        raise MachineError(f"devices {list(devices)}: give numbers from 1, as in 8, 64, 512.")
    return tuple(sorted({n for n in found if n}))


def _schedules(given: Mapping[str, Schedule | str]) -> dict[str, Schedule]:
    found = {NATIVE: find(SCHEDULES[NATIVE])}
    for name, what in given.items():
        schedule = find(what) if isinstance(what, str) else what
        schedule = schedule if schedule.axes else schedule @ AXES
        kind = schedule.collective
        if kind is None or kind.name != "all_reduce":
            raise MachineError(
                f"{schedule} is {f'{kind.name}, not an' if kind else 'no'} all-reduce; data parallelism "
                "sums its gradients everywhere. Take an all_reduce."
            )
        if not set(schedule.axes) <= set(AXES):
            raise MachineError(
                f"{schedule} is placed on {', '.join(schedule.axes)}; machines that grow have host and "
                "gpu. Place it on those."
            )
        found[name] = schedule
    return found


def _exposed(communication: float, compute: float, overlap: float) -> float:
    return max(0.0, communication - overlap * compute)


@dataclass(frozen=True)
class _Step:
    """A step on n devices, whatever its schedule. ``whole``: compute as ``scale`` is given it."""

    n: int
    whole: float
    overlap: float
    strong: bool

    @property
    def compute(self) -> float:
        return self.whole / self.n if self.strong else self.whole

    def outcome(self, communication: float) -> Outcome:
        exposed = _exposed(communication, self.compute, self.overlap)
        seconds = self.compute + exposed
        speedup = self.n * self.compute / seconds
        return Outcome(
            communication, exposed, seconds, speedup, speedup / self.n, exposed / seconds
        )


def _point(name: str, step: _Step, found: Price, error: float, beyond: bool) -> Point:
    low = high = middle = step.outcome(found.lowered)
    if beyond:
        low = step.outcome(found.lowered / (1 + error))
        high = step.outcome(found.lowered * (1 + error))
    return Point(step.n, name, step.compute, found.abstract, error, beyond, low, high, middle)


def _much(work: float) -> str:
    return f"about {work:.1e} sends and ranks x rounds to write out, more than {MOST_WORK:,}"
