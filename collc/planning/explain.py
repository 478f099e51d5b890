"""A plan in words: what each collective does, what it costs at least, and what XLA would do."""

import io

from rich.console import Console
from rich.table import Table

from collc.analysis.certificate import share
from collc.planning.plan import COLLECTIVES, Plan


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
        table.add_column(column, justify="right" if column in _NUMBERS else "left")
    certificates = {collective: plan.certificate(collective) for collective in plan.collectives}
    for collective in COLLECTIVES:
        if (c := certificates.get(collective)) is None:
            table.add_row(collective, "none", *["-"] * 6)
            continue
        table.add_row(
            collective,
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
    if any(certificate.trusted for certificate in certificates.values()):
        lines.append("XLA's own (native, trusted) is one of the steps, but none of the rounds.")
    rest = [a for a, n in plan.sizes if a not in plan.axes and n > 1]
    if rest:
        lines.append(f"Left to XLA: {', '.join(rest)}.")
    for line in lines:
        console.print(line, highlight=False)
    return "\n".join(line.rstrip() for line in console.export_text().splitlines())


_NUMBERS = {"steps", "rounds", "sent", "bound", "depth"}
