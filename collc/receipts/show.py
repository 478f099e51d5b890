"""A receipt to read: what runs beside what was asked for, and what a reader can do about it."""

import io
import math
from collections import Counter
from collections.abc import Iterable, Iterator

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from collc.receipts.measures import flops, grid, size
from collc.receipts.overlap import overlap
from collc.receipts.receipt import Receipt
from collc.receipts.rows import Row, rows

WIDTH = 100
JAX_TAKES = 0.75  # of a GPU's memory, the default of XLA_CLIENT_MEM_FRACTION


def text(receipt: Receipt) -> str:
    """The receipt as plain text of at most 100 columns."""
    return plain(blocks(receipt))


def plain(parts: Iterable[RenderableType]) -> str:
    """Tables and lines as text of at most 100 columns, without blanks at the ends of lines."""
    console = Console(width=WIDTH, no_color=True, record=True, file=io.StringIO(), highlight=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in console.export_text().splitlines())


def blocks(receipt: Receipt) -> Iterator[Table | Text]:
    """The parts of the receipt, from top to bottom."""
    yield Text(headline(receipt), "bold")
    yield from _collectives(receipt)
    yield Text()
    yield totals(receipt)
    yield from differences(receipt)
    yield from overlap(receipt)


def headline(receipt: Receipt) -> str:
    """``jit_train_step on h100, 512 GPUs: host=64, gpu=8``."""
    module = receipt.module
    what = "GPU" if module.cuda else "device"
    devices = f"{module.devices:,} {what}{'' if module.devices == 1 else 's'}"
    pod = f"{receipt.pod.name}, " if receipt.pod else ""
    mesh = ", ".join(f"{a}={n}" for a, n in receipt.sizes.items())
    return f"{module.name} on {pod}{devices}{f': {mesh}' if mesh else ''}"


# ---- collectives ----------------------------------------------------------------------------------


def _collectives(receipt: Receipt) -> Iterator[Text]:
    found = rows(receipt)
    if not found:
        yield Text("no collectives: no device needs anything of another one (or all do the same)")
        return
    yield Text()
    lines = [_titles(receipt), *(_cells(receipt, row) for row in found)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    heading, *cells = (_aligned(line, widths) for line in lines)
    yield Text(heading, "bold")
    before = None
    for row, line in zip(found, cells, strict=True):
        if (row.by, row.scope) != before:
            before = row.by, row.scope
            yield Text(f"{_BY[row.by]}{row.scope or 'unnamed'}", "cyan")
        yield Text(line, "" if row.asked in (None, row.found, math.inf) else "yellow")


_BY = {"plan": "", "program": "the program: ", "XLA": "XLA: "}
_LEFT = {0, 1, 2, 6, 7}  # columns of words


def _titles(receipt: Receipt) -> list[str]:
    over = "axes" if receipt.sizes else "among"
    asked = ["asked"] if receipt.asked is not None else [""]
    each = "result/GPU" if receipt.module.cuda else "result/device"
    return ["collective", over, "wire", each, *asked, "found", "kernel", "launch"]


def _cells(receipt: Receipt, row: Row) -> list[str]:
    asked = "" if row.asked is None else "any" if row.asked == math.inf else f"{row.asked:g}"
    launch = {True: "async", False: "sync", None: "-"}[row.asynchronous]
    each = size(row.bytes)
    return [
        *(f"  {row.kind}", row.among, row.wire, each, asked, str(row.found)),
        *(row.kernel or "-", launch),
    ]


def _aligned(cells: list[str], widths: list[int]) -> str:
    padded = (
        cell.ljust(width) if i in _LEFT else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        if width
    )
    return "  ".join(padded).rstrip()


# ---- totals ---------------------------------------------------------------------------------------


def totals(receipt: Receipt) -> Table:
    """What the whole program moves, holds, computes and took to compile."""
    table = grid("left", "left")
    for name, said in _totals(receipt):
        table.add_row(Text(name, "bold"), Text(said))
    return table


def _totals(receipt: Receipt) -> Iterator[tuple[str, str]]:
    module, links, memory = receipt.module, receipt.links, receipt.memory
    each = "GPU" if module.cuda else "device"
    counts = [f"{n:,} {kind}" for kind, n in sorted(receipt.collectives.items())]
    yield "collectives", ", ".join(counts) or "none"
    if counts:
        most = module.in_flight
        yield "in flight", f"{most} at once at most" if module.scheduled else _UNSCHEDULED
    if links is not None:
        most = receipt.busiest
        assert most is not None
        for name, sent, top in (
            ("NVLink", links.nvlink, most.nvlink),
            ("network", links.network, most.network),
        ):
            mean = size(sent / module.devices)
            yield name, f"{size(sent)} sent in all, {mean} a GPU, {size(top)} by the busiest"
    if memory is not None:
        yield "memory", f"{_of(memory.total, memory.capacity)} a {each}"
        aliased = f", of which {size(memory.aliased)} in donated arguments"
        yield (
            "",
            f"arguments {size(memory.arguments)}; outputs {size(memory.outputs)}"
            f"{aliased if memory.aliased else ''}; temporaries {size(memory.temporaries)}"
            + (f"; constants {size(memory.constants)}" if memory.constants else ""),
        )
    least = "" if module.flops_exact else "at least "
    yield "compute", f"{least}{flops(module.flops)} a {each}, in matrix products and convolutions"
    if "compile" in receipt.seconds:
        took = (f"{name} {seconds:.1f} s" for name, seconds in receipt.seconds.items())
        yield "time", ", ".join(took)


_UNSCHEDULED = "unknown: the text is from before XLA's scheduling"


def _of(total: int, capacity: int | None) -> str:
    if capacity is None:
        return size(total)
    share = total / capacity
    more = (
        f", more than the {JAX_TAKES:.0%} that JAX takes unless told"
        if JAX_TAKES < share <= 1
        else ""
    )
    return f"{size(total)} of {size(capacity)} ({share:.0%}{more})"


def differences(receipt: Receipt) -> Iterator[Table | Text]:
    """Every difference between what runs and what was asked for."""
    yield Text()
    if receipt.asked is None:
        yield Text("What the program asked for is not known, so nothing is compared.", "dim")
        return
    if not receipt.asked and receipt.entries:
        yield Text(
            "The program asks for no collectives itself: XLA's partitioner put in all of these, as the "
            "shardings require."
        )
        return
    if not receipt.differences:
        yield Text("No differences: what runs is what was asked for, collective by collective.")
        return
    yield Text(f"Differences from what was asked for: {len(receipt.differences)}", "bold")
    found = Counter((d.what, d.text) for d in receipt.differences)
    table = grid("left", "right", "left") if max(found.values()) > 1 else grid("left", "left")
    for (what, said), times in found.items():
        cells = [Text(f"  {what}", "yellow"), Text(f"{times} x" if times > 1 else ""), Text(said)]
        table.add_row(*(cell for i, cell in enumerate(cells) if i != 1 or len(table.columns) > 2))
    yield table
