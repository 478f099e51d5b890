"""What ``collc plan`` has found, as tables and as JSON."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from jax.sharding import AbstractMesh
from rich.table import Table
from rich.text import Text

from collc.analysis.certificate import counted
from collc.analysis.mesh import show_mesh
from collc.cli.common import Output
from collc.errors import PlanError
from collc.language.algebra import Schedule
from collc.machine import units
from collc.machine.placement import advice
from collc.planning.candidates import RULE
from collc.planning.choose import SIZES, Ranking
from collc.planning.compose import native
from collc.planning.forecast import explained, heading
from collc.planning.plan import Plan, priced
from collc.planning.site import Site
from collc.planning.why import Side, judged, side, tied, times, wrapped


@dataclass(frozen=True, eq=False)
class AtSize:
    """Candidates at one size, the quickest first. ``asked``: the user's own, which is among them."""

    size: int
    rows: tuple[Side, ...]
    chosen: Side
    asked: Schedule | None


def at_size(ranked: Ranking, size: int, top: int, asked: Schedule | None) -> AtSize:
    """The quickest ``top``, and in any case the chosen one, XLA's own and what was asked for."""
    chosen = ranked.schedule(ranked.chosen(size))
    shown = [ranked.schedule(i) for i in islice(ranked.ranked(size), top)]
    shown += [chosen, native(ranked.collective) @ ranked.axes]
    shown += [] if asked is None else [asked]
    rows = [side(ranked.costs, schedule, size) for schedule in dict.fromkeys(shown)]
    rows.sort(key=lambda own: own.price.lowered)
    return AtSize(size, tuple(rows), next(own for own in rows if own.schedule == chosen), asked)


def by_size(ranked: Ranking) -> list[tuple[int, Side]]:
    """From which size on, and the schedule priced there; at the least that is looked at for 0."""
    return [
        (least, side(ranked.costs, schedule, max(least, SIZES[0])))
        for least, schedule in ranked.choices().entries
    ]


def to_save(asked: Plan | None, mesh: AbstractMesh, site: Site) -> Plan:
    """The plan that chooses by size, or what was asked for, priced on the site. Raises PlanError."""
    if asked is None:
        return priced(mesh, mesh.axis_names, site)
    if asked.tuned is not None or asked.site is not None:
        raise PlanError("--save with the file of a plan that is saved already. Drop --save.")
    return replace(asked, site=site)


# ---- printing -----------------------------------------------------------------------------------


def show_heading(console: Output, ranked: Ranking) -> None:
    """What was ranked, where, and what was left out."""
    mesh = show_mesh(ranked.placement.sizes)
    what = f"{ranked.collective} over {', '.join(ranked.axes)} of {mesh}"
    console.line(f"{what}: {counted(len(ranked), 'candidate')}", "bold")
    for line in [*heading(ranked.costs, ranked.error), *wrapped(RULE, 0)]:
        console.line(line)


def show_at_size(console: Output, ranked: Ranking, found: AtSize) -> None:
    """The candidates at a size, and why the winner wins."""
    console.line()
    console.line(f"{units.size(found.size)} on each rank", "bold")
    table = _table(("lowered", "abstract", "rounds", "gap", "ratio", "", "schedule"))
    for own in found.rows:
        table.add_row(*_cells(_record(ranked, found, own)))
    console.table(table)
    rest = len(ranked) - len(found.rows)
    if rest > 0:
        console.line(f"and {rest:,} more, slower or not to be chosen; --top shows more of them")
    for line in explained(ranked, found.chosen.schedule, found.size, found.asked):
        console.line(line)


def _cells(record: dict[str, Any]) -> Iterator[str | Text]:
    yield units.seconds(record["lowered"])
    yield "-" if record["abstract"] is None else units.seconds(record["abstract"])
    yield "-" if record["rounds"] is None else str(record["rounds"])
    yield "-" if record["gap"] is None else f"{record['gap']:.3g}"
    yield f"{record['ratio']:.3g}"
    marks = ("chosen", "tie", "asked", "in_network")
    yield ", ".join(mark.replace("_", "-") for mark in marks if record[mark])
    yield Text(record["schedule"])


def show_by_size(console: Output, ranked: Ranking, choices: list[tuple[int, Side]]) -> None:
    """Which schedule from which size on, beside XLA's own."""
    own = native(ranked.collective) @ ranked.axes
    console.line()
    table = _table(("from", "lowered there", "XLA's own", "to that", "schedule"))
    for least, best in choices:
        theirs = side(ranked.costs, own, int(best.price.size)).price.lowered
        ratio = times(best.price.lowered, theirs)
        table.add_row(
            units.size(least),
            units.seconds(best.price.lowered),
            units.seconds(theirs),
            "itself" if best.schedule == own else judged(ratio, ranked.error),
            Text(str(best.schedule)),
        )
    console.table(table)
    console.line("Say --size for all candidates at a size, and why the winner wins.")


def _table(columns: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in columns:
        words = name in ("", "to that", "schedule")
        table.add_column(name, justify="left" if words else "right")
    return table


# ---- JSON ---------------------------------------------------------------------------------------


def _record(ranked: Ranking, found: AtSize, own: Side) -> dict[str, Any]:
    """A row, in seconds. A tie is as quick as the quickest, by what the model knows."""
    fastest = found.rows[0].price.lowered
    close = tied(times(own.price.lowered, fastest), ranked.error)
    return {
        "schedule": str(own.schedule),
        "lowered": own.price.lowered,
        "abstract": own.price.abstract,
        "rounds": None if own.how else own.rounds,
        "gap": None if own.price.in_network else own.price.gap,
        "ratio": times(own.price.lowered, found.chosen.price.lowered),
        "chosen": own is found.chosen,
        "tie": close and (own.price.lowered != fastest or own is not found.chosen),
        "asked": own.schedule == found.asked,
        "in_network": own.price.in_network,
        "terms": own.terms,
    }


def as_json(ranked: Ranking, told: list[AtSize], choices: list[tuple[int, Side]]) -> dict[str, Any]:
    """All that is printed, in seconds and bytes."""
    place = ranked.placement
    better = advice(place)
    return {
        "machine": str(place.machine),
        "mesh": dict(place.sizes),
        "collective": ranked.collective,
        "candidates": len(ranked),
        "error": ranked.error,
        "assumed": list(place.machine.assumed),
        "better_order": better and list(better.devices),
        "sizes": [
            {"size": found.size, "ranked": [_record(ranked, found, own) for own in found.rows]}
            for found in told
        ],
        "choices": [
            {"from": least, "schedule": str(own.schedule), "lowered": own.price.lowered}
            for least, own in choices
        ],
    }
