"""What XLA made of what was asked: every collective is accounted for, or the difference has a name."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from collc.lowering.sends import Asked, bits, title
from collc.receipts.hlo import Collective
from collc.receipts.matching import Matching, Piece, Split
from collc.receipts.measures import size

MERGED, SPLIT, UPCAST, NARROWED = "merged", "split", "upcast", "narrowed"
UNPLANNED, REMOVED, REPEATED, RESHARDED = "unplanned", "removed", "repeated", "resharded"


@dataclass(frozen=True)
class Difference:
    """One way in which what runs is not what was asked for.

    Attributes:
      what: "merged" (several in one operation), "split" (one in several, or in another kind),
        "upcast" and "narrowed" (another dtype travels), "resharded" (automatic axes share it out
        otherwise, so that more or fewer bytes travel), "unplanned" (nobody asked for it), "removed"
        (asked for and not there), "repeated" (asked for, and there more often).
      text: a sentence.
      count: how many executions it is about.
      names: the HLO instructions that it is about.
    """

    what: str
    text: str
    count: int
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.what}: {self.text}"


@dataclass(frozen=True)
class Comparison:
    """The differences, in the order of the program.

    ``served``: of each that was found, what it answers and how often. ``absent``: what is not there,
    and how often.
    """

    differences: tuple[Difference, ...]
    served: tuple[tuple[tuple[Asked, int], ...], ...]
    absent: tuple[tuple[Asked, int], ...]


def compare(
    asked: Iterable[Asked], found: Sequence[Collective], sizes: Mapping[str, int]
) -> Comparison:
    """Matches what was asked with what was found, execution by execution.

    ``sizes``: of the mesh's axes. First equal ones are matched, then those that XLA has sharded or
    put together, then those in another dtype, then what bears a scope that lacks something.
    """
    matching = Matching(asked, found, sizes)
    matching.equal()
    matching.shared()
    matching.joined()
    parts: list[list[Piece]] = [[] for _ in found]
    for p in matching.pieces:
        parts[p.at].append(p)
    placed = [(own[0].at, d) for own in parts for d in _merged(own)]
    placed += [(p.at, _resharded(p, a)) for p, a in matching.resharded()]
    placed += [(p.at, _cast(p, a)) for p, a in matching.cast()]
    placed += [(each.pieces[0][0].at, _split(each)) for each in matching.split()]
    planned = {axis for r in matching.requests if r.asked.plan for axis in r.asked.axes}
    placed += [(own[0].at, d) for own in parts for d in _rest(own, planned)]
    absent = tuple((r.asked, r.missing) for r in matching.requests if r.missing)
    differences = [d for _, d in sorted(placed, key=lambda pair: pair[0])]
    differences += [_removed(a, n) for a, n in absent]
    served = tuple(tuple(one for p in own for one in p.served) for own in parts)
    return Comparison(tuple(differences), served, absent)


# ---- differences ----------------------------------------------------------------------------------


def _merged(parts: Sequence[Piece]) -> Iterator[Difference]:
    served = [a for p in parts for a, _ in p.served]
    if served and (len(parts) > 1 or parts[0].joined):
        c = parts[0].collective
        text = (
            f"{len(served)} that were asked for ({_scopes(served)}) are {shown(c, parts[0].axes)}"
        )
        yield Difference(MERGED, text, c.count, (c.name,))


def _resharded(piece: Piece, asked: Asked) -> Difference:
    c = piece.collective
    text = (
        f"{shown(c, piece.axes)}, {piece.elements / asked.elements:g} times what was asked "
        f"({title(asked.scope)}): XLA shards it otherwise over automatic axes"
    )
    return Difference(RESHARDED, text, c.count, (c.name,))


def _cast(piece: Piece, asked: Asked) -> Difference:
    c = piece.collective
    wide, narrow = bits(piece.dtype), bits(asked.dtype)
    text = (
        f"{shown(c, piece.axes)}: {piece.dtype} travels, but {asked.dtype} was asked "
        f"({title(asked.scope)}), {wide / narrow:g} times the bytes"
    )
    return Difference(UPCAST if wide > narrow else NARROWED, text, c.count, (c.name,))


def _split(found: Split) -> Difference:
    parts = ", ".join(f"{shown(p.collective, p.axes)}, {_times(n)}" for p, n in found.pieces)
    what = " and ".join(_request(a) for a in found.asked)
    names = tuple(dict.fromkeys(p.collective.name for p, _ in found.pieces))
    return Difference(SPLIT, f"{what}, {_times(found.count)}, became {parts}", found.count, names)


def _rest(parts: Sequence[Piece], planned: Collection[str]) -> Iterator[Difference]:
    """What is left of a collective; ``planned``: the axes that plans name."""
    parts = [p for p in parts if p.left]
    if not parts:
        return
    n = max(p.left for p in parts)
    c, axes = parts[0].collective, parts[0].axes
    times = f"{shown(c, axes)}, {_times(n)}"
    if served := [a for p in parts for a, _ in p.served]:
        yield Difference(REPEATED, f"{times} more than asked ({_scopes(served)})", n, (c.name,))
        return
    other = [a for a in axes if planned and a not in planned]
    beyond = f"; the plan does not name {' and '.join(other)}" if other else ""
    by = f" ({c.op_name})" if c.op_name else ""
    text = f"{times}{by}: XLA put it in, the program does not ask for it{beyond}"
    yield Difference(UNPLANNED, text, n, (c.name,))


def _removed(asked: Asked, n: int) -> Difference:
    why = "XLA found it dead, or the same as another"
    return Difference(REMOVED, f"{_request(asked)} is not there, {_times(n)}: {why}", n)


def _request(asked: Asked) -> str:
    over = ",".join(asked.axes)
    return f"{asked.kind} over {over} of {size(asked.bytes)} {asked.dtype} ({title(asked.scope)})"


def _times(n: int) -> str:
    return "once" if n == 1 else f"{n} times"


def _scopes(asked: Iterable[Asked]) -> str:
    return ", ".join(dict.fromkeys(title(a.scope) for a in asked))


def shown(c: Collective, axes: Sequence[str]) -> str:
    """An operation in a few words: ``one all-reduce over gpu of 4.0 MiB f32``."""
    over = ",".join(axes) or "no axis"
    return f"one {c.kind} over {over} of {size(c.bytes)} {c.wire}"
