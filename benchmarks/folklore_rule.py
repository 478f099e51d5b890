"""The rule of thumb by the number of GPUs, beside what the model chooses by size and fabric."""

from dataclasses import dataclass
from functools import cache

from common import table
from folklore_common import (
    FALSE,
    KIB,
    MIB,
    NATIVE,
    RING,
    RINGS,
    Cost,
    Entry,
    grown,
    on,
    paragraphs,
)

from collc.machine.nccl import error
from collc.machine.scaling.scale import SCHEDULES
from collc.machine.units import size as bytes_said

FABRICS = {
    "NVLink": "gb200-nvl72",
    "InfiniBand": "infiniband",
    "RoCE": "roce",
    "Ethernet": "ethernet",
    "unknown": "gpus=8 link=25GB/s,3us nics=1 net=25Gb/s,30us",
}
OURS = {
    "ring": RING,
    "halving": SCHEDULES["halving"],
    "tree": SCHEDULES["tree"],
    "rings by host": RINGS,
    "halving by host": SCHEDULES["halving by host"],
    "tree by host": SCHEDULES["tree by host"],
}
SIZES = (64 * KIB, 4 * MIB, 256 * MIB)
# The rule as it is told, and a number of GPUs in each of its ranges: the first, and on NVL72.
RULE = {
    "up to 8": ("ring", 8, 8),
    "8 to 32": ("tree", 32, 32),
    "32 to 128": ("rings by host", 128, 72),
    "above 128": ("tree by host", 256, 288),
}


@dataclass(frozen=True)
class Choice:
    """What the model chooses on so many GPUs of a fabric: lowered seconds by schedule, and XLA's own."""

    fabric: str
    range: str
    devices: int
    size: int
    rule: str
    error: float
    native: Cost
    ours: dict[str, Cost]

    @property
    def best(self) -> str:
        """The quickest of ours; of equals the first."""
        return min(self.ours, key=lambda name: self.ours[name].lowered)

    @property
    def behind(self) -> float:
        """How many times XLA's own the best of ours takes."""
        return self.ours[self.best].lowered / self.native.lowered

    @property
    def follows(self) -> bool:
        """Whether the model cannot tell the rule's schedule from the best of ours."""
        return self.ours[self.rule].lowered <= self.ours[self.best].lowered * (1 + self.error)

    def cell(self) -> str:
        own = self.native.how.split(" ")[0]
        return f"{own}; {self.best} {self.behind:.3g} x{', the rule ties' if self.follows else ''}"


@dataclass(frozen=True)
class Rule:
    """The rule of thumb beside the model, on five fabrics."""

    choices: tuple[Choice, ...]

    @property
    def followed(self) -> int:
        """How often it has the best of ours, or ties with it."""
        return sum(choice.follows for choice in self.choices)

    @property
    def worst(self) -> float:
        """How many times the best of ours the rule's schedule takes, at worst."""
        return max(c.ours[c.rule].lowered / c.ours[c.best].lowered for c in self.choices)

    def entry(self) -> Entry:
        rows = []
        for fabric in FABRICS:
            for span, (rule, *_) in RULE.items():
                own = [c for c in self.choices if (c.fabric, c.range) == (fabric, span)]
                rows.append([fabric, f"{span} ({own[0].devices})", rule, *(c.cell() for c in own)])
        machines = ", ".join(f"{fabric} `{text}`" for fabric, text in FABRICS.items())
        native = sum(c.behind > 1 + c.error for c in self.choices)
        loses = sum(1 / c.behind > 1 + c.error for c in self.choices)
        return Entry(
            "Up to 8, 8 to 32, 32 to 128, above 128",
            "Up to 8 GPUs take a ring, from 8 to 32 a tree, from 32 to 128 two levels, above 128 "
            "two levels with a tree between.",
            FALSE,
            "the number of GPUs alone does not decide. The rule has the best of ours, or ties, "
            f"in {self.followed} of {len(self.choices)} cases, and its schedule takes up to "
            f"{self.worst:.0f} times as long as that.",
            paragraphs(
                "The saying is told in several ways; this is the one that we test. Machines, of "
                f"so many hosts as it takes: {machines}. Each cell says which way XLA's own goes, "
                "the best of our six schedules (ring, halving, tree, each flat and between "
                "hosts), and how many times XLA's own it takes, by the lowered model:",
                table(["fabric", "rule (GPUs)", "it says", *map(bytes_said, SIZES)], rows),
                f"Of {len(self.choices)} cases XLA's own wins {native} by more than the model's "
                f"error and loses {loses}; where nothing was measured, it is the choice. Among "
                "ours size and fabric decide: halving with its few rounds where latency counts, "
                "and between hosts as soon as there are several and the buffer is large; a flat "
                "tree, which sends halves of the whole again and again, nowhere. Of unknown GPUs "
                "nothing is known beyond 32, of the others beyond 256 (an H100's prices were "
                "compared with logs of up to 128): take what is beyond as a guess. `collc scale` "
                "prints its range.",
            ),
            ("collc scale --machine roce --compute 10ms --parameters 4MiB --devices 8,32,128,256",),
        )


@cache
def rule() -> Rule:
    found = []
    for fabric, text in FABRICS.items():
        for span, (name, usual, nvlink) in RULE.items():
            n = nvlink if fabric == "NVLink" else usual
            for size in SIZES:
                ours = {k: on(text, n, s, size) for k, s in OURS.items()}
                own = on(text, n, NATIVE, size)
                found.append(
                    Choice(fabric, span, n, size, name, error(grown(text)(n), n), own, ours)
                )
    return Rule(tuple(found))
