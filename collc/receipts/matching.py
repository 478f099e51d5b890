"""Pairs what was asked for with what was found, execution by execution."""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
            if not p.left:
                continue
            fit = [
                r
                for r in self.requests
                if r.missing >= p.left
                and r.asked.elements <= p.elements
                and (r.asked.dtype, r.among) == (p.dtype, p.among)
            ]
            # Each as often as it is left, for each execution of the piece.
            copies = [r for r in fit for _ in range(min(r.missing // p.left, _MOST_COPIES))]
            chosen = _summing([r.asked.elements for r in copies], p.elements)
            if len(chosen) < 2:
                continue
            n, p.left, p.joined = p.left, 0, True
            for i in chosen:
                copies[i].left -= n
                p.served.append((copies[i].asked, n))

    def split(self) -> list[Split]:
        """Finds what requests have become: an all-reduce in levels, or operations of its scope.

        XLA may put several all-reduces end to end before it splits what they make.
        """
        found = []
        for r in self.requests:
            free = self._free(r.asked.axes) if r.missing else []
            own = _levels(r.asked, r.asked.elements, free)
            own = own or [p for p in free if bears(p.collective, r.asked)]
            if own:
                found.append(self._became([r], own, r.missing))
        for r in self.requests:
            for last in self._free(r.asked.axes) if r.missing else []:
                alike = [q for q in self.requests if q.missing and q.among == r.among]
                alike = [q for q in alike if q.asked.dtype == r.asked.dtype]
                chosen = _summing([q.asked.elements for q in alike], last.elements)
                free = self._free(r.asked.axes)
                own = _levels(r.asked, last.elements, free) if len(chosen) > 1 else []
                if own:
                    several = [alike[i] for i in chosen]
                    n = min(q.missing for q in several)
                    found.append(self._became(several, own, n))
                    break
        return found

    def _free(self, axes: tuple[str, ...]) -> list[Piece]:
        """The pieces that nothing is known of, over no other axes than these."""
        return [p for p in self.pieces if p.left and not p.served and set(p.axes) <= set(axes)]

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


def _levels(asked: Asked, whole: int, free: Sequence[Piece]) -> list[Piece]:
    """The operations that an all-reduce of so many elements consists of in levels: scatters, a sum,
    gathers. [] if there are none.

    XLA gives those that it makes itself no name: each has to take up what the one before it left.
    """
    if asked.kind != "all-reduce":
        return []
    chain: list[Piece] = []
    elements = whole
    for kind in ("reduce-scatter", "all-reduce", "all-gather"):
        for p in free:
            width = len(p.collective.partners[0])
            taken = {
                "reduce-scatter": p.elements * width,
                "all-reduce": p.elements,
                "all-gather": p.elements // width,
            }
            done = bool(chain) and elements == whole
            fits = (p.collective.kind, p.dtype) == (kind, asked.dtype) and taken[kind] == elements
            if fits and not done:
                chain.append(p)
                elements = p.elements
    return chain if len(chain) > 1 and elements == whole else []


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
