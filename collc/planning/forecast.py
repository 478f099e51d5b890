"""What a plan is predicted to take on its machine: a table by size, and for each size why."""

import io
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from collc.language.algebra import Schedule
from collc.machine import units
from collc.machine.placement import advice, left_out
from collc.machine.topology import Machine
from collc.planning.by_size import BySize
from collc.planning.choose import Ranking
from collc.planning.compose import native
from collc.planning.curves import Costs
from collc.planning.plan import Plan
from collc.planning.site import Site
from collc.planning.why import Side, against, judged, predicted, side, times, wrapped

SIZES = tuple(1 << i for i in (10, 15, 20, 25, 30))  # 1 KiB to 1 GiB


def forecast(plan: Plan) -> list[str]:
    """Lines of at most 100 columns; [] where the plan has no machine."""
    if plan.site is None:
        return []
    lines = ["", *heading(plan.site.costs, plan.site.error)]
    if plan.chosen is not None:
        ranked = plan.site.ranking(plan.axes, "all_reduce")
        return lines + _judged_by_size(ranked, plan.chosen.of("all_reduce"), SIZES)
    if "all_reduce" not in plan.collectives:
        return [*lines, "The plan has no all-reduce to be priced."]
    return lines + _named_by_size(plan.site, plan, SIZES)


def heading(own: Costs, error: float) -> list[str]:
    """What the numbers are about, and a better order of the devices."""
    place = own.placement
    lines = wrapped(f"Predicted on {place.machine} ({_shape(place.machine)}).", 0)
    lines += wrapped(
        "Lowered: what XLA will run, by which schedules are ranked. Abstract: what the sends alone cost "
        f"on the links. Nothing was timed. Half of NCCL's posted logs are within {error:.0%} of the "
        "model: what differs by less is a tie, which goes to XLA's own, else to fewer rounds.",
        0,
    )
    for sentence in place.machine.assumed:
        lines += wrapped(f"Assumed: {sentence}.", 0)
    if left := left_out(place):
        lines += wrapped(f"Note: {left}.", 0)
    if better := advice(place):
        devices = ", ".join(map(str, better.devices[:32]))
        more = ", ..." if len(better.devices) > 32 else ""
        lines += wrapped(f"Note: {better} As devices of the machine: {devices}{more}.", 0)
    return lines


def _shape(machine: Machine) -> str:
    nodes = f"{machine.nodes} node{'s' * (machine.nodes != 1)}"
    return f"{nodes} of {machine.node.devices}"


def _judged_by_size(ranked: Ranking, choices: BySize, sizes: Sequence[int]) -> list[str]:
    rows, parts = [], []
    for size in sizes:
        own = side(ranked.costs, choices.at(size), size)
        others = list(_others(ranked, own, size))
        native_ = side(ranked.costs, native(ranked.collective) @ ranked.axes, size)
        beside = others[0][1] if others else None
        ratio = beside and times(beside.price.lowered, own.price.lowered)
        rows.append((size, own, native_, "-" if ratio is None else judged(ratio, ranked.error)))
        parts += _case(ranked.costs, size, own, others, ranked.error, "the winner")
    return [*table(rows, "next best"), *parts]


def _named_by_size(site: Site, plan: Plan, sizes: Sequence[int]) -> list[str]:
    own, error = site.costs, site.error
    schedule, theirs = plan.schedule("all_reduce"), native("all_reduce") @ plan.axes
    rows, parts = [], []
    for size in sizes:
        mine, other = side(own, schedule, size), side(own, theirs, size)
        rows.append(
            (size, mine, other, judged(times(mine.price.lowered, other.price.lowered), error))
        )
        others = [] if schedule == theirs else [("XLA's own", other)]
        parts += _case(own, size, mine, others, error, "the plan")
    return [*table(rows, "the plan, to XLA's own"), *parts]


def _case(
    own: Costs,
    size: int,
    mine: Side,
    others: Sequence[tuple[str, Side]],
    error: float,
    name: str,
) -> list[str]:
    lines = ["", *wrapped(f"{units.size(size)}: {mine.schedule}", 0)]
    lines += wrapped(predicted(mine), 4)
    for called, other in others:
        lines += against(own, mine, other, size, error, (name, called))
    return lines


def _others(ranked: Ranking, own: Side, size: int) -> Iterator[tuple[str, Side]]:
    """The next best, and where that says nothing of them, XLA's own and the best of the library's."""
    shown = [own.schedule]
    best = next((s for s in _ranked(ranked, size) if s != own.schedule), None)
    if best is not None:
        shown.append(best)
        yield "the next best", side(ranked.costs, best, size)
    theirs = native(ranked.collective) @ ranked.axes
    if theirs not in shown:
        yield "XLA's own", side(ranked.costs, theirs, size)
    if all(_has_native(s) for s in shown):
        ours = next((s for s in _ranked(ranked, size) if not _has_native(s)), None)
        if ours is not None:
            yield "the library's best", side(ranked.costs, ours, size)


def _ranked(ranked: Ranking, size: int) -> Iterator[Schedule]:
    return (ranked.schedule(i) for i in ranked.ranked(size))


def _has_native(schedule: Schedule) -> bool:
    return any(leaf.native for leaf in schedule.leaves())


def explained(ranked: Ranking, own: Schedule, size: int, asked: Schedule | None) -> list[str]:
    """Why a schedule, beside the next best, XLA's own, the library's best and what was asked for."""
    mine = side(ranked.costs, own, size)
    others = list(_others(ranked, mine, size))
    if asked is not None and asked not in (own, *(other.schedule for _, other in others)):
        others.append(("what you asked for", side(ranked.costs, asked, size)))
    return _case(ranked.costs, size, mine, others, ranked.error, "the winner")


def table(rows: Sequence[tuple[int, Side, Side, str]], last: str) -> list[str]:
    """A row for each size: its times, those of XLA's own, and a judgement."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("size", "lowered", "abstract", "XLA's own", last):
        made.add_column(column, justify="left" if column == last else "right")
    for size, mine, native_, judgement in rows:
        abstract = mine.price.abstract
        theirs = units.seconds(native_.price.lowered)
        made.add_row(
            units.size(size),
            units.seconds(mine.price.lowered),
            "-" if abstract is None else units.seconds(abstract),
            f"{theirs}{' (in-network)' if native_.price.in_network else ''}",
            judgement,
        )
    console = Console(width=100, no_color=True, record=True, file=io.StringIO())
    console.print(made)
    return ["", *(line.rstrip() for line in console.export_text().splitlines())]
