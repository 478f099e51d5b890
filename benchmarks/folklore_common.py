"""What the entries of the folklore share: prices of schedules, counts of sends, an entry's page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import numpy as np
from common import prose

from collc.language.library import find
from collc.machine.flow import Flow, flow
from collc.machine.placement import placed
from collc.machine.price import priced
from collc.machine.scaling.growing import machines, mesh
from collc.machine.scaling.scale import SCHEDULES
from collc.machine.simulation.simulate import simulate
from collc.machine.topology import Machine
from collc.machine.units import seconds

KIB, MIB = 2**10, 2**20
BERT = (
    335_141_888 * 2
)  # bytes of BERT-large's gradients in bfloat16: see folklore_models.parameters
TRUE, CONDITION, FALSE = "true", "true with a condition", "false"

# By host: what is between nodes is cut by the scatter inside.
RINGS, RING, NATIVE = (SCHEDULES[name] for name in ("ring by host", "ring", "native"))


@dataclass(frozen=True)
class Cost:
    """Seconds by the three models; None where XLA's own takes part, or where it was not asked for."""

    abstract: float | None
    lowered: float
    simulated: float | None = None
    how: str = ""

    def cells(self) -> list[str]:
        """Abstract, simulated, lowered."""
        return [said(self.abstract), said(self.simulated), said(self.lowered)]


@dataclass(frozen=True)
class Counts:
    """Of a schedule on n ranks: messages, and in units of S all bytes, those that the busiest rank
    sends, those that it receives, and those that rank 0 receives."""

    messages: int
    bytes: Fraction
    sent: Fraction
    received: Fraction
    root: Fraction


@dataclass(frozen=True)
class Entry:
    """An entry of the page. ``lines``: Markdown; ``by``: the commands or expressions of its numbers."""

    title: str
    claim: str
    verdict: str
    short: str
    lines: tuple[str, ...]
    by: tuple[str, ...]

    def page(self) -> list[str]:
        by = ", ".join(f"`{command}`" for command in self.by)
        return [
            f"## {self.title}",
            "",
            *prose(f"*“{self.claim}”*"),
            "",
            *prose(f"**{self.verdict[0].upper()}{self.verdict[1:]}**: {self.short}"),
            "",
            *self.lines,
            "",
            *prose(f"From: {by}."),
        ]


def said(t: float | None) -> str:
    """Seconds in a table."""
    return "-" if t is None else seconds(t)


def paragraphs(*blocks: str | Sequence[str]) -> tuple[str, ...]:
    """Texts, wrapped, and tables as they are, with lines between."""
    lines: list[str] = []
    for block in blocks:
        lines += [""] * bool(lines) + (prose(block) if isinstance(block, str) else list(block))
    return tuple(lines)


@cache
def _flow(schedule: str, sizes: tuple[tuple[str, int], ...]) -> Flow:
    return flow(find(schedule), dict(sizes))


def cost(
    schedule: str,
    machine: Machine,
    sizes: Mapping[str, int],
    size: float,
    order: Sequence[int] | None = None,
    simulated: bool = False,
) -> Cost:
    """What a schedule costs on a machine; ``sizes`` as for ``placed``, {"": n} where it has no axis."""
    what, place = _flow(schedule, tuple(sizes.items())), placed(machine, sizes, order)
    found = priced(what, place, size)
    own = simulated and not what.native
    at_once = simulate(what, place, size).seconds if own else None
    return Cost(found.abstract, found.lowered, at_once, found.rows[0].how if what.native else "")


def counts(schedule: str, n: int) -> Counts:
    """The sends of an unplaced schedule on n ranks, counted one by one."""
    messages, total = 0, Fraction(0)
    sent, received = np.zeros(n, object), np.zeros(n, object)
    for part in _flow(schedule, (("", n),)).parts:
        for moment in part.moments or ():
            found = moment.messages()
            messages += len(found.src)
            total += int(found.chunks.sum()) * part.chunk
            np.add.at(sent, found.src, found.chunks * part.chunk)
            np.add.at(received, found.dst, found.chunks * part.chunk)
    return Counts(
        messages, total, *(Fraction(x) for x in (sent.max(), received.max(), received[0]))
    )


grown = cache(machines)  # by the text of a machine: so many of its devices


def on(kind: str, devices: int, schedule: str, size: float, simulated: bool = False) -> Cost:
    """What a schedule costs on so many devices of a kind of machine."""
    where = grown(kind)(devices)
    return cost(schedule, where, mesh(where, devices), size, simulated=simulated)
