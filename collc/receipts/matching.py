"""Pairs what was asked for with what was found, execution by execution."""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from collc.lowering.account import LAX
from collc.lowering.sends import Asked
from collc.receipts.hlo import Collective, CollectivePermute, Reducing
from collc.receipts.spans import canonical, everywhere, spanned

Among = tuple[str, str, tuple[tuple[int, ...], ...]]  # a kind, its reduction, who takes part


@dataclass
class Piece:
    """One array of the result of collective number ``at``; a merged one has several.

    ``left``: executions that nothing is known of yet. ``served``: what it answers, how often.
    ``joined``: whether what it serves lies in it end to end.
    """

    at: int
    collective: Collective
    axes: tuple[str, ...]
    among: Among
    dtype: str
    elements: int
    left: int
    served: list[tuple[Asked, int]] = field(default_factory=list)
    joined: bool = False

    @property
    def width(self) -> int:
        """How many devices are in a group."""
        return len(self.collective.partners[0]) if self.collective.partners else 1


@dataclass
class Request:
    """An asked one, and how many of its executions are not found yet: without end in some loops."""

    asked: Asked
    left: float
    among: Among

    @property
    def missing(self) -> int:
        """Executions that ought to be there; 0 where nobody can count them."""
        return int(self.left) if self.left < math.inf else 0


@dataclass(frozen=True)
class Split:
    """Requests, and the pieces, each so many times, that ``count`` executions of them have become."""

    asked: tuple[Asked, ...]
    pieces: tuple[tuple[Piece, int], ...]
    count: int


class Matching:
    """What was asked and what was found, of which the methods pair what is left.

    ``sizes``: of the mesh's axes.
    """

    def __init__(
        self, asked: Iterable[Asked], found: Iterable[Collective], sizes: Mapping[str, int]
    ) -> None:
        self.requests = [_request(a, sizes) for a in asked]
        self.pieces = [p for at, c in enumerate(found) for p in _pieces(at, c, sizes)]
        manual = {axis for r in self.requests for axis in r.asked.axes}
        automatic = [n for axis, n in sizes.items() if axis not in manual and n > 1]
        self.shares = {
            math.prod(chosen)
            for k in range(len(automatic))
            for chosen in itertools.combinations(automatic, k + 1)
        }

    def equal(self) -> None:
        """Pairs equal ones, those of an operation's own named scope before others."""
        self._pair(lambda r, p: (r.dtype, r.elements) == (p.dtype, p.elements))

    def shared(self) -> None:
        """Pairs operands that XLA has sharded over axes as it was free to."""
        self._pair(
            lambda r, p: (
                r.free
                and r.dtype == p.dtype
                and any(r.elements == k * p.elements for k in self.shares)
            )
        )

    def resharded(self) -> list[tuple[Piece, Asked]]:
        """Pairs those that automatic axes share out otherwise than was asked, and says which."""
        return self._pair(
            lambda r, p: (
                r.dtype == p.dtype
                and any(r.elements in (k * p.elements, p.elements / k) for k in self.shares)
            )
        )

    def cast(self) -> list[tuple[Piece, Asked]]:
        """Pairs those that differ in their dtype only, and says which they are."""
        return self._pair(lambda r, p: r.elements == p.elements)

    def joined(self) -> None:
        """Finds requests that lie end to end in one array, as XLA combines small ones."""
        for p in self.pieces:
            if p.left:
                fit = [r for r in self.requests if r.among == p.among]
                chosen = _adding_up(fit, p.elements, p.dtype, p.left)
                if len(chosen) > 1:
                    n, p.left, p.joined = p.left, 0, True
                    for r in chosen:
                        r.left -= n
                        p.served.append((r.asked, n))

    def split(self) -> list[Split]:
        """Finds what requests have become: all-reduces in levels, or operations of their scope."""
        return [*self._in_levels(), *self._otherwise()]

    def _in_levels(self) -> Iterator[Split]:
        """All-reduces in levels, of one request or of several that XLA has put end to end before."""
        outer = [p for p in self.pieces if p.among[0] == "reduce-scatter"]
        for first in sorted(outer, key=lambda p: -p.elements * p.width):
            free = [p for p in self.pieces if p.left == first.left and not p.served]
            own = _levels(first, free) if first in free else []
            if not own:
                continue
            axes = {axis for p in own for axis in p.axes}
            fit = [
                r
                for r in self.requests
                if r.among[:2] == ("all-reduce", first.among[1]) and set(r.asked.axes) == axes
            ]
            if chosen := _adding_up(fit, first.elements * first.width, first.dtype, first.left):
                yield self._became(chosen, own, first.left)

    def _otherwise(self) -> Iterator[Split]:
        """Operations of a request's scope, of another kind, or in pieces that make up the whole."""
        for r in self.requests:
            if not r.missing:
                continue
            free = [p for p in self.pieces if p.left and not p.served]
            free = [p for p in free if set(p.axes) <= set(r.asked.axes)]
            named = [p for p in free if bears(p.collective, r.asked)]
            own = [p for p in named if p.among[0] != r.among[0]]
            if sum(p.elements * p.left for p in named) == r.asked.elements * r.missing:
                own = named
            if own:
                yield self._became([r], own, r.missing)

    def _became(self, requests: Sequence[Request], own: Sequence[Piece], n: int) -> Split:
        split = Split(tuple(r.asked for r in requests), tuple((p, p.left) for p in own), n)
        for p in own:
            p.served += [(r.asked, n if p is own[0] else 0) for r in requests]
            p.left = 0
        for r in requests:
            r.left -= n
        return split

    def _pair(self, fits: Callable[[Asked, Piece], bool]) -> list[tuple[Piece, Asked]]:
        by: dict[Among, list[Request]] = {}
        for r in self.requests:
            by.setdefault(r.among, []).append(r)
        found = []
        for own in (True, False):
            for p in self.pieces:
                for r in by.get(p.among, ()) if p.left else ():
                    n = int(min(r.left, p.left))
                    if n and (not own or bears(p.collective, r.asked)) and fits(r.asked, p):
                        r.left -= n
                        p.left -= n
                        p.served.append((r.asked, n))
                        found.append((p, r.asked))
        return found


def _request(asked: Asked, sizes: Mapping[str, int]) -> Request:
    partners = everywhere(asked.axes, asked.edges, tuple(sizes.items()))
    among = canonical(partners, asked.kind == CollectivePermute.kind)
    left = math.inf if asked.count is None else asked.count
    return Request(asked, left, (asked.kind, _reduction(asked.reduction, asked.dtype), among))


def _pieces(at: int, c: Collective, sizes: Mapping[str, int]) -> list[Piece]:
    reduction = c.reduction if isinstance(c, Reducing) else ""
    partners = canonical(c.partners, isinstance(c, CollectivePermute))
    among = c.kind, _reduction(reduction, c.dtypes[0] if c.dtypes else ""), partners
    each = list(zip(c.dtypes, map(math.prod, c.shapes), strict=True))
    if c.kind == "all-to-all" and len(set(c.dtypes)) == 1:
        each = [(c.dtypes[0], sum(n for _, n in each))]  # a chunk for each rank
    axes = spanned(c, sizes)
    return [Piece(at, c, axes, among, dtype, n, c.count) for dtype, n in each if n]


def _reduction(name: str, dtype: str) -> str:
    """The reduction by which two are compared: of truths XLA makes "and" and "or" as it likes."""
    return "" if dtype == "pred" else name


def bears(collective: Collective, asked: Asked) -> bool:
    """Whether an operation's name says that it is of that scope, or of that call of lax."""
    names = joined(collective.op_name)
    if asked.plan:
        return any(f"{asked.scope}/" in f"{name}/" for name in names)
    return any(called(name) == asked.scope for name in names)


def joined(op_name: str) -> list[str]:
    """The names of the operations that one with such a name is made of.

    >>> joined("jit(f)/(jvp()/mul:a/psum)"), joined("a/mul;b/add"), joined("jit(f)/psum")
    (['jit(f)/jvp()/mul', 'jit(f)/a/psum'], ['a/mul', 'b/add'], ['jit(f)/psum'])
    """
    if found := re.fullmatch(r"((?:.*?/)?)\((.*:.*)\)", op_name):
        return [found[1] + part for part in found[2].split(":")]
    return op_name.split(";")


def called(op_name: str) -> str:
    """The call of lax that a program itself makes there, "" if it is none or a schedule's.

    >>> called("jit(f)/shard_map/psum"), called("jit(f)/dot_general")
    ('psum', '')
    """
    name = op_name.rpartition("/")[2].partition("[")[0]
    return name if name in LAX and "collc/" not in op_name else ""


def _levels(first: Piece, free: Sequence[Piece]) -> list[Piece]:
    """The operations of an all-reduce in levels whose outermost scatter is the first; [] if none.

    Scatters, a sum, and as many gathers: XLA gives those that it makes itself no name, so each has to
    take up what the one before it left. ``free``: pieces that run as often.
    """
    reduction, dtype = first.among[1], first.dtype
    chain = [first]
    while True:
        here = chain[-1].elements
        rest = [p for p in free if p.dtype == dtype and not any(p is q for q in chain)]
        alike = [p for p in rest if p.among[1] == reduction]
        sums = [p for p in alike if p.among[0] == "all-reduce" and p.elements == here]
        for middle in sums[:1]:
            if gathers := _gathers(chain, [p for p in rest if p.among[0] == "all-gather"]):
                return [*chain, middle, *gathers]
        deeper = [
            p for p in alike if p.among[0] == "reduce-scatter" and p.elements * p.width == here
        ]
        if not deeper:
            return []
        chain.append(deeper[0])


def _gathers(scatters: Sequence[Piece], free: Sequence[Piece]) -> list[Piece]:
    """The gathers that undo the scatters, from the innermost to the outermost; [] if some lack."""
    found: list[Piece] = []
    for scatter in reversed(scatters):
        whole = scatter.elements * scatter.width
        fit = [
            p
            for p in free
            if (p.elements, p.width) == (whole, scatter.width) and not any(p is q for q in found)
        ]
        if not fit:
            return []
        found.append(fit[0])
    return found


_MOST = 24  # requests among which any that add up are sought, not neighbours alone


def _adding_up(requests: Sequence[Request], total: int, dtype: str, n: int) -> list[Request]:
    """Requests, n executions of each, that together have so many elements; [] if none do.

    One alone before several, neighbours in the program before others.
    """
    fit = [r for r in requests if r.left >= n and r.asked.dtype == dtype]
    fit = [r for r in fit if r.asked.elements <= total]
    if alone := [r for r in fit if r.asked.elements == total]:
        return alone[:1]
    # A request that is left more often can stand there more often.
    copies = [r for r in fit for _ in range(min(r.missing // n, _MOST) or 1)]
    chosen = _summing([r.asked.elements for r in copies], total)
    return [copies[i] for i in chosen]


def _summing(numbers: Sequence[int], total: int) -> tuple[int, ...]:
    """Which of the numbers add up to the total: neighbours if there are such; () if none are found.

    >>> _summing([5, 1, 2, 4], 7), _summing([5, 1, 2, 4], 9), _summing([5, 1], 7)
    ((1, 2, 3), (0, 3), ())
    """
    ends = dict[int, int]()  # where the sum of all numbers up to there is that
    upto = 0
    for end, n in enumerate([0, *numbers]):
        upto += n
        if upto - total in ends:
            return tuple(range(ends[upto - total], end))
        ends[upto] = end
    if len(numbers) > _MOST:
        return ()
    reached: dict[int, tuple[int, ...]] = {0: ()}
    for i, n in enumerate(numbers):
        for upto, chosen in list(reached.items()):
            if upto + n <= total:
                reached.setdefault(upto + n, (*chosen, i))
            if len(reached) > 1 << 16:
                return ()
    return reached.get(total, ())
