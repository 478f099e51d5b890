"""Strategies as a table: what is reduced, over what, by what, and for how long."""

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from collc.language.algebra import Schedule
from collc.machine import units
from collc.planning.plan import Plan
from collc.planning.why import side
from collc.training.gradients.buckets import cut, message_of
from collc.training.strategy import WEIGHTED, Strategy

Sent = tuple[Schedule, int]  # with the bytes that it moves
Buckets = Sequence[Sequence[Sent]]

_NUMBERS = ("leaves", "bytes", "time")


@dataclass(frozen=True)
class Row:
    """A pattern, its strategy, and the shapes of the leaves that it takes, in backward order."""

    pattern: str
    strategy: Strategy
    leaves: list[Any]


def table(plan: Plan, rows: Sequence[Row], bucket: int) -> str:
    """A row for each pattern, as plain text; below, by what schedules it is reduced, and notes.

    The table has at most 100 columns; a plan or a schedule is on one line, however long.
    """
    sent = [list(_sent(row, bucket)) for row in rows]
    console = Console(width=100, no_color=True, record=True, file=io.StringIO())
    console.print(str(plan), highlight=False, soft_wrap=True)
    console.print(_rows(rows, sent))
    for line in [*_schedules(rows, sent), *_below(plan, rows, bucket)]:
        console.print(line, highlight=False, soft_wrap=True)
    return "\n".join(line.rstrip() for line in console.export_text().splitlines())


def _rows(rows: Sequence[Row], sent: Sequence[Buckets]) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("pattern", "leaves", "bytes", "strategy", "over", "divided by", "time"):
        right = column in _NUMBERS
        justify = "right" if right else "left"
        made.add_column(column, justify=justify, overflow="fold", no_wrap=right)
    for row, buckets in zip(rows, sent, strict=True):
        own = row.strategy
        made.add_row(
            row.pattern,
            str(len(row.leaves)),
            units.size(sum(_bytes(own, x) for x in row.leaves)),
            str(own),
            ", ".join(own.over) or "-",
            _divided(own),
            _time(own.placed, buckets),
        )
    return made


def _schedules(rows: Sequence[Row], sent: Sequence[Buckets]) -> Iterator[str]:
    """By what each pattern's buckets are reduced, alike ones together."""
    patterns: dict[str, list[str]] = {}
    for row, buckets in zip(rows, sent, strict=True):
        for one in dict.fromkeys(" and ".join(str(s) for s, _ in each) for each in buckets):
            patterns.setdefault(one, []).append(row.pattern)
    for schedule, taken in patterns.items():
        yield f"{', '.join(taken)}: {schedule}"


def _below(plan: Plan, rows: Sequence[Row], bucket: int) -> Iterator[str]:
    yield (
        "Bytes are a rank's gradients, as they travel. What is treated alike travels together, in "
        f"buckets of at most {units.size(bucket)}."
    )
    wide = [r.pattern for r in rows if any(_is_wide(r.strategy, x) for x in r.leaves)]
    if wide:
        yield f"{', '.join(wide)}: narrower gradients travel in the dtype that sums are kept in."
    if any(row.strategy.kind == "server" for row in rows):
        yield "A server's schedules are those of its push and its pull; the time is for both."
    sites = [site for row in rows if (site := row.strategy.placed.site) is not None]
    if not sites:
        yield "No times, for there is no machine: collc.plan(..., machine=...)."
        return
    machines = ", ".join(dict.fromkeys(str(site.machine) for site in sites))
    yield f"Predicted on {machines}, for each pattern's buckets one after another, without overlap."


def _divided(own: Strategy) -> str:
    if own.mean in WEIGHTED:
        return own.mean
    return f"{own.divisor} rank{'s' * (own.divisor != 1)}"


def _held(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _bytes(own: Strategy, leaf: Any) -> int:
    message = message_of(own, leaf)
    return message.bytes(leaf) if message else _held(leaf)


def _is_wide(own: Strategy, leaf: Any) -> bool:
    return _bytes(own, leaf) > _held(leaf)


def _sent(row: Row, bucket: int) -> Iterator[list[Sent]]:
    """What each bucket of a pattern's gradients is sent by, and at a server its parameters."""
    leaves = [(m, x) for x in row.leaves if _held(x) and (m := message_of(row.strategy, x))]
    for members in cut([(m, m.bytes(x)) for m, x in leaves], bucket):
        message = leaves[members[0]][0]
        size = sum(message.bytes(leaves[i][1]) for i in members)
        held = sum(_held(leaves[i][1]) for i in members)
        pull = [(message.pull(held), held)] if message.scatter else []
        yield [(message.schedule(size), size), *pull]


def _time(plan: Plan, sent: Buckets) -> str:
    if plan.site is None:
        return "-"
    costs = plan.site.costs
    prices = (side(costs, schedule, size).price.lowered for each in sent for schedule, size in each)
    return units.seconds(sum(prices))
