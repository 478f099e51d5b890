"""A receipt's collectives in rows: equal ones together, and beside them how many were asked for."""

import math
from dataclasses import dataclass, replace

from collc.lowering.sends import title
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
    found: dict[Row, int] = {}
    asked: dict[Row, float] = {}
    for entry in receipt.entries:
        key = row_of(entry)
        found[key] = found.get(key, 0) + entry.collective.count
        for a, n in entry.serves:
            asked[key] = asked.get(key, 0) + (math.inf if a.count is None else n)
    for a, n in receipt.absent:
        by: By = "plan" if a.plan else "program"
        axes = ",".join(a.axes)
        key = Row(by, title(a.scope), a.kind, axes, a.dtype, a.bytes, "", None, 0, None)
        # Beside those of its kind that are there, if some are.
        key = next((r for r in found if replace(r, kernel="", asynchronous=None) == key), key)
        found.setdefault(key, 0)
        asked[key] = asked.get(key, 0) + n
    known = receipt.asked is not None
    made = [
        replace(key, found=n, asked=asked.get(key, 0) if known else None)
        for key, n in found.items()
    ]
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
        wire=c.wire,
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
