"""Which schedule for which size, by price: the quickest that is proved, unless XLA's own is as quick.

Times are lowered ones. Those that differ by less than the model's own error are ties; a tie goes to
XLA's own, then to what has fewer rounds.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

import numpy as np

from collc.analysis.certificate import certify
from collc.errors import ProofError
from collc.language.algebra import Leaf, Schedule
from collc.machine.topology import Floats
from collc.planning.by_size import BySize
from collc.planning.candidates import Level, candidates
from collc.planning.curves import Costs

# 256 B to 16 GiB: between two of them the choice is followed.
SIZES = tuple(1 << i for i in range(8, 35))
EXACT = 1.01  # how near to where the choice changes a bound is


class Ranking:
    """All candidates for a collective over some axes of a mesh.

    ``error``: how far the model is from posted logs, relative and median.
    """

    def __init__(self, costs: Costs, axes: tuple[str, ...], collective: str, error: float) -> None:
        self.costs, self.axes, self.collective, self.error = costs, axes, collective, error
        self.placement = costs.placement
        self.found = tuple(candidates(self.placement.sizes, axes, collective, self._best))
        self._chosen: dict[int, int] = {}
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

    def proved(self, index: int) -> bool:
        """Whether it may be chosen: proved, and its replicas end with the same bits."""
        if index not in self._proved:
            self._proved[index] = usable(self.schedule(index), self.placement.sizes)
        return self._proved[index]

    def ranked(self, size: int) -> Iterator[int]:
        """Those that may be chosen, the quickest first; equally quick ones as a tie has them."""
        times = self.times(size)
        order = sorted(range(len(self)), key=lambda i: (times[i], *self._in_a_tie(i, times)))
        return (i for i in order if self.proved(i))

    def _in_a_tie(self, i: int, times: Floats) -> tuple[bool, int, float, str]:
        return not self.found[i].native, self.rounds[i], float(times[i]), self.found[i].text

    def chosen(self, size: int) -> int:
        """What is chosen at a size: of those that are as quick as the quickest, by what is known."""
        if size not in self._chosen:
            times = self.times(size)
            quickest = next(i for i in np.argsort(times).tolist() if self.proved(i))
            tied = np.flatnonzero(times <= times[quickest] * (1 + self.error)).tolist()
            order = sorted(tied, key=lambda i: self._in_a_tie(i, times))
            self._chosen[size] = next(i for i in order if self.proved(i))
        return self._chosen[size]

    def choices(self) -> BySize:
        """What is chosen from which size on."""
        found = [(0, self.chosen(SIZES[0]))]
        for low, high in pairwise(SIZES):
            found += changes(self.chosen, low, high)
        return BySize(tuple((least, self.schedule(i)) for least, i in found))

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
