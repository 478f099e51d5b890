"""How a train step scales: data parallelism from a few devices to thousands, schedule by schedule.

    step          = compute + exposed
    exposed       = what is left of communication beyond the share of compute that can hide it
    communication = the lowered price of one all-reduce of all parameters

Weak scaling keeps the work of a device, strong scaling that of all devices together. Nothing is timed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from collc.errors import CollcError, MachineError
from collc.language.algebra import Schedule
from collc.language.ir import integer
from collc.language.library import find
from collc.machine import nccl
from collc.machine.placement import placed
from collc.machine.price import Price, price
from collc.machine.scaling.effort import effort
from collc.machine.scaling.growing import Machines, default_counts, machines, mesh
from collc.machine.scaling.study import LeftOut, Outcome, Point, Study, exposed

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
        over = exposed(communication, self.compute, self.overlap)
        seconds = self.compute + over
        speedup = self.n * self.compute / seconds
        return Outcome(communication, over, seconds, speedup, speedup / self.n, over / seconds)


def _point(name: str, step: _Step, found: Price, error: float, beyond: bool) -> Point:
    low = high = middle = step.outcome(found.lowered)
    if beyond:
        low = step.outcome(found.lowered / (1 + error))
        high = step.outcome(found.lowered * (1 + error))
    return Point(step.n, name, step.compute, found.abstract, error, beyond, low, high, middle)


def _much(work: float) -> str:
    return f"about {work:.1e} sends and ranks x rounds to write out, more than {MOST_WORK:,}"
