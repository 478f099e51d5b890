"""Which schedule for which size, by price: the quickest that is proved, unless XLA's own is as quick.

Times are lowered ones. Those that differ by less than the model's own error are ties; a tie goes to
XLA's own, then to what has fewer rounds.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from collc.analysis.certificate import certify
from collc.errors import ProofError
from collc.language.algebra import Leaf, Schedule
from collc.language.states import COLLECTIVES
from collc.machine import nccl
from collc.machine.placement import Placement, placed
from collc.machine.topology import Floats, Machine
from collc.planning.candidates import Level, candidates
from collc.planning.curves import PLAIN, Costs, Speeds

SIZES = tuple(
    1 << i for i in range(8, 35)
)  # 256 B to 16 GiB: between two of them the choice is followed
EXACT = 1.01  # how near to where the choice changes a bound is

Choices = tuple[tuple[int, Schedule], ...]


@dataclass(frozen=True, eq=False)
class Chosen:
    """What a plan is for, and what was chosen there.

    ``choices``: for each collective (bytes of a rank's full buffer from which on, schedule), ascending
    from 0; none where the plan's schedules were named. ``order``: the machine's device of each rank.
    """

    machine: Machine
    order: tuple[int, ...] | None = None
    choices: tuple[tuple[str, Choices], ...] = ()

    def of(self, collective: str) -> Choices:
        return dict(self.choices).get(collective, ())


def at(choices: Choices, size: int | None) -> Schedule:
    """The schedule for this many bytes on a rank; the one for the largest where unknown."""
    found = choices[-1][1]
    if size is not None:
        found = [schedule for least, schedule in choices if least <= size][-1]
    return found


@dataclass(frozen=True)
class Verdict:
    """What is chosen at a size. Indices of candidates; ``quickest`` is another where it is only a tie.

    ``next``: the quickest of the others; None where there are none.
    """

    size: int
    chosen: int
    quickest: int
    next: int | None


class Ranking:
    """All candidates for a collective on a placement."""

    def __init__(
        self,
        placement: Placement,
        axes: tuple[str, ...],
        collective: str,
        error: float | None = None,
        costs: Costs | None = None,
    ) -> None:
        self.placement, self.axes, self.collective = placement, axes, collective
        ranks = math.prod(placement.sizes.values())
        self.error = nccl.error(placement.machine, ranks) if error is None else error
        self.costs = costs or Costs(placement)
        self.found = tuple(candidates(placement.sizes, axes, collective, self._best))
        self._verdicts: dict[int, Verdict] = {}
        self._times: dict[int, Floats] = {}
        self._proved: dict[int, bool] = {}

    def __len__(self) -> int:
        return len(self.found)

    def schedule(self, index: int) -> Schedule:
        return self.found[index].schedule

    @cached_property
    def _leaves(self) -> tuple[list[tuple[Leaf, Fraction]], list[dict[int, int]]]:
        """Each leaf with its share once, and how often each candidate has which of them."""
        index: dict[tuple[Leaf, Fraction], int] = {}
        rows = []
        parts: dict[tuple[Schedule, Fraction], tuple[int, ...]] = {}
        for candidate in self.found:
            row: dict[int, int] = {}
            for own in candidate.parts:
                if own not in parts:
                    each = [(leaf, own[1] * share) for leaf, share in self.costs.leaves(own[0])]
                    parts[own] = tuple(index.setdefault(one, len(index)) for one in each)
                for i in parts[own]:
                    row[i] = row.get(i, 0) + 1
            rows.append(row)
        return list(index), rows

    @cached_property
    def _counts(self) -> Floats:
        leaves, rows = self._leaves
        made = np.zeros((len(rows), len(leaves)))
        for i, row in enumerate(rows):
            made[i, list(row)] = list(row.values())
        return made

    @cached_property
    def rounds(self) -> list[int]:
        """Of each candidate; one of XLA's own counts as one."""
        leaves, _ = self._leaves
        each = np.array([self.costs.rounds(leaf) for leaf, _ in leaves])
        return (self._counts @ each).astype(int).tolist()

    def times(self, size: int) -> Floats:
        """Lowered seconds of each candidate."""
        if size not in self._times:
            leaves, _ = self._leaves
            each = [self.costs.leaf(leaf, share * size) for leaf, share in leaves]
            # Summed in one order, so that what is alike comes out alike.
            self._times[size] = np.array([math.fsum(row) for row in self._counts * each])
        return self._times[size]

    def time(self, index: int, size: int, speeds: Speeds = PLAIN) -> float:
        """Lowered seconds of a candidate, at other speeds too."""
        parts = self.found[index].parts
        return math.fsum(self.costs.of(own, float(share * size), speeds) for own, share in parts)

    def proved(self, index: int) -> bool:
        """Whether it may be chosen: proved, and its replicas end with the same bits."""
        if index not in self._proved:
            self._proved[index] = usable(self.schedule(index), self.placement.sizes)
        return self._proved[index]

    def ranked(self, size: int) -> Iterator[int]:
        """Those that may be chosen, the quickest first; equally quick ones as ``simpler`` has them."""
        times = self.times(size)
        order = sorted(range(len(self)), key=lambda i: (times[i], *self._simple(i, times)))
        return (i for i in order if self.proved(i))

    def _simple(self, i: int, times: Floats) -> tuple[bool, int, float, str]:
        return not self.found[i].native, self.rounds[i], float(times[i]), self.found[i].text

    def tied(self, index: int, size: int) -> bool:
        """Whether a candidate is as quick as the quickest, by what the model knows."""
        times = self.times(size)
        return bool(times[index] <= times[self.verdict(size).quickest] * (1 + self.error))

    def verdict(self, size: int) -> Verdict:
        """What is chosen at a size."""
        if size not in self._verdicts:
            times, order = self.times(size), self.ranked(size)
            quickest = next(order)
            limit = times[quickest] * (1 + self.error)
            close = sorted(
                (i for i in range(len(self)) if times[i] <= limit),
                key=lambda i: self._simple(i, times),
            )
            chosen = next(i for i in close if self.proved(i))
            other = next((i for i in self.ranked(size) if i != chosen), None)
            self._verdicts[size] = Verdict(size, chosen, quickest, other)
        return self._verdicts[size]

    def choices(self) -> Choices:
        """What is chosen from which size on, ascending from 0."""
        found = [(0, self.verdict(SIZES[0]).chosen)]
        for low, high in pairwise(SIZES):
            found += changes(lambda size: self.verdict(size).chosen, low, high)
        return tuple((least, self.schedule(i)) for least, i in found)

    def _best(self, sizes: Mapping[str, int], axis: str, levels: list[Level]) -> list[Level]:
        """Of the levels of an axis that may be chosen, those that are quickest there at some size."""
        own = [s for s in levels if all(usable(part @ axis, sizes) for part in s)]
        keep: dict[int, None] = {}
        for size in SIZES:
            each = [sum(self.costs.of(part @ axis, size) for part in level) for level in own]
            keep[min(range(len(own)), key=each.__getitem__)] = None
        return [own[i] for i in sorted({0, *keep})]  # the first is XLA's own


def usable(schedule: Schedule, sizes: Mapping[str, int]) -> bool:
    """Whether a schedule is right, and all its replicas end with the same bits."""
    try:
        return certify(schedule, sizes).narrow is not False
    except ProofError:
        return False


def changes(choice: Callable[[int], int], low: int, high: int) -> list[tuple[int, int]]:
    """Where the choice changes between two sizes: (the first size with it, what is chosen there)."""
    if choice(low) == choice(high):
        return []
    if high <= low * EXACT or high - low < 2:
        return [(high, choice(high))]
    middle = math.isqrt(low * high)
    return changes(choice, low, middle) + changes(choice, middle, high)


@lru_cache(maxsize=16)
def ranking(
    machine: Machine,
    sizes: tuple[tuple[str, int], ...],
    order: tuple[int, ...] | None,
    axes: tuple[str, ...],
    collective: str,
) -> Ranking:
    """The ranking of a mesh on a machine, worked out once. Raises MachineError where it does not fit."""
    placement = placed(machine, dict(sizes), order)
    return Ranking(placement, axes, collective, costs=costs(machine, sizes, order))


@lru_cache(maxsize=4)
def costs(
    machine: Machine, sizes: tuple[tuple[str, int], ...], order: tuple[int, ...] | None
) -> Costs:
    """The costs of schedules of a mesh on a machine. Raises MachineError where it does not fit."""
    return Costs(placed(machine, dict(sizes), order))


def order_of(mesh: Mesh | AbstractMesh) -> tuple[int, ...] | None:
    """The machine's device of each rank; None where it is the rank, as in a mesh without devices.

    The machine's devices 0, 1, ... are those of the mesh's runtime, by process and then by id.
    """
    if isinstance(mesh, AbstractMesh):
        return None
    own = list(mesh.devices.flat)
    everyone = {*own, *own[0].client.devices()}
    at = {d: i for i, d in enumerate(sorted(everyone, key=lambda d: (d.process_index, d.id)))}
    found = tuple(at[d] for d in own)
    return None if found == tuple(range(len(own))) else found


def choose(
    machine: Machine,
    sizes: tuple[tuple[str, int], ...],
    order: tuple[int, ...] | None,
    axes: tuple[str, ...],
) -> Chosen:
    """The choices for all collectives. Raises MachineError where the mesh does not fit."""
    each = ((c, ranking(machine, sizes, order, axes, c).choices()) for c in COLLECTIVES)
    return Chosen(machine, order, tuple(each))
