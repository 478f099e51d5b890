"""``collc list``: the schedules that can be named."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from collc.analysis.certificate import share, verify
from collc.analysis.mesh import parse_mesh
from collc.cli.common import (
    SECONDS,
    Debug,
    Json,
    Output,
    Timeout,
    files_run,
    guarded,
    print_json,
)
from collc.errors import CollcError, MeshError
from collc.language.algebra import Leaf, Order, Schedule, named
from collc.language.leaves import Family
from collc.language.library import contents, modules

WIDE = 120  # columns from which a schedule fits in one line


@dataclass(frozen=True)
class Row:
    """What is said of a schedule; ``None`` where it depends on parameters or was not asked for."""

    schedule: str
    collective: str | None
    before: str | None
    after: str | None
    about: str
    steps: int | None = None
    rounds: int | None = None
    sent: str | None = None
    received: str | None = None
    error: str | None = None

    @property
    def states(self) -> str:
        if not self.before or not self.after:
            return ""
        # Of several axes that do the same, once.
        each = zip(self.before.split(","), self.after.split(","), strict=True)
        before, after = zip(*dict.fromkeys(each), strict=True)
        return f"{','.join(before)} -> {','.join(after)}"


@guarded
def list_schedules(
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            metavar="AXIS=SIZE",
            help="Prove all of them on an axis of this size, and show what they cost.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    timeout: Timeout = SECONDS,
    debug: Debug = False,
) -> None:
    """List the schedules, what they do, and with --mesh what they cost.

    Those of collc.schedules, and of installed packages with an entry point in the group
    collc.schedules. Families, such as server.shards(k), need their parameters.
    """
    sizes = None if mesh is None else parse_mesh(mesh)
    if sizes and len(sizes) > 1:
        raise MeshError(
            f"collc list runs each schedule on one axis, and {mesh!r} has {len(sizes)}. "
            "Say --mesh gpu=8; for a composite use collc verify."
        )
    with files_run(timeout):
        rows = list(_rows(sizes))
    if json:
        costs = {"steps", "rounds", "sent", "received", "error"}
        print_json(
            [{k: v for k, v in asdict(row).items() if sizes or k not in costs} for row in rows]
        )
        return
    _print(rows, sizes)


def _rows(sizes: Mapping[str, int] | None) -> Iterator[Row]:
    for short, module in modules().items():
        for attribute, value in contents(module).items():
            name = short if attribute == short else f"{short}.{attribute}"
            if isinstance(value, Order):
                continue
            if isinstance(value, Family):
                yield _family(name, value)
            else:
                yield _schedule(name, value, sizes)


def _schedule(name: str, schedule: Schedule, sizes: Mapping[str, int] | None) -> Row:
    row = _typed(name, schedule, _about(schedule))
    if not sizes:
        return row
    ((axis, n),) = sizes.items()
    try:
        c = verify(schedule if schedule.axes else schedule @ axis, **sizes)
    except MeshError as e:
        return Row(*_words(row), error=f"{name} has no place on {axis}={n}: {_first(e)}")
    except CollcError as e:
        return Row(*_words(row), error=f"{name} is refused: {_first(e)}")
    if c.trusted:
        return row  # what XLA does is not known before it is compiled
    sent, received = (None if x is None else share(x) for x in (c.sent, c.received))
    return Row(*_words(row), steps=c.steps, rounds=c.rounds, sent=sent, received=received)


def _family(name: str, family: Family) -> Row:
    signature = inspect.signature(family.function)
    parameters = list(signature.parameters)
    call = f"{name}{signature}"
    # A member says what it does: of families over axes, that on axes named as the parameters.
    for given in (parameters, [2] * len(parameters), [(0, 1)] * len(parameters)):
        try:
            return _typed(call, family(*given), _sentence(family.__doc__))
        except Exception:
            continue
    return Row(call, None, None, None, _sentence(family.__doc__))


def _typed(name: str, schedule: Schedule, about: str) -> Row:
    signature = schedule.type.signature()
    before, after = (",".join(pair[side] for pair in signature.values()) for side in (0, 1))
    kind = schedule.collective
    return Row(name, kind.name if kind else None, before, after, about)


def _words(row: Row) -> tuple[str, str | None, str | None, str | None, str]:
    return row.schedule, row.collective, row.before, row.after, row.about


def _about(schedule: Schedule) -> str:
    """The first line of the docstring, or what a composite is made of."""
    if isinstance(schedule, Leaf):
        if schedule.native:
            return "XLA's own collective: trusted, not proved."
        # The class has a docstring too, which says nothing of this schedule.
        return _sentence(vars(schedule).get("__doc__"))
    return f"= {named(schedule, '')}"


def _sentence(doc: str | None) -> str:
    lines = inspect.cleandoc(doc or "").splitlines()
    return lines[0] if lines else ""


def _first(e: Exception) -> str:
    return (str(e).splitlines() or [""])[0]


def _print(rows: list[Row], sizes: Mapping[str, int] | None) -> None:
    console = Output()
    wide = console.width >= WIDE
    gap = 2 if console.width >= 80 else 1
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0))
    table.add_column("schedule", no_wrap=console.width >= 80, overflow="fold", style="bold")
    if wide:
        table.add_column("collective", no_wrap=True)
    if wide and not sizes:
        table.add_column("before -> after", no_wrap=True)
    if sizes:
        for title in ("steps", "rounds", "sent", "received"):
            table.add_column(title, justify="right", no_wrap=True)
    if wide or not sizes:
        table.add_column("what it does", overflow="fold")
    for row in rows:
        if sizes and not wide and row.schedule.endswith(")"):
            continue  # a family has no price, and there is no room to say more of it
        found = (row.steps, row.rounds, row.sent, row.received)
        costs = [Text("-" if v is None else str(v)) for v in found] if sizes else []
        if row.error:
            costs[0] = Text("refused", "red")
        if wide:
            states = [] if sizes else [Text(row.states or "-")]
            about = [Text(row.collective or "-"), *states, *costs, Text(row.about)]
        elif sizes:
            about = costs
        else:
            kind = f"{row.states}\n" if row.states else ""
            about = [Text.assemble(kind, (row.about, "dim"))]
        table.add_row(Text(row.schedule), *about)
    console.table(table)
    if not sizes:
        return
    console.line()
    for row in rows:
        if row.error:
            console.line(row.error, "red")
    ((axis, n),) = sizes.items()
    console.line(
        f"On {axis}={n}: the most that a rank sends and receives, in S, its whole buffer. Families "
        'need parameters: collc verify "server.shards(4)" --mesh gpu=8. XLA\'s own are not priced.',
        "dim",
    )
