"""``collc plan``: all candidates for a collective on a machine, ranked, and why the winner wins."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from collc.analysis.certificate import counted
from collc.analysis.mesh import parse_mesh, show_mesh
from collc.cli.common import (
    SECONDS,
    Debug,
    Json,
    Machine,
    Mesh,
    Output,
    Timeout,
    files_run,
    guarded,
    print_json,
)
from collc.errors import PlanError, nearest
from collc.language.states import COLLECTIVES
from collc.machine import units
from collc.machine.placement import advice
from collc.machine.text import machine as read_machine

# Help never loads jax: what plans is imported when it is used.
if TYPE_CHECKING:
    from collc.language.algebra import Schedule
    from collc.planning.choose import Ranking
    from collc.planning.plan import Plan
    from collc.planning.why import Side


@guarded
def plan(
    machine: Machine,
    mesh: Mesh,
    size: Annotated[
        list[str] | None,
        typer.Option(
            "--size",
            metavar="BYTES",
            help="A rank's whole buffer: 64MiB, 4K, 1G; may be repeated. Default: the choice by size.",
            show_default=False,
        ),
    ] = None,
    collective: Annotated[
        str,
        typer.Option("--collective", metavar="NAME", help=f"Which one: {', '.join(COLLECTIVES)}."),
    ] = "all_reduce",
    plan: Annotated[
        str,
        typer.Option(
            "--plan",
            metavar="PLAN",
            help="A plan of your own beside them: gpu=ring,host=tree, or the file of a saved one.",
            show_default=False,
        ),
    ] = "",
    save: Annotated[
        str,
        typer.Option(
            "--save",
            metavar="FILE",
            help="Write the plan that chooses by size, or the one of --plan, for collc.Plan.load.",
            show_default=False,
        ),
    ] = "",
    top: Annotated[
        int, typer.Option("--top", metavar="N", min=1, help="How many candidates to print.")
    ] = 12,
    json: Json = False,
    timeout: Timeout = SECONDS,
    debug: Debug = False,
) -> None:
    """Rank all candidates for a collective on a machine by predicted time, and say why the winner wins.

    Candidates are the library's schedules, in every nesting of the axes and in slices, and XLA's own.
    Without --size: which one from which size on. Nothing is run, and no devices are needed.
    """
    if collective not in COLLECTIVES:
        raise PlanError(f"--collective {collective}: {nearest(collective, COLLECTIVES)}")
    sizes = [units.parse_size(text) for text in size or ()]
    on, axes = read_machine(machine), parse_mesh(mesh)
    with files_run(timeout):
        from collc.cli.plans import read_plan
        from collc.planning.choose import ranking

        blank = _blank(axes)
        asked = read_plan(plan, blank) if plan else None
        named = asked.axes if asked else tuple(axes)
        ranked = ranking(on, tuple(axes.items()), None, named, collective)
        found = _Found(ranked, asked, top)
        told = [found.size(s) for s in sizes] if sizes else []
        choices = found.choices() if not sizes else []
        if save:
            _saved(asked, blank, on).save(save)
    if json:
        print_json(found.as_json(told, choices))
        return
    console = Output()
    found.heading(console)
    if sizes:
        for each in told:
            found.show(console, each)
    else:
        found.show_choices(console, choices)
    if save:
        console.line(f"Saved: {save}")


def _blank(axes: dict[str, int]) -> Any:
    from jax.sharding import AbstractMesh

    return AbstractMesh(tuple(axes.values()), tuple(axes))


def _saved(asked: "Plan | None", mesh: Any, machine: Any) -> "Plan":
    from collc.planning.plan import plan

    if asked is None:
        return plan(mesh, "auto", machine=machine)
    if asked.tuned is not None or asked.chosen is not None:
        raise PlanError("--save with the file of a plan that is saved already. Drop --save.")
    return plan(mesh, {axis: own.source for axis, own in asked.algorithms}, machine=machine)


class _Rows:
    """The candidates at one size: (side, whether it is the user's own), quickest first."""

    def __init__(self, size: int, rows: "list[tuple[Side, bool]]", chosen: "Side") -> None:
        self.size, self.rows, self.chosen = size, rows, chosen


class _Found:
    """What was found, and how it is printed."""

    def __init__(self, ranked: "Ranking", asked: "Plan | None", top: int) -> None:
        self.ranked, self.asked, self.top = ranked, asked, top

    def _asked(self, size: int | None) -> "Schedule | None":
        if self.asked is None:
            return None
        return self.asked.schedule(self.ranked.collective, size=size)

    def size(self, size: int) -> _Rows:
        from collc.planning.compose import native
        from collc.planning.why import side

        ranked = self.ranked
        chosen = ranked.schedule(ranked.verdict(size).chosen)
        shown = [i for i, _ in zip(ranked.ranked(size), range(self.top), strict=False)]
        schedules = {ranked.schedule(i): False for i in shown}
        for always in (chosen, native(ranked.collective) @ ranked.axes):
            schedules.setdefault(always, False)
        if (own := self._asked(size)) is not None:
            schedules[own] = True
        rows = [(side(ranked.costs, s, size), mine) for s, mine in schedules.items()]
        rows.sort(key=lambda row: row[0].price.lowered)
        best = next(row for row, _ in rows if row.schedule == chosen)
        return _Rows(size, rows, best)

    def choices(self) -> list[tuple[int, "Side"]]:
        """From which size on, and the schedule priced there; at the least that is looked at for 0."""
        from collc.planning.choose import SIZES
        from collc.planning.why import side

        each = self.ranked.choices()
        return [(least, side(self.ranked.costs, s, max(least, SIZES[0]))) for least, s in each]

    # ---- printing ---------------------------------------------------------------------------

    def heading(self, console: Output) -> None:
        from collc.planning.candidates import RULE
        from collc.planning.forecast import heading
        from collc.planning.why import wrapped

        place = self.ranked.placement
        what = f"{self.ranked.collective} over {', '.join(self.ranked.axes)} of {show_mesh(place.sizes)}"
        console.line(f"{what}: {counted(len(self.ranked), 'candidate')}", "bold")
        for line in heading(self.ranked.costs, self.ranked.error):
            console.line(line)
        for line in wrapped(RULE, 0):
            console.line(line)

    def show(self, console: Output, found: _Rows) -> None:
        from collc.planning.forecast import explained

        console.line()
        console.line(f"{units.size(found.size)} on each rank", "bold")
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for name in ("lowered", "abstract", "rounds", "gap", "ratio", "", "schedule"):
            table.add_column(name, justify="left" if name in ("", "schedule") else "right")
        for own, mine in found.rows:
            table.add_row(*self._cells(own, mine, found))
        console.table(table)
        rest = len(self.ranked) - len(found.rows)
        if rest > 0:
            console.line(f"and {rest:,} more, slower or not to be chosen; --top shows more of them")
        for line in explained(
            self.ranked, found.chosen.schedule, found.size, self._asked(found.size)
        ):
            console.line(line)

    def _cells(self, own: "Side", mine: bool, found: _Rows) -> Iterator[Any]:
        record = self._record(own, mine, found)
        yield units.seconds(record["lowered"])
        yield "-" if record["abstract"] is None else units.seconds(record["abstract"])
        yield "-" if record["rounds"] is None else str(record["rounds"])
        yield "-" if record["gap"] is None else f"{record['gap']:.3g}"
        yield f"{record['ratio']:.3g}"
        marks = ("chosen", "tie", "asked", "in_network")
        yield ", ".join(mark.replace("_", "-") for mark in marks if record[mark])
        yield Text(record["schedule"])

    def show_choices(self, console: Output, choices: list[tuple[int, "Side"]]) -> None:
        from collc.planning.compose import native
        from collc.planning.why import judged, side, times

        own = native(self.ranked.collective) @ self.ranked.axes
        console.line()
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for name in ("from", "lowered there", "XLA's own", "to that", "schedule"):
            table.add_column(name, justify="left" if name in ("to that", "schedule") else "right")
        for least, best in choices:
            theirs = side(self.ranked.costs, own, int(best.price.size)).price.lowered
            ratio = times(best.price.lowered, theirs)
            table.add_row(
                units.size(least),
                units.seconds(best.price.lowered),
                units.seconds(theirs),
                "itself" if best.schedule == own else judged(ratio, self.ranked.error),
                Text(str(best.schedule)),
            )
        console.table(table)
        console.line("Say --size for all candidates at a size, and why the winner wins.")

    # ---- JSON -------------------------------------------------------------------------------

    def _record(self, own: "Side", mine: bool, found: _Rows) -> dict[str, Any]:
        from collc.planning.why import tied, times

        fastest = found.rows[0][0].price.lowered
        ratio = times(own.price.lowered, found.chosen.price.lowered)
        return {
            "schedule": str(own.schedule),
            "lowered": own.price.lowered,
            "abstract": own.price.abstract,
            "rounds": None if own.how else own.rounds,
            "gap": None if own.price.in_network else own.price.gap,
            "ratio": ratio,
            "chosen": own.schedule == found.chosen.schedule,
            "tie": tied(times(own.price.lowered, fastest), self.ranked.error)
            and (own.price.lowered != fastest or own.schedule != found.chosen.schedule),
            "asked": mine,
            "in_network": own.price.in_network,
            "terms": own.terms,
        }

    def as_json(self, told: list[_Rows], choices: list[tuple[int, "Side"]]) -> dict[str, Any]:
        """All that is printed, in seconds and bytes."""
        place = self.ranked.placement
        better = advice(place)
        return {
            "machine": str(place.machine),
            "mesh": dict(place.sizes),
            "collective": self.ranked.collective,
            "candidates": len(self.ranked),
            "error": self.ranked.error,
            "assumed": list(place.machine.assumed),
            "better_order": better and list(better.devices),
            "sizes": [
                {
                    "size": each.size,
                    "ranked": [self._record(own, mine, each) for own, mine in each.rows],
                }
                for each in told
            ],
            "choices": [
                {"from": least, "schedule": str(own.schedule), "lowered": own.price.lowered}
                for least, own in choices
            ],
        }
