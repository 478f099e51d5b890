"""What leaves cost by size: the lowered price of ``collc.machine.price`` as a line in whole elements.

In that model one collective is in flight at a time, so a schedule costs what its leaves do; and a
round of ours costs a launch and whole chunks. So each leaf is looked at once, for all schedules, all
sizes, and machines that differ in their speeds alone.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from collc.analysis.strands import strands
from collc.language.algebra import Leaf, Schedule
from collc.language.ir import Ints
from collc.machine import lowered, nccl
from collc.machine.flow import Moment, Part, flow
from collc.machine.placement import Placement
from collc.machine.topology import NETWORK, UPLINK, Floats, Machine


@dataclass(frozen=True)
class Speeds:
    """Times as long that launches and hops take, and times as fast that links are, as on the machine."""

    launch: float = 1.0
    inside: float = 1.0
    network: float = 1.0


PLAIN = Speeds()


@dataclass(frozen=True, eq=False)
class Curve:
    """A leaf of ours: rounds that are alike, [k], and what each takes.

    Attributes:
      chunk: the share of the leaf's own buffer that a chunk is.
      count: how often such a round comes.
      far: whether it leaves a node.
      latency: of its slowest way, seconds.
      chunks: the most that a pair has.
      busy: seconds per byte of whole chunks on the busiest link of each class, [k, kinds].
      adds: whether something is added.
    """

    chunk: Fraction
    count: Ints
    far: NDArray[np.bool_]
    latency: Floats
    chunks: Ints
    busy: Floats
    adds: NDArray[np.bool_]

    @property
    def rounds(self) -> int:
        return int(self.count.sum())


class Costs:
    """Lowered prices of schedules on a placement, leaf by leaf."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self._curves: dict[Leaf, Curve | Ints] = {}
        self._lines: dict[tuple[Leaf, Speeds], tuple[float, float]] = {}
        self._natives: dict[tuple[Leaf, float, Speeds], float] = {}
        self._machines: dict[Speeds, tuple[Machine, nccl.Constants, Floats]] = {}
        self._strands: dict[Schedule, tuple[tuple[Leaf, Fraction], ...]] = {}

    def leaves(self, schedule: Schedule) -> tuple[tuple[Leaf, Fraction], ...]:
        """Its leaves, each with the share of the buffer that is its own."""
        if schedule not in self._strands:
            found = strands(schedule, self.placement.sizes)
            self._strands[schedule] = tuple((s.leaf, s.share) for s in found)
        return self._strands[schedule]

    def rounds(self, leaf: Leaf) -> int:
        """How many rounds it has; one of XLA's own counts as one."""
        found = self._curve(leaf)
        return found.rounds if isinstance(found, Curve) else 1

    def of(self, schedule: Schedule, size: float, speeds: Speeds = PLAIN) -> float:
        """Seconds for ``size`` bytes, a rank's full buffer."""
        each = (
            self.leaf(own, share * Fraction(size), speeds) for own, share in self.leaves(schedule)
        )
        return math.fsum(each)

    def leaf(self, leaf: Leaf, size: Fraction, speeds: Speeds = PLAIN) -> float:
        """Seconds of a leaf for its own full buffer of ``size`` bytes."""
        found = self._curve(leaf)
        if not isinstance(found, Curve):
            key = leaf, float(size), speeds
            if key not in self._natives:
                machine = self._at(speeds)[0]
                own = nccl.native(machine, found, leaf.facing.name, float(size))
                self._natives[key] = own.seconds
            return self._natives[key]
        if (leaf, speeds) not in self._lines:
            self._lines[leaf, speeds] = self._line(found, speeds)
        launches, slope = self._lines[leaf, speeds]
        return launches + slope * lowered.whole(size * found.chunk)

    def _line(self, curve: Curve, speeds: Speeds) -> tuple[float, float]:
        """Seconds whatever the size, and for each byte of a chunk."""
        machine, constants, reached = self._at(speeds)
        each = zip(curve.latency.tolist(), curve.far.tolist(), strict=True)
        launch = np.array([constants.round(late, bool(far)) for late, far in each])
        busy = (curve.busy * reached).max(1, initial=0.0)
        slope = curve.chunks * (busy + machine.gamma * curve.adds)
        return float(curve.count @ launch), float(curve.count @ slope)

    def _at(self, speeds: Speeds) -> tuple[Machine, nccl.Constants, Floats]:
        """The machine at these speeds, its constants, and by class what ``Curve.busy`` is to take."""
        if speeds not in self._machines:
            plain = self.placement.machine
            machine = scaled(plain, speeds)
            own = nccl.constants(machine)
            own = replace(
                own,
                launch=own.launch * speeds.launch,
                near=own.near * speeds.launch,
                far=own.far * speeds.launch,
            )
            reached = np.array(
                [1 / own.reached[kind] / _faster(kind, speeds) for kind in plain.kinds]
            )
            self._machines[speeds] = machine, own, reached
        return self._machines[speeds]

    def _curve(self, leaf: Leaf) -> Curve | Ints:
        """Of a leaf of ours; for XLA's own the groups of devices."""
        if leaf not in self._curves:
            (part,) = flow(leaf, self.placement.sizes).parts
            groups = self.placement.order[part.table.T]
            self._curves[leaf] = groups if part.moments is None else self._looked_at(part)
        return self._curves[leaf]

    def _looked_at(self, part: Part) -> Curve:
        moments: dict[Moment, int] = {}
        for moment in part.moments or ():
            moments[moment] = moments.get(moment, 0) + 1
        rows = [(times, *row) for m, times in moments.items() for row in self._rounds(m)]
        columns = list(zip(*rows, strict=True)) or [()] * 6
        count, far, latency, chunks, adds, busy = columns
        return Curve(
            chunk=part.chunk,
            count=np.array(count, np.int64),
            far=np.array(far, np.bool_),
            latency=np.array(latency, np.float64),
            chunks=np.array(chunks, np.int64),
            busy=np.array(busy, np.float64).reshape(len(rows), len(self.placement.machine.kinds)),
            adds=np.array(adds, np.bool_),
        )

    def _rounds(self, moment: Moment) -> Iterator[tuple[bool, float, int, bool, Floats]]:
        machine = self.placement.machine
        for one in lowered.rounds(moment, self.placement):
            each = machine.crossed(one.paths, np.ones(len(one.src))) * machine.beta
            busy = np.zeros(len(machine.kinds))
            np.maximum.at(busy, machine.kind, each)
            yield one.far, one.latency, one.chunks, one.adds, busy


def _faster(kind: str, speeds: Speeds) -> float:
    return speeds.network if kind in (NETWORK, UPLINK) else speeds.inside


def scaled(machine: Machine, speeds: Speeds) -> Machine:
    """The machine with links so many times as fast; what NCCL reckons with stays as it is."""
    if speeds.inside == speeds.network == 1:
        return machine
    links = tuple(
        replace(link, beta=link.beta / _faster(link.kind, speeds)) for link in machine.node.links
    )
    network = replace(machine.network, uplink=machine.network.uplink / speeds.network)
    return replace(machine, node=replace(machine.node, links=links), network=network)
