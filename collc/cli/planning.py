"""``collc plan``: all candidates for a collective on a machine, ranked, and why the winner wins."""

from typing import Annotated

import typer

from collc.analysis.mesh import parse_mesh
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
from collc.machine.text import machine as read_machine


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
        # Help never loads jax: what plans is imported when it is used.
        from jax.sharding import AbstractMesh

        from collc.cli import ranked
        from collc.cli.plans import read_plan
        from collc.planning.site import site_of

        blank = AbstractMesh(tuple(axes.values()), tuple(axes))
        site = site_of(blank, on)
        asked = read_plan(plan, blank) if plan else None
        found = site.ranking(asked.axes if asked else tuple(axes), collective)
        told = [
            ranked.at_size(found, s, top, asked.schedule(collective, size=s) if asked else None)
            for s in sizes
        ]
        choices = [] if sizes else ranked.by_size(found)
        if save:
            ranked.to_save(asked, blank, site).save(save)
    if json:
        print_json(ranked.as_json(found, told, choices))
        return
    console = Output()
    ranked.show_heading(console, found)
    for each in told:
        ranked.show_at_size(console, found, each)
    if not sizes:
        ranked.show_by_size(console, found, choices)
    if save:
        console.line(f"Saved: {save}")
