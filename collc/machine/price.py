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
from collc.language.ir import Ints
from collc.machine import nccl
from collc.machine.bounds import Bound, bound
from collc.machine.flow import Flow, Messages, Moment, Part, flow
from collc.machine.placement import Placement
from collc.machine.topology import Floats, Machine, Paths


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


def price(schedule: Schedule, placement: Placement, size: float, element: int = 4) -> Price:
    """The price of a schedule for ``size`` bytes, the whole buffer of a rank, of such elements.

    Raises MachineError where the size is not positive, else what ``flow`` does.
    """
    if not (math.isfinite(size) and size > 0):
        raise MachineError(f"a size of {size} bytes has no price. Give 1 byte or more.")
    return priced(flow(schedule, placement.sizes), placement, size, element)


def priced(what: Flow, placement: Placement, size: float, element: int = 4) -> Price:
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
        lowered, how, rounds = [], [], 0
        for part, moment in parts:
            if moment is None:
                terms, said = self._native(part)
                lowered.append(terms)
                how.append(said)
                continue
            found = moment.messages()
            rounds += found.rounds
            lowered += [self._round(part, sent, total) for sent in found.by_round()]
        busy = total.bytes * self.machine.beta
        worst = int(busy.argmax())
        sends = bool(busy[worst])
        row = Row(
            title=" | ".join(str(part.leaf) for part, _ in parts),
            steps=1,
            rounds=rounds if not how else 0,
            messages=0 if how else total.messages,
            bytes=total.largest,
            link=self.machine.name(worst) if sends else "",
            kind=self.machine.kinds[self.machine.kind[worst]] if sends else "",
            abstract=None if how else total.terms(),
            lowered=Terms(*(fsum(getattr(t, f.name) for t in lowered) for f in fields(Terms))),
            how=", ".join(how),
        )
        return row, total.bytes

    def _round(self, part: Part, sent: Messages, total: "_Load") -> Terms:
        """One round as XLA runs it; its messages are added to the load of the tick."""
        machine, order = self.machine, self.placement.order
        src, dst = order[sent.src], order[sent.dst]
        paths = machine.paths(src, dst)
        share = Fraction(self.size) * part.chunk
        total.add(paths, src, dst, sent, float(share))
        # A ppermute moves equal arrays: as many whole chunks, of whole elements, as any pair has.
        whole = math.ceil(share / self.element) * self.element * int(sent.chunks.max())
        each = machine.crossed(paths, np.full(len(src), float(whole)))
        launch = self.constants.round(float(paths.latency.max()), bool(self._far(src, dst)))
        busy = each * machine.beta / self.constants.efficiency(machine)
        return Terms(launch, float(busy.max()), whole * machine.gamma * bool(sent.added.any()))

    def _far(self, src: Ints, dst: Ints) -> bool:
        return bool((self.machine.node_of(src) != self.machine.node_of(dst)).any())

    def _native(self, part: Part) -> tuple[Terms, str]:
        groups = self.placement.order[part.table.T]
        size = float(Fraction(self.size) * part.strand.share)
        found = nccl.native(self.machine, groups, part.leaf.facing.name, size)
        self.in_network |= found.in_network
        said = f"{found.algorithm} {found.protocol}".rstrip()
        return Terms(found.latency, found.bandwidth, 0.0), said

    def traffic(self) -> dict[str, Traffic]:
        """The bytes of our own sends, class by class."""
        kind = self.machine.kind
        return {
            name: Traffic(float(own.sum()), float(own.max(initial=0.0)))
            for k, name in enumerate(self.machine.kinds)
            for own in [self.carried[kind == k]]
            if own.any()
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

    def add(self, paths: Paths, src: Ints, dst: Ints, sent: Messages, chunk: float) -> None:
        bytes = sent.chunks.astype(np.float64) * chunk
        self.bytes += self.machine.crossed(paths, bytes)
        for side, ends in enumerate((src, dst)):
            self.late[side] += np.bincount(ends, paths.latency, self.machine.devices)
            self.count[side] += np.bincount(ends, minlength=self.machine.devices)
        self.added += np.bincount(dst, sent.added * chunk, self.machine.devices)
        self.latest = max(self.latest, float(paths.latency.max()))
        self.largest = max(self.largest, float(bytes.max()))

    @property
    def messages(self) -> int:
        return int(self.count.max())

    def terms(self) -> Terms:
        """By the abstract model: a device's messages wait for a port, and share its links."""
        latency = max(self.latest, float(self.late.max()) / self.machine.ports)
        busy = float((self.bytes * self.machine.beta).max())
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
