"""Strategies as a table: what is reduced, over what, by what, and for how long."""

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from collc.language.algebra import Schedule
from collc.language.library import find
from collc.machine import units
from collc.planning.plan import Plan
from collc.planning.why import side
from collc.training.gradients.buckets import Message, cut, message_of
from collc.training.strategy import WEIGHTED, Strategy

Sent = tuple[list[Schedule], int]  # the schedules of a message, and its bytes

_NUMBERS = ("leaves", "bytes", "time")


@dataclass(frozen=True)
class Row:
    """A pattern, its strategy, and the shapes of the leaves that it takes, in backward order."""

    pattern: str
    strategy: Strategy
    leaves: list[Any]


def table(plan: Plan, rows: Sequence[Row], bucket: int) -> str:
    """A row for each pattern, as plain text of at most 100 columns."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("pattern", "leaves", "bytes", "strategy", "over", "divided by", "time"):
        right = column in _NUMBERS
        justify = "right" if right else "left"
        made.add_column(column, justify=justify, overflow="fold", no_wrap=right)
    schedules: dict[str, list[str]] = {}
    for row in rows:
        own, its_plan = row.strategy, row.strategy.plan or plan
        sent = _sent(row, its_plan, bucket)
        for one in dict.fromkeys(" and ".join(map(str, each)) for each, _ in sent):
            schedules.setdefault(one, []).append(row.pattern)
        made.add_row(
            row.pattern,
            str(len(row.leaves)),
            units.size(sum(map(_bytes, row.leaves))),
            str(own),
            ", ".join(own.axes(its_plan)) or "-",
            _divided(own, its_plan),
            _time(its_plan, sent),
        )
    console = Console(width=100, no_color=True, record=True, file=io.StringIO())
    console.print(str(plan), highlight=False, soft_wrap=True)
    console.print(made)
    for schedule, patterns in schedules.items():
        console.print(f"{', '.join(patterns)}: {schedule}", highlight=False)
    for line in _below(plan, rows, bucket):
        console.print(line, highlight=False)
    return "\n".join(line.rstrip() for line in console.export_text().splitlines())


def _below(plan: Plan, rows: Sequence[Row], bucket: int) -> Iterator[str]:
    yield (
        f"Bytes are a rank's. What is treated alike travels together, in buckets of at most "
        f"{units.size(bucket)}."
    )
    if any(row.strategy.kind == "server" for row in rows):
        yield "A server's schedules are those of its push and its pull; the time is for both."
    sites = [site for row in rows if (site := (row.strategy.plan or plan).site) is not None]
    if not sites:
        yield "No times, for there is no machine: collc.plan(..., machine=...)."
        return
    machines = ", ".join(dict.fromkeys(str(site.machine) for site in sites))
    yield f"Predicted on {machines}, for each pattern's buckets one after another, without overlap."


def _divided(own: Strategy, plan: Plan) -> str:
    if own.mean in WEIGHTED:
        return own.mean
    ranks = own.divisor(plan)
    return f"{ranks} rank{'s' * (ranks != 1)}"


def _bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _sent(row: Row, plan: Plan, bucket: int) -> list[Sent]:
    own, axes = row.strategy, row.strategy.axes(plan)
    leaves = [x for x in row.leaves if _bytes(x)]
    if not axes:
        return []
    kinds = [(_message(own, plan, axes, x), _bytes(x)) for x in leaves]
    found: list[Sent] = []
    for members in cut(kinds, bucket):
        size = sum(kinds[i][1] for i in members)
        found.append((_schedules(own, plan, axes, size), size))
    return found


def _schedules(own: Strategy, plan: Plan, axes: tuple[str, ...], size: int) -> list[Schedule]:
    if own.servers is not None:
        return [find(f"servers.{c}({own.servers})") @ axes for c in ("push", "pull")]
    each = ("reduce_scatter", "all_gather") if own.kind == "server" else ("all_reduce",)
    return [plan.schedule(c, axes, size=size) for c in each]


def _message(own: Strategy, plan: Plan, axes: tuple[str, ...], leaf: Any) -> Message:
    scatter = own.kind == "server"
    return message_of(
        plan,
        axes,
        leaf,
        accumulate=own.accumulate,
        wire=own.wire,
        scatter=scatter,
        servers=own.servers,
    )


def _time(plan: Plan, sent: Sequence[Sent]) -> str:
    if plan.site is None:
        return "-"
    costs = plan.site.costs
    prices = (
        side(costs, schedule, size).price.lowered
        for schedules, size in sent
        for schedule in schedules
    )
    return units.seconds(sum(prices))
