"""What XLA made of what was asked: every collective is accounted for, or the difference has a name."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from collc.lowering.account import Asked, bits, title
from collc.receipts.hlo import Collective
from collc.receipts.matching import Matching, Piece, Request

MERGED, SPLIT, UPCAST, NARROWED = "merged", "split", "upcast", "narrowed"
UNPLANNED, REMOVED, REPEATED = "unplanned", "removed", "repeated"


@dataclass(frozen=True)
class Difference:
    """One way in which what runs is not what was asked for.

    Attributes:
      what: "merged" (several in one operation), "split" (one in several, or in another kind),
        "upcast" and "narrowed" (another dtype travels), "unplanned" (nobody asked for it), "removed"
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

    ``served``: by instruction, what it answers and how often. ``absent``: what is not there, how often.
    """

    differences: tuple[Difference, ...]
    served: Mapping[str, tuple[tuple[Asked, int], ...]]
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
    requests, pieces = matching.requests, matching.pieces
    differences = _merged(pieces)
    differences += [_cast(p, a) for p, a in matching.cast()]
    differences += [_split(*each) for each in matching.split()]
    differences += _rest(requests, pieces)
    served: dict[str, tuple[tuple[Asked, int], ...]] = {}
    for p in pieces:
        served[p.collective.name] = (*served.get(p.collective.name, ()), *p.served)
    absent = tuple((r.asked, int(r.left)) for r in requests if 0 < r.left < math.inf)
    place = {c.name: i for i, c in enumerate(found)}
    differences.sort(key=lambda d: min((place[n] for n in d.names), default=len(found)))
    return Comparison(tuple(differences), served, absent)


# ---- differences ----------------------------------------------------------------------------------


def _merged(pieces: Sequence[Piece]) -> list[Difference]:
    by: dict[str, list[Piece]] = {}
    for p in pieces:
        by.setdefault(p.collective.name, []).append(p)
    found = []
    for name, parts in by.items():
        served = [a for p in parts for a, _ in p.served]
        if served and (len(parts) > 1 or parts[0].joined):
            c = parts[0].collective
            text = f"{len(served)} that were asked for ({_scopes(served)}) are {shown(c, parts[0].axes)}"
            found.append(Difference(MERGED, text, c.count, (name,)))
    return found


def _cast(piece: Piece, asked: Asked) -> Difference:
    c = piece.collective
    wide, narrow = bits(piece.dtype), bits(asked.dtype)
    text = (
        f"{shown(c, piece.axes)}: {piece.dtype} travels, but {asked.dtype} was asked "
        f"({title(asked.scope)}), {wide / narrow:g} times the bytes"
    )
    return Difference(UPCAST if wide > narrow else NARROWED, text, c.count, (c.name,))


def _split(request: Request, own: Sequence[Piece], n: int) -> Difference:
    parts = ", ".join(f"{shown(p.collective, p.axes)}, {_times(p.left)}" for p in own)
    for p in own:
        p.left = 0
    text = f"{_request(request.asked)}, {_times(n)}, became {parts}"
    return Difference(SPLIT, text, n, tuple(dict.fromkeys(p.collective.name for p in own)))


def _rest(requests: Sequence[Request], pieces: Sequence[Piece]) -> list[Difference]:
    """What is left on both sides."""
    planned = {axis for r in requests if r.asked.plan for axis in r.asked.axes}
    found = []
    left: dict[str, list[Piece]] = {}
    for p in pieces:
        if p.left:
            left.setdefault(p.collective.name, []).append(p)
    for name, parts in left.items():
        c, axes, n = parts[0].collective, parts[0].axes, max(p.left for p in parts)
        times = f"{shown(c, axes)}, {_times(n)}"
        if served := [a for p in parts for a, _ in p.served]:
            more = f"{times} more than asked ({_scopes(served)})"
            found.append(Difference(REPEATED, more, n, (name,)))
            continue
        other = [a for a in axes if planned and a not in planned]
        beyond = f"; the plan does not name {' and '.join(other)}" if other else ""
        by = f" ({c.op_name})" if c.op_name else ""
        text = f"{times}{by}: XLA put it in, the program does not ask for it{beyond}"
        found.append(Difference(UNPLANNED, text, n, (name,)))
    for r in requests:
        if r.left and r.left != math.inf:
            text = (
                f"{_request(r.asked)} is not there, {_times(int(r.left))}: XLA found it dead, or the "
                "same as another"
            )
            found.append(Difference(REMOVED, text, int(r.left)))
    return found


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
    return f"one {c.kind} over {over} of {size(c.bytes)} {'+'.join(dict.fromkeys(c.dtypes))}"


def size(n: float) -> str:
    """Bytes, as one reads them.

    >>> size(1000), size(4 * 2**20), size(3 * 2**30)
    ('1000 B', '4.0 MiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if n < 1024 or unit == "TiB":
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError
