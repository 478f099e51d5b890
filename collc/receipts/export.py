"""Receipts for programs: as JSON, and as comments in the HLO text itself."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from collc.lowering.sends import title
from collc.receipts.measures import size
from collc.receipts.overlap import beside
from collc.receipts.receipt import Entry, Receipt
from collc.receipts.rows import among


def as_json(receipt: Receipt) -> Mapping[str, Any]:
    """All of a receipt, as JSON can hold it. Sizes are in bytes, times in seconds.

    What is not known is null: ``axes`` without a mesh (``among`` says then how many groups there
    are, of what size), ``links`` without a pod, ``asked`` and ``memory`` where only HLO text was
    given. In ``asked`` a count is null in a loop whose trips nobody knows.
    """
    module, memory, links = receipt.module, receipt.memory, receipt.links
    return {
        "module": module.name,
        "devices": module.devices,
        "pod": receipt.pod.name if receipt.pod else None,
        "mesh": dict(receipt.sizes) or None,
        "collectives": [_entry(e) for e in receipt.entries],
        "counts": receipt.collectives,
        "in_flight": module.in_flight if module.scheduled else None,
        "asked": None if receipt.asked is None else [_asked(a) for a in receipt.asked],
        "differences": [
            {"what": d.what, "text": d.text, "count": d.count, "names": list(d.names)}
            for d in receipt.differences
        ],
        "unplanned": receipt.unplanned,
        "links": links and asdict(links),
        "busiest": receipt.busiest and asdict(receipt.busiest),
        "memory": memory and {**asdict(memory), "total": memory.total, "fits": memory.fits},
        "largest": [
            {key: value for key, value in asdict(b).items() if key != "opcode"}
            for b in receipt.largest
        ],
        "flops": module.flops,
        "flops_exact": module.flops_exact,
        "seconds": dict(receipt.seconds),
    }


def _entry(entry: Entry) -> Mapping[str, Any]:
    c, links = entry.collective, entry.links
    return {
        "name": c.name,
        "kind": c.kind,
        "axes": None if entry.axes is None else list(entry.axes),
        "among": among(entry) if entry.axes is None else None,
        "dtypes": list(c.dtypes),
        "shapes": [list(shape) for shape in c.shapes],
        "bytes": c.bytes,
        "count": c.count,
        "asynchronous": c.asynchronous,
        "kernel": c.kernel or None,
        "by": entry.by,
        "scope": entry.scope,
        "op_name": c.op_name,
        "links": links and asdict(links),
        "overlap": entry.overlap,
        "beside": [asdict(work) for work in c.beside],
    }


def _asked(a: Any) -> Mapping[str, Any]:
    known = ("kind", "dtype", "bytes", "count", "scope", "plan")
    return {"axes": list(a.axes), **{name: getattr(a, name) for name in known}}


# ---- HLO ------------------------------------------------------------------------------------------

_DEFINED = re.compile(r"(\s*)(?:ROOT )?%?([\w.\-]+) = ")


def annotated(receipt: Receipt, hlo: str) -> str:
    """The text that the receipt is of, with a comment line above each collective.

    It says what the collective is, over which axes, with how many bytes and how often, who asked
    for it, and what runs beside it. The text can be read again: ``collc hlo`` skips comments.
    """
    comments: dict[str, list[str]] = {}
    for entry in receipt.entries:
        said = comment(entry)
        own = comments.setdefault(entry.collective.name, [])
        if said not in own:  # a computation may be called from several places
            own.append(said)
    lines = []
    for line in hlo.splitlines():
        found = _DEFINED.match(line)
        if found:
            lines += [f"{found[1]}// {said}" for said in comments.get(found[2], ())]
        lines.append(line)
    return "\n".join(lines) + "\n"


def comment(entry: Entry) -> str:
    """A collective in one line."""
    c = entry.collective
    over = f"over {among(entry)}" if entry.axes is not None else f"in {among(entry)}"
    elements = sum(math.prod(shape) for shape in c.shapes)
    launch = "asynchronous" if c.asynchronous else "synchronous"
    parts = [
        f"{c.kind} {over}: {c.bytes:,} bytes ({size(c.bytes)}, {elements:,} {c.wire})",
        f"{c.count} time{'' if c.count == 1 else 's'}",
        f"{launch}{f', {c.kernel}' if c.kernel else ''}",
        f"asked by {'the ' if entry.by != 'XLA' else ''}{entry.by}",
    ]
    scope = title(entry.scope)
    parts[-1] += f": {scope}" if scope else ""
    parts.append(f"beside {beside(c.beside)}" if c.beside else "nothing beside it")
    return "; ".join(parts)
