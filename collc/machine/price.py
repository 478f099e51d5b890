"""What a schedule costs on a machine, in lock-step, by two models that are always told apart.

*Abstract*: what its sends cost on the links: for each step the latencies of the busiest rank's
messages, then the bytes of the busiest link, then the additions of the busiest rank. *Lowered*: what
XLA runs: a launch for each round, whole chunks, one collective at a time; and XLA's own collectives
by NCCL-like terms. Formulas: Thakur, Rabenseifner and Gropp 2005; for NCCL see ``collc.machine.nccl``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from itertools import groupby
from math import fsum

import numpy as np

from collc.errors import MachineError
from collc.language.algebra import Schedule
from collc.machine import lowered, nccl
from collc.machine.bounds import Bound, bound
from collc.machine.flow import Flow, Moment, Part, flow
from collc.machine.placement import Placement
from collc.machine.topology import Floats, Machine


@dataclass(frozen=True)
class Terms:
    """Seconds of a step: latencies or launches, bytes on the busiest link, additions."""

    latency: float
    bytes: float
    adding: float

    @property
    def seconds(self) -> float:
        return self.latency + self.bytes + self.adding


@dataclass(frozen=True)
class Row:
    """Steps that are alike, one after another.

    Attributes:
      title: the leaves at work.
      steps: how many steps there are.
      rounds: partial permutations in each; 0 where XLA's own is among them.
      messages: that the busiest rank sends or receives, in each; 0 where nobody knows.
      bytes: of the largest message, in bytes.
      link, kind: the busiest link and its class; "" where nothing of ours is sent.
      abstract: of one step; None where XLA's own is at work, whose sends nobody knows.
      lowered: of one step.
      how: what XLA's own does there, such as "ring Simple"; "" for steps of ours.
    """

    title: str
    steps: int
    rounds: int
    messages: int
    bytes: float
    link: str
    kind: str
    abstract: Terms | None
    lowered: Terms
    how: str = ""


@dataclass(frozen=True)
class Traffic:
    """Bytes over one class of link: of all its links, and of the one that carries most."""

    total: float
    busiest: float


@dataclass(frozen=True)
class Price:
    """What a schedule costs. Seconds and bytes.

    ``abstract`` and ``traffic`` are None and partial where XLA's own takes part. ``bound`` is None
    where the schedule is not one collective on all its axes. ``in_network``: XLA's own adds in the
    switches, which the bound knows nothing of.
    """

    schedule: Schedule
    placement: Placement
    size: float
    rows: tuple[Row, ...]
    abstract: float | None
    lowered: float
    traffic: Mapping[str, Traffic]
    bound: Bound | None
    in_network: bool

    @property
    def gap(self) -> float | None:
        """The abstract price over the bound; None where one of them is unknown or 0."""
        if self.bound is None or self.abstract is None or not self.bound.seconds:
            return None
        return self.abstract / self.bound.seconds


def price(
    schedule: Schedule, placement: Placement, size: float, element: int = lowered.ELEMENT
) -> Price:
    """The price of a schedule for ``size`` bytes, the whole buffer of a rank, of such elements.

    Raises MachineError where the size is not positive, else what ``flow`` does.
    """
    if not (math.isfinite(size) and size > 0):
        raise MachineError(f"a size of {size} bytes has no price. Give 1 byte or more.")
    return priced(flow(schedule, placement.sizes), placement, size, element)


def priced(what: Flow, placement: Placement, size: float, element: int = lowered.ELEMENT) -> Price:
    """The price of a flow: see ``price``."""
    books = _Books(what, placement, size, element)
    rows = [books.row(now, len(list(same))) for now, same in groupby(what.ticks())]
    return Price(
        schedule=what.schedule,
        placement=placement,
        size=size,
        rows=tuple(rows),
        abstract=None
        if what.native
        else fsum(r.steps * r.abstract.seconds for r in rows if r.abstract),
        lowered=fsum(r.steps * r.lowered.seconds for r in rows),
        traffic=books.traffic(),
        bound=_bound(what, placement, size),
        in_network=books.in_network,
    )


Tick = tuple[tuple[int, Moment | None], ...]


class _Books:
    """Prices of ticks, each worked out once, and the bytes that every link has carried."""

    def __init__(self, what: Flow, placement: Placement, size: float, element: int) -> None:
        self.what, self.placement, self.machine = what, placement, placement.machine
        self.size, self.element = size, element
        self.constants = nccl.constants(self.machine)
        self.carried = np.zeros(len(self.machine.beta))
        self.known: dict[Tick, tuple[Row, Floats]] = {}
        self.in_network = False

    def row(self, now: Tick, steps: int) -> Row:
        if now not in self.known:
            self.known[now] = self._row(now)
        row, load = self.known[now]
        self.carried += load * steps
        return replace(row, steps=steps)

    def _row(self, now: Tick) -> tuple[Row, Floats]:
        """The row of one tick, and the bytes that it puts on every link."""
        parts = [(self.what.parts[i], moment) for i, moment in now]
        total = _Load(self.machine)
        terms: list[Terms] = []
        how: list[str] = []
        rounds = 0
        for part, moment in parts:
            if moment is None:
                found = lowered.native(part, self.placement, self.size)
                self.in_network |= found.in_network
                terms.append(Terms(found.latency, found.bandwidth, 0.0))
                how.append(f"{found.algorithm} {found.protocol}".rstrip())
                continue
            each = [self._round(part, one, total) for one in lowered.rounds(moment, self.placement)]
            rounds += len(each)
            terms += each
        busy = total.bytes * self.machine.beta
        worst = int(busy.argmax()) if busy.any() else -1
        row = Row(
            title=" | ".join(str(part.leaf) for part, _ in parts),
            steps=1,
            rounds=rounds if not how else 0,
            messages=0 if how else total.messages,
            bytes=total.largest,
            link=self.machine.name(worst) if worst >= 0 else "",
            kind=self.machine.kinds[self.machine.kind[worst]] if worst >= 0 else "",
            abstract=None if how else total.terms(),
            lowered=Terms(*(fsum(getattr(t, f.name) for t in terms) for f in fields(Terms))),
            how=", ".join(how),
        )
        return row, total.bytes

    def _round(self, part: Part, one: lowered.Round, total: "_Load") -> Terms:
        """One round as XLA runs it; its messages are added to the load of the tick."""
        machine = self.machine
        share = Fraction(self.size) * part.chunk
        total.add(one, float(share))
        bytes = lowered.whole(share, self.element) * one.chunks
        each = machine.crossed(one.paths, np.full(len(one.src), float(bytes)))
        busy = each * machine.beta / self.constants.efficiency(machine)
        launch = self.constants.round(one.latency, one.far)
        return Terms(launch, float(busy.max(initial=0.0)), bytes * machine.gamma * one.adds)

    def traffic(self) -> dict[str, Traffic]:
        """The bytes of our own sends, class by class."""
        kind = self.machine.kind
        return {
            name: Traffic(float(own.sum()), float(own.max()))
            for k, name in enumerate(self.machine.kinds)
            if (own := self.carried[kind == k]).any()
        }


class _Load:
    """What happens at once: bytes on every link, and for each device its latencies and additions."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.bytes = np.zeros(len(machine.beta))
        self.late = np.zeros((2, machine.devices))  # sending, receiving
        self.count = np.zeros((2, machine.devices), np.int64)
        self.added = np.zeros(machine.devices)
        self.latest = self.largest = 0.0

    def add(self, one: lowered.Round, chunk: float) -> None:
        """The messages of a round, of chunks of so many bytes."""
        bytes = one.sent.chunks.astype(np.float64) * chunk
        self.bytes += self.machine.crossed(one.paths, bytes)
        for side, ends in enumerate((one.src, one.dst)):
            self.late[side] += np.bincount(ends, one.paths.latency, self.machine.devices)
            self.count[side] += np.bincount(ends, minlength=self.machine.devices)
        self.added += np.bincount(one.dst, one.sent.added * chunk, self.machine.devices)
        self.latest = max(self.latest, one.latency)
        self.largest = max(self.largest, float(bytes.max()))

    @property
    def messages(self) -> int:
        return int(self.count.max())

    def terms(self) -> Terms:
        """By the abstract model: a device's messages wait for a port, and share its links."""
        latency = max(self.latest, float(self.late.max()) / self.machine.ports)
        busy = float((self.bytes * self.machine.beta).max(initial=0.0))
        return Terms(latency, busy, float(self.added.max()) * self.machine.gamma)


def _bound(what: Flow, placement: Placement, size: float) -> Bound | None:
    kind = what.schedule.collective
    if kind is None or not what.parts:
        return None
    own = what.schedule.axes or ("",)
    axes = list(what.sizes)
    grid = placement.order.reshape(list(what.sizes.values()))
    rest = [i for i, a in enumerate(axes) if a not in own]
    n = math.prod(what.sizes[a] for a in own)
    groups = grid.transpose(rest + [axes.index(a) for a in own]).reshape(-1, n)
    return bound(placement.machine, groups, kind, size)
