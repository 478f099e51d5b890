"""A plan in words: what each collective does, what it costs at least, and what XLA would do."""

import io
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from collc.analysis.certificate import Certificate, certify, share
from collc.language.states import COLLECTIVES
from collc.machine import units
from collc.planning.forecast import forecast
from collc.planning.plan import Plan


def explain(plan: Plan) -> str:
    """A table with a row for each collective, as plain text of at most 100 columns."""
    size = dict(plan.sizes)
    console = Console(width=100, no_color=True, record=True, file=io.StringIO())
    console.print(str(plan), highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in (
        "collective",
        "schedule",
        "steps",
        "rounds",
        "sent",
        "bound",
        "depth",
        "equal bits",
    ):
        table.add_column(column, justify="right" if column in _NUMBERS else "left", overflow="fold")
    rows = list(_rows(plan))
    for label, c in rows:
        if c is None:
            table.add_row(label, "none", *["-"] * 6)
            continue
        table.add_row(
            label,
            str(c.schedule),
            str(c.steps),
            str(c.rounds) if c.rounds or c.sent is not None else "-",
            "-" if c.sent is None else share(c.sent),
            share(c.bound.sent) if c.bound else "-",
            "-" if c.depth is None else str(c.depth),
            {True: "yes", False: "no", None: "trusted"}[c.consistent],
        )
    console.print(table)
    ranks = " x ".join(f"{axis} {size[axis]}" for axis in plan.axes)
    lines = [
        f"{plan.ranks} ranks ({ranks}). S: a rank's full buffer; sent: by the busiest rank.",
        "A round is one ppermute. Where they are many, or the mesh small, XLA's own may be faster.",
    ]
    if any(c.trusted for _, c in rows if c):
        lines.append("XLA's own (native, trusted) is one of the steps, but none of the rounds.")
    if plan.tuned is not None:
        lines.append(
            f"Chosen for {plan.tuned.use} values by a sweep on this machine: clearly faster than XLA's "
            f"own, or XLA's own.{f' What was measured: {plan.tuned.where}.' if plan.tuned.where else ''}"
        )
    if plan.chosen is not None:
        lines.append("Chosen by size, by the price on the machine, for a rank's full buffer S.")
    rest = [a for a, n in plan.sizes if a not in plan.axes and n > 1]
    if rest:
        lines.append(f"Left to XLA: {', '.join(rest)}.")
    for line in lines:
        console.print(line, highlight=False)
    told = [line.rstrip() for line in console.export_text().splitlines()]
    return "\n".join([*told, *forecast(plan)])


def _rows(plan: Plan) -> Iterator[tuple[str, Certificate | None]]:
    """What each row is about, and the proof; None for what the plan does not have."""
    for collective in COLLECTIVES:
        if collective not in plan.collectives:
            yield collective, None
            continue
        for least, schedule in plan.by_size(collective).entries:
            label = f"{collective} from {units.size(least)}" if least else collective
            yield label, certify(schedule, dict(plan.sizes))


_NUMBERS = {"steps", "rounds", "sent", "bound", "depth"}
