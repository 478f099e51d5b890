"""``collc bench``: schedules against XLA's own collectives, in the manner of nccl-tests."""

import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from collc.analysis.certificate import certify
from collc.analysis.mesh import parse_mesh, show_mesh
from collc.bench.terms import DTYPES, parse_dtype, swept
from collc.cli.common import (
    SECONDS,
    Debug,
    Json,
    Mesh,
    Output,
    Timeout,
    files_run,
    guarded,
    print_json,
)
from collc.cli.devices import Where, choose_platform, devices_for
from collc.errors import CollcError, DataError, MeshError, ScheduleError, nearest
from collc.language.algebra import Schedule, show_axes
from collc.language.library import find
from collc.machine.units import parse_size
from collc.training.fitting.interrupt import Interrupt

if TYPE_CHECKING:
    from collc.bench.sweep import Row, Sweep


class Use(StrEnum):
    """What becomes of a collective's input and output."""

    FRESH = "fresh"
    DONATED = "donated"
    INTERMEDIATE = "intermediate"


class Groups(StrEnum):
    """Which groups of the axis run."""

    ALL = "all"
    ALONE = "alone"


WHAT = "What is compared"
SWEEP = "The sweep"
PRINT = "What comes out"


@guarded
def bench(
    mesh: Mesh,
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            "--schedule",
            "-s",
            metavar="SCHEDULE",
            help="A name, an expression, or either after path/to/file.py: Repeatable. "
            "Default: ring.all_reduce.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    axis: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS,...",
            help="Where schedules run that name no axis. Default: the innermost axis.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    use: Annotated[
        list[Use] | None,
        typer.Option(
            metavar="fresh|donated|intermediate",
            help="fresh: out-of-place; donated: in-place; intermediate: within a program. "
            "Repeatable. Default: fresh and donated.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    groups: Annotated[
        list[Groups] | None,
        typer.Option(
            metavar="all|alone",
            help="all groups of the axis at once, as in training, or one alone. Repeatable. "
            "Default: all.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            "-d",
            metavar="DTYPE",
            help="As jax or nccl-tests call it.",
            rich_help_panel=WHAT,
        ),
    ] = "float32",
    begin: Annotated[
        str,
        typer.Option(
            "--begin",
            "-b",
            metavar="SIZE",
            help="Bytes, as 4096, 4K or 1.5M.",
            rich_help_panel=SWEEP,
        ),
    ] = "4K",
    end: Annotated[str, typer.Option("--end", "-e", metavar="SIZE", rich_help_panel=SWEEP)] = "16M",
    factor: Annotated[
        float | None,
        typer.Option(
            "--factor",
            "-f",
            metavar="TIMES",
            help="From a size to the next. Default: 4.",
            show_default=False,
            rich_help_panel=SWEEP,
        ),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(
            "--step",
            "-i",
            metavar="SIZE",
            help="Bytes from a size to the next, instead of a factor.",
            show_default=False,
            rich_help_panel=SWEEP,
        ),
    ] = None,
    warmup: Annotated[
        int, typer.Option("--warmup", "-w", min=0, metavar="CALLS", rich_help_panel=SWEEP)
    ] = 5,
    iters: Annotated[
        int, typer.Option("--iters", "-n", min=1, metavar="CALLS", rich_help_panel=SWEEP)
    ] = 20,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check", metavar="", help="Count wrong elements.", rich_help_panel=SWEEP
        ),
    ] = True,
    platform: Where = None,
    json: Json = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also plot time and busbw over size, as .png, .svg or .pdf.",
            show_default=False,
            rich_help_panel=PRINT,
        ),
    ] = None,
    timeout: Timeout = SECONDS,
    debug: Debug = False,
) -> None:
    """Time schedules beside XLA's own collective, over sizes.

    They take turns, call by call, so that the ratio holds even where the machine is unsteady. Sizes,
    bandwidths and #wrong are those of nccl-tests. With anything wrong the status is 1. Ctrl-C ends
    the sweep and keeps what is finished.
    """
    with Interrupt(starting=True) as interrupt:
        if step is not None and factor is not None:
            raise DataError("--step and --factor both say which size is next. Drop one.")
        sizes = swept(
            parse_size(begin), parse_size(end), 4 if factor is None else factor,
            None if step is None else parse_size(step),
        )  # fmt: skip
        dtype = parse_dtype(dtype)
        shape = parse_mesh(mesh)
        with files_run(timeout):
            schedules = _placed(schedule or ["ring.all_reduce"], axis, shape)
            for placed in schedules.values():
                certify(placed, shape)
        choose_platform(platform)
        devices_for(shape)
        if plot is not None:
            from collc.bench.plot import writable

            writable(plot)
        import jax

        from collc.bench.sweep import prepare
        from collc.planning.meshes import mesh_of

        if DTYPES[dtype] == 8:
            jax.config.update("jax_enable_x64", True)
        sweep = prepare(
            mesh_of(show_mesh(shape)),
            schedules,
            sizes,
            dtype=dtype,
            warmup=warmup,
            iterations=iters,
            uses=[str(u) for u in use or (Use.FRESH, Use.DONATED)],
            groups=[str(g) for g in groups or (Groups.ALL,)],
            check=check,
        )
        interrupt.starting = False
        rows = _run(sweep, interrupt, json)
    if plot is not None and (rows or not interrupt.signal):
        _plot(plot, sweep, rows, json)
    if interrupt.signal:
        raise typer.Exit(128 + interrupt.signal)
    if any(row.wrong for row in rows):
        raise typer.Exit(1)


def _placed(sources: list[str], axis: str | None, mesh: dict[str, int]) -> dict[str, Schedule]:
    """The schedules on their axes, by what they print as."""
    axes = tuple(name.strip() for name in axis.split(",")) if axis is not None else tuple(mesh)[-1:]
    for name in axes:
        if name not in mesh:
            raise MeshError(
                f"--axis names {name!r}, which the mesh {show_mesh(mesh)} does not have. "
                f"{nearest(name, mesh)}"
            )
    found: dict[str, Schedule] = {}
    somewhere = False
    for source in sources:
        schedule = find(source)
        somewhere |= not schedule.axes
        label = str(schedule)
        placed = schedule if schedule.axes else schedule @ axes
        if placed in found.values():
            raise ScheduleError(f"--schedule {source} is what another one is. Drop one of the two.")
        # Two files may have schedules of one name.
        found[source if label in found else label] = placed
    if axis is not None and not somewhere:
        raise MeshError(
            f"--axis {axis} has no effect: every schedule names its own axes. Drop it, or give a "
            "schedule without @."
        )
    return found


def _run(sweep: "Sweep", interrupt: Interrupt, json: bool) -> "list[Row]":
    """The rows that were finished; printed when they are, or as JSON in the end."""
    from collc.bench.table import Table, as_json

    table, console = Table(sweep), Output()

    def say(line: str, style: str = "") -> None:
        if not json:
            console.print(Text(line, style), no_wrap=True, overflow="ignore", crop=False)

    def going() -> None:
        if interrupt.signal:
            raise KeyboardInterrupt

    for line in table.header():
        say(line)
    rows: list[Row] = []
    complete, groups = True, ""
    try:
        for block in sweep.blocks(going):
            if block[0].groups != groups:
                groups = block[0].groups
                for line in ("#", *table.titles(groups)):
                    say(line, "bold")
            for line, row in zip(table.lines(block), block):
                say(line, "bold red" if row.wrong else "")
            rows += block
    except KeyboardInterrupt:
        if not interrupt.signal:
            interrupt.signal = signal.SIGINT
        complete = False
    say(table.footer(rows) if complete else f"{table.footer(rows)}; stopped before the end")
    if json:
        print_json(as_json(sweep, rows, complete))
    sys.stdout.flush()  # nothing that follows is to lose it
    return rows


def _plot(path: Path, sweep: "Sweep", rows: "list[Row]", json: bool) -> None:
    from collc.bench.plot import plot
    from collc.bench.table import machine

    where: dict[str, Any] = machine(sweep)
    title = (
        f"{sweep.collective} of {sweep.dtype} over {show_axes(sweep.axes)}, mesh "
        f"{show_mesh(dict(sweep.mesh.shape))}, {where['device_kind']}"
    )
    try:
        plot(path, rows, title)
    except CollcError:
        raise
    except Exception as e:  # whatever matplotlib or the disk has against it
        raise DataError(
            f"the plot {path} could not be written: {e}. What was measured stands above."
        ) from e
    if not json:
        Output().line(f"# plot: {path}")
