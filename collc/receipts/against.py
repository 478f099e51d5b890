"""Two receipts of one step side by side: a plan, and what XLA does by itself."""

from collections.abc import Callable, Iterator, Sequence

from rich.table import Table
from rich.text import Text

from collc.receipts.measures import flops, size
from collc.receipts.receipt import Receipt
from collc.receipts.show import differences, headline

Number = float | None
Measure = tuple[str, Callable[[float], str], Callable[[Receipt], Number]]


def side_by_side(receipts: Sequence[tuple[str, Receipt]]) -> Iterator[Table | Text]:
    """A table with a column for each receipt and, of two, the second over the first; then the
    differences of each from what was asked of it.
    """
    first = receipts[0][1]
    yield Text(headline(first), "bold")
    yield Text()
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("")
    for label, _ in receipts:
        table.add_column(label, justify="right", overflow="fold")
    table.add_column(f"{receipts[1][0]}/{receipts[0][0]}", justify="right")
    for name, shown, of in _measures([r for _, r in receipts]):
        found = [of(r) for _, r in receipts]
        if all(n is None for n in found):
            continue
        cells = ["-" if n is None else shown(n) for n in found]
        table.add_row(name, *cells, _ratio(found))
    yield table
    for label, receipt in receipts:
        yield Text()
        yield Text(label, "bold cyan")
        yield from list(differences(receipt))[1:]


def _ratio(found: Sequence[Number]) -> str:
    a, b = found
    return f"{b / a:.2f}" if a and b is not None else "-"


def _measures(receipts: Sequence[Receipt]) -> Iterator[Measure]:
    count = "{:,.0f}".format
    for kind in sorted({kind for r in receipts for kind in r.collectives}):
        yield kind, count, lambda r, kind=kind: r.collectives.get(kind, 0)
    yield "collectives in all", count, lambda r: sum(r.collectives.values())
    yield "in flight at most", count, lambda r: r.module.in_flight if r.module.scheduled else None
    yield "bytes hidden", size, lambda r: r.moved("hidden")
    yield "bytes brief", size, lambda r: r.moved("brief")
    yield "bytes exposed", size, lambda r: r.moved("exposed")
    yield "NVLink a GPU", size, lambda r: r.links and r.links.nvlink / r.module.devices
    yield "network a GPU", size, lambda r: r.links and r.links.network / r.module.devices
    yield "  the busiest", size, lambda r: r.busiest and r.busiest.network
    yield "memory a GPU", size, lambda r: r.memory and r.memory.total
    yield "  arguments", size, lambda r: r.memory and r.memory.arguments
    yield "  outputs", size, lambda r: r.memory and r.memory.outputs
    yield "  temporaries", size, lambda r: r.memory and r.memory.temporaries
    yield "compute a GPU", flops, lambda r: r.module.flops
    yield "differences", count, lambda r: None if r.asked is None else len(r.differences)
    yield "seconds to compile", "{:.1f}".format, lambda r: r.seconds.get("compile")
