"""``collc cost``: what a schedule costs on a machine, step by step."""

import math
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.table import Table

from collc.analysis.certificate import counted
from collc.analysis.mesh import show_mesh
from collc.bench.terms import bus_factor
from collc.cli.common import (
    SECONDS,
    Debug,
    Json,
    Machine,
    Named,
    Output,
    Timeout,
    files_run,
    guarded,
    print_json,
)
from collc.cli.machines import Order, notes, on_mesh, parse_order
from collc.language.library import contents, find, modules
from collc.language.states import COLLECTIVES
from collc.machine import units
from collc.machine.flow import flow
from collc.machine.placement import advice
from collc.machine.placement import placed as placement
from collc.machine.price import Price, Row, Terms, price, priced
from collc.machine.text import machine as read_machine


@guarded
def cost(
    schedule: Named,
    machine: Machine,
    size: Annotated[
        str,
        typer.Option(
            "--size",
            metavar="BYTES",
            help="A rank's whole buffer: 64MiB, 4K (KiB), 1G (GiB).",
            show_default=False,
        ),
    ],
    mesh: Annotated[
        str,
        typer.Option(
            "--mesh",
            metavar="AXIS=SIZE,...",
            help="Outermost axis first. Default: the machine's own, host and gpu, all of it.",
            show_default=False,
        ),
    ] = "",
    order: Order = "",
    json: Json = False,
    timeout: Timeout = SECONDS,
    debug: Debug = False,
) -> None:
    """Price a schedule on a machine, step by step, beside the bound and XLA's own collective.

    Two models, never mixed. Abstract: what the sends cost on the links. Lowered: what XLA runs, with
    a launch for each round, whole chunks, and one collective at a time. Neither has timed anything.
    """
    bytes = units.parse_size(size)
    on = read_machine(machine)
    with files_run(timeout):
        what = find(schedule)
        what, sizes = on_mesh(what, mesh, on, schedule)
        place = placement(on, sizes, parse_order(order))
        sent = flow(what, sizes)
    found = priced(sent, place, bytes)
    native = natively(found)
    if json:
        print_json(as_json(found, native))
    else:
        _show(found, native)


def natively(found: Price) -> Price | None:
    """The price of XLA's own for the same; None where there is none, or where it is the schedule."""
    kind = found.schedule.collective
    if kind is None:
        return None
    if kind.name not in contents(modules()["native"]):
        return None
    own = find(f"native.{kind.name}") @ found.schedule.axes
    return None if own == found.schedule else price(own, found.placement, found.size)


# ---- printing -----------------------------------------------------------------------------------


def _show(found: Price, native: Price | None) -> None:
    console = Output()
    place = found.placement
    console.line(f"{found.schedule}", "bold")
    mesh = show_mesh(place.sizes)
    console.line(f"  {units.size(found.size)} on each of {mesh}; {place.machine}")
    across = ", ".join(f"{axis}: {kind}" for axis, kind in place.classes.items())
    console.line(f"  links along the axes: {across}")
    for sentence in place.machine.assumed:
        console.line(f"  assumed: {sentence}")
    for note in notes(place):
        console.line(f"  note: {note}", "yellow")
    console.line()
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in (
        "steps",
        "what",
        "rounds",
        "messages",
        "largest",
        "busiest link",
        *_TERMS,
        "lowered",
    ):
        table.add_column(name, justify="left" if name in ("what", "busiest link") else "right")
    at = 0
    for row in found.rows:
        table.add_row(*_cells(row, at))
        at += row.steps
    console.table(table, whole=True)
    console.line()
    for line in _sums(found, native):
        console.line(line)


_TERMS = ("latency", "bytes", "adding", "abstract")


def _cells(row: Row, at: int) -> Iterator[str]:
    yield f"{at}" if row.steps == 1 else f"{at}-{at + row.steps - 1}"
    yield row.title
    known = row.abstract
    yield str(row.rounds) if known else "-"
    yield str(row.messages) if known else "-"
    yield units.size(row.bytes) if known else "-"
    yield row.link if known else f"({row.how})"
    each = (known.latency, known.bytes, known.adding, known.seconds) if known else (None,) * 4
    for term in each:
        yield "-" if term is None else units.seconds(term)
    yield units.seconds(row.lowered.seconds)


def _sums(found: Price, native: Price | None) -> Iterator[str]:
    steps = sum(row.steps for row in found.rows)
    if found.abstract is None:
        yield "abstract  unknown: XLA's own takes part, whose sends nobody knows"
    else:
        yield f"abstract  {units.seconds(found.abstract)} in {counted(steps, 'step')}"
    yield f"lowered   {units.seconds(found.lowered)}{_beside(found, native)}"
    yield from _bandwidths(found)
    for kind, traffic in found.traffic.items():
        yield (
            f"bytes     {kind}: {units.size(traffic.total)} in all, "
            f"{units.size(traffic.busiest)} over the busiest link"
        )
    yield from _bounds(found)


def _bandwidths(found: Price) -> Iterator[str]:
    """As nccl-tests says it, by the lowered price."""
    kind = found.schedule.collective
    if kind is None or kind.name not in COLLECTIVES or not found.lowered:
        return
    ranks = math.prod(found.placement.sizes[axis] for axis in found.schedule.axes)
    rate = found.size / found.lowered
    bus = rate * float(bus_factor(kind.name, ranks))
    yield f"busbw     {units.bandwidth(bus)}, algbw {units.bandwidth(rate)}, by the lowered price"


def _beside(found: Price, native: Price | None) -> str:
    if native is None:
        return ""
    if not found.lowered or not native.lowered:  # nothing is sent, or by one rank alone
        return ""
    ratio = found.lowered / native.lowered
    way = native.rows[0].how if native.rows else ""
    how = f" ({way}{', in-network' if native.in_network else ''})" if way else ""
    than = f"{ratio:.3g} times" if ratio >= 1 else f"1/{1 / ratio:.3g} of"
    return f", {than} XLA's own: {units.seconds(native.lowered)}{how}"


def _bounds(found: Price) -> Iterator[str]:
    limit = found.bound
    if limit is None:
        yield "bound     none: it is not one collective on all its axes"
        return
    each = ", ".join(f"{kind} {units.seconds(t)}" for kind, t in limit.bytes.items())
    parts = [f"steps {units.seconds(limit.steps)}"] + ([f"bytes: {each}"] if each else [])
    if limit.adding:
        parts.append(f"adding {units.seconds(limit.adding)}")
    yield f"bound     {units.seconds(limit.seconds)} ({'; '.join(parts)}), without in-network reduction"
    if found.in_network:
        yield "gap       in-network: the switches add, which the bound does not cover"
    elif found.gap is not None:
        yield f"gap       {found.gap:.4g} times the bound, by the abstract price"


# ---- JSON ---------------------------------------------------------------------------------------


def as_json(found: Price, native: Price | None) -> dict[str, Any]:
    """The price as JSON: seconds and bytes; null where XLA's own takes part and nobody knows."""
    place, limit = found.placement, found.bound
    better = advice(place)
    return {
        "schedule": str(found.schedule),
        "machine": str(place.machine),
        "mesh": dict(place.sizes),
        "size": found.size,
        "links": place.classes,
        "assumed": list(place.machine.assumed),
        "better_order": better and list(better.devices),
        "abstract": found.abstract,
        "lowered": found.lowered,
        "native": native and native.lowered,
        "native_in_network": native and native.in_network,
        "traffic": {k: {"total": t.total, "busiest": t.busiest} for k, t in found.traffic.items()},
        "bound": limit
        and {
            "seconds": limit.seconds,
            "steps": limit.steps,
            "bytes": dict(limit.bytes),
            "adding": limit.adding,
        },
        "in_network": found.in_network,
        "gap": None if found.in_network else found.gap,
        "rows": [_row(row) for row in found.rows],
    }


def _row(row: Row) -> dict[str, Any]:
    def terms(t: Terms | None) -> dict[str, float] | None:
        return t and {
            "latency": t.latency, "bytes": t.bytes, "adding": t.adding, "seconds": t.seconds,
        }  # fmt: skip

    return {
        "what": row.title,
        "steps": row.steps,
        "rounds": row.rounds,
        "messages": row.messages,
        "bytes": row.bytes,
        "link": row.link or None,
        "kind": row.kind or None,
        "abstract": terms(row.abstract),
        "lowered": terms(row.lowered),
        "how": row.how or None,
    }
