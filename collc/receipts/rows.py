"""A receipt's collectives in rows: equal ones together, and beside them how many were asked for."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from collc.lowering.account import Asked
from collc.receipts.receipt import By, Entry, Receipt


@dataclass(frozen=True)
class Row:
    """Collectives that differ in nothing that a reader would ask for.

    Attributes:
      by, scope: who asked for them.
      kind: XLA's name.
      among: the mesh axes, or where they are not known the groups: "gpu", "16 groups of 8".
      wire: the dtypes, joined by +.
      bytes: of the results of one execution on one device.
      kernel: "nccl", "one-shot", "two-shot", or "" where the text does not say.
      asynchronous: whether other work can run beside them; None for what is not there.
      found: executions in the program.
      asked: executions asked for; math.inf in a loop whose trips nobody knows, None where it is not
        known what was asked for.
    """

    by: By
    scope: str
    kind: str
    among: str
    wire: str
    bytes: int
    kernel: str
    asynchronous: bool | None
    found: int
    asked: float | None


def rows(receipt: Receipt) -> tuple[Row, ...]:
    """Those that a plan asked for first, then the program's own, then XLA's; each in program order."""
    grouped: dict[Row, int] = {}
    for entry in receipt.entries:
        key = row_of(entry)
        grouped[key] = grouped.get(key, 0) + entry.collective.count
    made = [replace(key, found=n) for key, n in grouped.items()]
    if receipt.asked is not None:
        made = _accounted(made, receipt.asked)
    order: dict[tuple[int, str], list[Row]] = {}
    for row in made:
        order.setdefault((_ORDER[row.by], row.scope), []).append(row)
    whose = sorted(order, key=lambda key: key[0])
    return tuple(row for key in whose for row in order[key])


_ORDER: dict[By, int] = {"plan": 0, "program": 1, "XLA": 2}


def row_of(entry: Entry) -> Row:
    """The row of one collective, without counts."""
    c = entry.collective
    return Row(
        by=entry.by,
        scope=title(entry.scope),
        kind=c.kind,
        among=among(entry),
        wire="+".join(dict.fromkeys(c.dtypes)),
        bytes=c.bytes,
        kernel=c.kernel,
        asynchronous=c.asynchronous,
        found=0,
        asked=None,
    )


def among(entry: Entry) -> str:
    """The axes that a collective spans; without a mesh its groups or pairs."""
    if entry.axes is not None:
        return ",".join(entry.axes) or "none"
    listed = entry.collective.partners
    if entry.collective.kind == "collective-permute":
        return f"{len(listed)} pairs"
    sizes = sorted({len(group) for group in listed})
    each = " or ".join(map(str, sizes))
    return f"{len(listed)} {'group' if len(listed) == 1 else 'groups'} of {each}"


def title(scope: str) -> str:
    """A scope as one reads it, a schedule's as in a plan.

    >>> title("collc/ring.all_gather/gpu"), title("collc/ring.all_reduce/host,gpu"), title("block/psum")
    ('ring.all_gather @ gpu', 'ring.all_reduce @ (host, gpu)', 'block/psum')
    """
    if not scope.startswith("collc/"):
        return scope
    name, _, axes = scope.removeprefix("collc/").rpartition("/")
    return f"{name} @ {axes}" if "," not in axes else f"{name} @ ({axes.replace(',', ', ')})"


# ---- what was asked -------------------------------------------------------------------------------


def _accounted(found: Sequence[Row], asked: Iterable[Asked]) -> list[Row]:
    """The rows with what was asked, and rows for what was asked and is nowhere."""
    got = [0.0] * len(found)
    absent: dict[Row, float] = {}
    for a in asked:
        left = math.inf if a.count is None else a.count
        for i in _likely(found, a):
            take = min(left, max(found[i].found - got[i], 0)) if left < math.inf else left
            got[i] += take
            left = 0 if left == math.inf else left - take
        if not left:
            continue
        homes = list(_likely(found, a))
        if homes:  # more than there are: the row says so
            got[homes[0]] += left
        else:
            by: By = "plan" if a.plan else "program"
            over, where = ",".join(a.axes), title(a.scope)
            key = Row(by, where, a.kind, over, a.dtype, a.bytes, "", None, 0, None)
            absent[key] = absent.get(key, 0) + left
    there = [replace(row, asked=n) for row, n in zip(found, got, strict=True)]
    return there + [replace(key, asked=n) for key, n in absent.items()]


def _likely(found: Sequence[Row], a: Asked) -> Iterator[int]:
    """The rows that answer a request, by the first of these that any row does: equal ones of its own
    scope; equal ones; its scope in other sizes or dtypes, as XLA shards, merges and casts.
    """
    same = [i for i, r in enumerate(found) if (r.kind, r.among) == (a.kind, ",".join(a.axes))]
    own = [i for i in same if _of(found[i], a)]
    equal = [i for i in same if (found[i].wire, found[i].bytes) == (a.dtype, a.bytes)]
    yield from [i for i in own if i in equal] or equal or own


def _of(row: Row, a: Asked) -> bool:
    if a.plan:
        return row.scope == title(a.scope)
    return row.scope.rpartition("/")[2].partition("[")[0] == a.scope
