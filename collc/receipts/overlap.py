"""Which collectives are hidden behind which compute, and which the devices wait for."""

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from collc.receipts.hlo.work import Work
from collc.receipts.measures import flops, grid, size
from collc.receipts.receipt import Entry, Overlap, Receipt, scope
from collc.receipts.rows import Row, row_of

MOST = 16  # lines; --json has them all
_PRODUCTS = 2  # of the work beside a collective, by name


def overlap(receipt: Receipt) -> Iterator[Table | Text]:
    """A line for each kind of collective and what runs beside it, most bytes first."""
    entries = receipt.entries
    if not entries or not receipt.module.scheduled:
        return
    yield Text()
    yield Text(f"Overlap: {_summary(receipt)}", "bold")
    lines = _lines(entries)
    table = grid("left", "right", "left", "right", "left")
    for (row, word, said), times in lines[:MOST]:
        what = f"{row.kind} over {row.among}" if receipt.sizes else f"{row.kind}, {row.among}"
        of = f" ({row.scope})" if row.scope else ""
        table.add_row(
            Text(f"  {word}", _STYLES[word]),
            Text(f"{times} x"),
            Text(f"{what}{of}"),
            Text(size(row.bytes)),
            Text(said),
        )
    yield table
    if len(lines) > MOST:
        yield Text(
            f"  and {len(lines) - MOST} more kinds, with fewer bytes: --json lists all", "dim"
        )
    if any(word != "exposed" for (_, word, _), _ in lines):
        yield Text(
            "  hidden: at most as long as the products take; brief: hardly at all. Nothing was timed.",
            "dim",
        )


_STYLES: dict[Overlap, str] = {"hidden": "green", "brief": "yellow", "exposed": "red"}
_SAID: dict[Overlap, str] = {
    "hidden": "beside matrix products",
    "brief": "beside other kernels only",
    "exposed": "with nothing beside them",
}


def _summary(receipt: Receipt) -> str:
    parts = []
    for word, said in _SAID.items():
        count = sum(e.collective.count for e in receipt.entries if e.overlap == word)
        if count:
            parts.append(f"{count} {said} ({size(receipt.moved(word))})")
    count = sum(e.collective.count for e in receipt.entries)
    all_of_them = "1 collective" if count == 1 else f"{count} collectives"
    return f"of {all_of_them} ({size(receipt.moved())}), {', '.join(parts)}"


def _lines(entries: Sequence[Entry]) -> list[tuple[tuple[Row, Overlap, str], int]]:
    grouped: dict[tuple[Row, Overlap, str], list[Entry]] = {}
    for entry in entries:
        word = entry.overlap
        said = f"beside {beside(entry.collective.beside)}" if word == "hidden" else ""
        grouped.setdefault((row_of(entry), word, said), []).append(entry)
    found = []
    for (row, word, said), own in grouped.items():
        if word == "brief":
            most = max(sum(w.bytes for w in e.collective.beside) for e in own)
            said = f"beside kernels that write {size(most)}{' at most' if len(own) > 1 else ''}"
        elif word == "exposed":
            said = "waited for at once" if row.asynchronous else "runs alone"
        found.append(((row, word, said), sum(e.collective.count for e in own)))
    return sorted(found, key=lambda item: -item[0][0].bytes * item[1])


def beside(works: Sequence[Work]) -> str:
    """What runs beside one execution: the largest matrix products by name, then the rest.

    >>> mlp = Work("dot.1", "fusion", "jit(f)/mlp/dot_general", 2 * 10**9, 8)
    >>> loop = Work("while.1", "while", "jit(f)/transpose(jvp())/block/while", 10**12, 8)
    >>> beside([mlp, loop, Work("a", "fusion", "", 0, 8)])
    'backward loop in block 1.0 TFLOP, mlp/dot_general 2.0 GFLOP, 1 other kernel (8 B)'
    """
    products: dict[str, int] = {}
    for work in works:
        if work.flops:
            products[_label(work)] = products.get(_label(work), 0) + work.flops
    largest = sorted(products.items(), key=lambda item: -item[1])
    parts = [f"{name} {flops(n)}" for name, n in largest[:_PRODUCTS]]
    rest = largest[_PRODUCTS:]
    if rest:
        parts.append(f"{len(rest)} more products {flops(sum(n for _, n in rest))}")
    others = [w for w in works if not w.flops]
    if others:
        what = f"{len(others)} {'other ' if parts else ''}kernel{'s' if len(others) > 1 else ''}"
        parts.append(f"{what} ({size(sum(w.bytes for w in others))})")
    return ", ".join(parts)


def _label(work: Work) -> str:
    whose, loop = scope(work.op_name), work.opcode == "while"
    name = (f"loop in {whose}" if whose else "loop") if loop else whose or work.name
    return f"{'backward ' if 'transpose(' in work.op_name else ''}{name}"
