"""Pairs what was asked for with what was found, execution by execution."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from collc.lowering.account import Asked
from collc.receipts.hlo import Collective, CollectivePermute
from collc.receipts.spans import canonical, everywhere, spanned


@dataclass
class Piece:
    """One array of a collective's result: a merged one has several.

    ``left``: executions that nothing is known of yet. ``served``: what it answers, how often.
    """

    collective: Collective
    axes: tuple[str, ...]
    dtype: str
    elements: int
    left: int
    served: list[tuple[Asked, int]] = field(default_factory=list)
    joined: bool = False  # whether what it serves lies in it end to end

    @property
    def among(self) -> tuple[object, ...]:
        c = self.collective
        return c.kind, canonical(c.partners, isinstance(c, CollectivePermute))


@dataclass
class Request:
    """An asked one, and how many of its executions are not found yet."""

    asked: Asked
    left: float
    among: tuple[object, ...]


class Matching:
    """What was asked and what was found, of which the methods pair what is left.

    ``sizes``: of the mesh's axes.
    """

    def __init__(
        self, asked: Iterable[Asked], found: Iterable[Collective], sizes: Mapping[str, int]
    ) -> None:
        self.requests = [_request(a, sizes) for a in asked]
        self.pieces = [p for c in found for p in _pieces(c, spanned(c, sizes))]
        manual = {axis for r in self.requests for axis in r.asked.axes}
        self.automatic = [n for axis, n in sizes.items() if axis not in manual and n > 1]

    def equal(self) -> None:
        """Pairs equal ones, those of an operation's own named scope before others."""
        self._pair(lambda r, p: (r.dtype, r.elements) == (p.dtype, p.elements))

    def shared(self) -> None:
        """Pairs operands that XLA has sharded over axes that it is free to use."""
        shares = {
            math.prod(chosen)
            for k in range(len(self.automatic))
            for chosen in itertools.combinations(self.automatic, k + 1)
        }
        self._pair(
            lambda r, p: r.dtype == p.dtype and any(r.elements == k * p.elements for k in shares)
        )

    def cast(self) -> list[tuple[Piece, Asked]]:
        """Pairs those that differ in their dtype only, and says which they are."""
        return self._pair(lambda r, p: r.elements == p.elements)

    def joined(self) -> None:
        """Finds requests that lie end to end in one array, as XLA combines small ones."""
        for p in self.pieces:
            fit = [
                r
                for r in self.requests
                if p.left <= r.left < math.inf
                and r.among == p.among
                and r.asked.dtype == p.dtype
                and r.asked.elements <= p.elements
            ]
            if not p.left or not fit:
                continue
            # Each as often as it is left, for each execution of the piece.
            copies = [r for r in fit for _ in range(min(int(r.left) // p.left, _MOST_COPIES))]
            chosen = _summing([r.asked.elements for r in copies], p.elements)
            if len(chosen) < 2:
                continue
            n, p.left, p.joined = p.left, 0, True
            for i in chosen:
                copies[i].left -= n
                p.served.append((copies[i].asked, n))

    def split(self) -> list[tuple[Request, list[Piece], int]]:
        """Finds what a request has become: an all-reduce in levels, or operations of its scope.

        Returns the requests, the pieces, and how many executions each is about.
        """
        found = []
        for r in self.requests:
            if not 0 < r.left < math.inf:
                continue
            free = [p for p in self.pieces if p.left and not p.served]
            free = [p for p in free if set(p.axes) <= set(r.asked.axes)]
            own = _levels(r.asked, free) or [p for p in free if bears(p, r.asked)]
            if own:
                n, r.left = int(r.left), 0
                found.append((r, own, n))
                for p in own:
                    p.served.append((r.asked, n if p is own[0] else 0))
        return found

    def _pair(self, fits: Callable[[Asked, Piece], bool]) -> list[tuple[Piece, Asked]]:
        by: dict[object, list[Request]] = {}
        for r in self.requests:
            by.setdefault(r.among, []).append(r)
        found = []
        for own in (True, False):
            for p in self.pieces:
                for r in by.get(p.among, ()) if p.left else ():
                    n = int(min(r.left, p.left))
                    if n and (not own or bears(p, r.asked)) and fits(r.asked, p):
                        r.left -= n
                        p.left -= n
                        p.served.append((r.asked, n))
                        found.append((p, r.asked))
        return found


def _request(asked: Asked, sizes: Mapping[str, int]) -> Request:
    partners = everywhere(asked.axes, asked.edges, tuple(sizes.items()))
    among = canonical(partners, asked.kind == CollectivePermute.kind)
    left = math.inf if asked.count is None else asked.count
    return Request(asked, left, (asked.kind, among))


def _pieces(collective: Collective, axes: tuple[str, ...]) -> list[Piece]:
    each = list(zip(collective.dtypes, map(math.prod, collective.shapes), strict=True))
    if collective.kind == "all-to-all" and len(set(collective.dtypes)) == 1:
        each = [(collective.dtypes[0], sum(n for _, n in each))]  # a chunk for each rank
    return [Piece(collective, axes, dtype, n, collective.count) for dtype, n in each if n]


def _levels(asked: Asked, free: Sequence[Piece]) -> list[Piece]:
    """The operations that an all-reduce in levels consists of: scatters, a sum, gathers. [] if none.

    XLA gives those that it makes itself no name: each has to take up what the one before it left.
    """
    if asked.kind != "all-reduce":
        return []
    chain, elements = [], asked.elements
    for kind in ("reduce-scatter", "all-reduce", "all-gather"):
        for p in free:
            width = len(p.collective.partners[0])
            taken = {
                "reduce-scatter": p.elements * width,
                "all-reduce": p.elements,
                "all-gather": p.elements // width,
            }
            whole = bool(chain) and elements == asked.elements
            fits = (p.collective.kind, p.dtype) == (kind, asked.dtype) and taken[kind] == elements
            if fits and not whole:
                chain.append(p)
                elements = p.elements
    return chain if len(chain) > 1 and elements == asked.elements else []


def bears(piece: Piece, asked: Asked) -> bool:
    """Whether an operation's name says that it is of that scope, or of that call of lax."""
    name = piece.collective.op_name
    if asked.plan:
        return f"{asked.scope}/" in f"{name}/"
    return "collc/" not in name and name.rpartition("/")[2].partition("[")[0] == asked.scope


_MOST_COPIES, _MOST_SUMS = 256, 4096


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
    reached: dict[int, tuple[int, ...]] = {0: ()}
    for i, n in enumerate(numbers):
        for upto, chosen in list(reached.items()):
            if upto + n <= total and len(reached) < _MOST_SUMS:
                reached.setdefault(upto + n, (*chosen, i))
    return reached.get(total, ())
