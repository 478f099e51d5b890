"""What XLA made of what was asked: every collective is accounted for, or the difference has a name."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from collc.lowering.account import Asked, bits
from collc.receipts.hlo import Collective
from collc.receipts.matching import Matching, Piece, Request, bears

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
    """``differences``, in the order of the program, and by instruction which asked ones it serves."""

    differences: tuple[Difference, ...]
    served: Mapping[str, tuple[Asked, ...]]


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
    differences += _split(requests, pieces) + _rest(requests, pieces)
    served: dict[str, tuple[Asked, ...]] = {}
    for p in pieces:
        served[p.collective.name] = (*served.get(p.collective.name, ()), *p.served)
    place = {c.name: i for i, c in enumerate(found)}
    differences.sort(key=lambda d: min((place[n] for n in d.names), default=len(found)))
    return Comparison(tuple(differences), served)


# ---- differences ----------------------------------------------------------------------------------


def _merged(pieces: Sequence[Piece]) -> list[Difference]:
    by: dict[str, list[Piece]] = {}
    for p in pieces:
        by.setdefault(p.collective.name, []).append(p)
    found = []
    for name, parts in by.items():
        served = [a for p in parts for a in p.served]
        if served and (len(parts) > 1 or parts[0].joined):
            c = parts[0].collective
            scopes = ", ".join(dict.fromkeys(a.scope for a in served))
            text = f"{len(served)} that were asked for ({scopes}) are {shown(c, parts[0].axes)}"
            found.append(Difference(MERGED, text, c.count, (name,)))
    return found


def _cast(piece: Piece, asked: Asked) -> Difference:
    c = piece.collective
    wide, narrow = bits(piece.dtype), bits(asked.dtype)
    text = (
        f"{shown(c, piece.axes)}: {piece.dtype} travels, but {asked.dtype} was asked "
        f"({asked.scope}), {wide / narrow:g} times the bytes"
    )
    return Difference(UPCAST if wide > narrow else NARROWED, text, c.count, (c.name,))


def _split(requests: Sequence[Request], pieces: Sequence[Piece]) -> list[Difference]:
    """Requests that are not found, beside operations of their scope that nothing asked for."""
    found = []
    for r in requests:
        if not r.left or r.left == math.inf:
            continue
        own = [p for p in pieces if p.left and not p.served and bears(p, r.asked)]
        own = [p for p in own if set(p.axes) <= set(r.asked.axes)]
        if not own:
            continue
        parts = ", ".join(f"{p.left} x {shown(p.collective, p.axes)}" for p in own)
        text = f"{_request(r.asked)}, {int(r.left)} times, became {parts}"
        names = tuple(dict.fromkeys(p.collective.name for p in own))
        found.append(Difference(SPLIT, text, int(r.left), names))
        r.left = 0
        for p in own:
            p.left = 0
            p.served.append(r.asked)
    return found


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
        times = f"{shown(c, axes)}, {n} times"
        if served := [a.scope for p in parts for a in p.served]:
            more = f"{times} more than asked ({', '.join(dict.fromkeys(served))})"
            found.append(Difference(REPEATED, more, n, (name,)))
            continue
        other = [a for a in axes if planned and a not in planned]
        beyond = f", over {' and '.join(other)}, which the plan does not name" if other else ""
        by = f" ({c.op_name})" if c.op_name else ""
        text = f"{times}, which nobody asked for{beyond}{by}"
        found.append(Difference(UNPLANNED, text, n, (name,)))
    for r in requests:
        if r.left and r.left != math.inf:
            text = (
                f"{_request(r.asked)} was asked {int(r.left)} times more than it is there: XLA found "
                "it dead, or the same as another"
            )
            found.append(Difference(REMOVED, text, int(r.left)))
    return found


def _request(asked: Asked) -> str:
    over = ",".join(asked.axes)
    return f"{asked.kind} over {over} of {size(asked.bytes)} {asked.dtype} ({asked.scope})"


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
