"""Folklore about racks: the order of devices, and what is quicker inside or between."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from common import table
from folklore_common import (
    BERT,
    CONDITION,
    MIB,
    NATIVE,
    RING,
    RINGS,
    TRUE,
    Cost,
    Entry,
    cost,
    paragraphs,
)

from collc.machine.placement import advice, placed
from collc.machine.text import machine
from collc.machine.uniform import two_level
from collc.machine.units import size as bytes_said

THREE = (
    "ring.reduce_scatter @ gpu >> ring.reduce_scatter @ host >> ring.all_reduce @ rack "
    ">> ring.all_gather @ host >> ring.all_gather @ gpu"
)
RACKS = "dgx-h100:32 racks=4 uplink=3200Gb/s,2us"


@dataclass(frozen=True)
class Order:
    """256 GPUs in 4 racks: a flat ring in good and in bad order, and schedules by host and rack."""

    good: Cost
    bad: Cost
    two: Cost
    three: Cost
    native: Cost
    native_bad: Cost
    advised: tuple[int, ...]  # the order that collc proposes instead

    def entry(self) -> Entry:
        rows = [
            ["flat ring, ranks dealt to the racks in turn", *self.bad.cells()],
            ["flat ring, rank r is device r", *self.good.cells()],
            ["rings by host", *self.two.cells()],
            ["rings by host and rack", *self.three.cells()],
            ["XLA's own", *self.native.cells()],
            ["XLA's own, ranks dealt to the racks in turn", *self.native_bad.cells()],
        ]
        again = self.bad.lowered / self.good.lowered
        return Entry(
            "Bad device order, four racks of 64",
            "On 4 racks of 64 GPUs a hierarchical all-reduce is many times faster than a flat "
            "ring.",
            TRUE,
            f"{self.bad.lowered / self.two.lowered:.0f} times in a bad order, of which the order "
            f"alone is {again:.2g}.",
            paragraphs(
                f"`{RACKS}`: 8 hosts a rack, whose uplink is an eighth of what its NICs could "
                f"send. {BERT / 1e6:.0f} MB. In the bad order each of the 256 hops leaves its "
                "rack, and 64 messages share an uplink; in the good one 4 hops do. "
                "`collc.machine.placement.advice` finds the good order.",
                table(["schedule", "abstract", "simulated", "lowered"], rows),
                "By our model XLA's own follows the order of its ranks too.",
            ),
            (
                f'collc cost "{RING}" --machine "{RACKS}" --size {BERT}',
                f'placed(machine("{RACKS}"), {{"host": 32, "gpu": 8}}, dealt(4, 64))',
            ),
        )


def dealt(racks: int, each: int) -> list[int]:
    """Ranks dealt to the racks in turn: the device of each."""
    return np.arange(racks * each).reshape(racks, each).T.reshape(-1).tolist()


@cache
def order() -> Order:
    on, flat, bad = machine(RACKS), {"host": 32, "gpu": 8}, dealt(4, 64)
    better = advice(placed(on, {"gpu": 256}, bad))
    return Order(
        cost(RING, on, flat, BERT, simulated=True),
        cost(RING, on, flat, BERT, bad, simulated=True),
        cost(RINGS, on, flat, BERT, simulated=True),
        cost(THREE, on, {"rack": 4, "host": 8, "gpu": 8}, BERT, simulated=True),
        cost(NATIVE, on, flat, BERT),
        cost(NATIVE, on, flat, BERT, bad),
        better.devices if better else (),
    )


INNER, OUTER = 5e-6, 10e-6  # latencies in a rack and between racks


@dataclass(frozen=True)
class Speeds:
    """4 racks of 8 GPUs: Gb/s inside and between, uplinks of a rack; a flat ring, rings by rack."""

    size: int
    rows: tuple[tuple[int, int, int, Cost, Cost], ...]

    def entry(self) -> Entry:
        cells = [
            [
                f"{a} / {b} Gb/s",
                uplinks,
                *flat.cells(),
                *two.cells(),
                f"{flat.lowered / two.lowered:.2f}",
            ]
            for a, b, uplinks, flat, two in self.rows
        ]
        head = ["inside / between", "uplinks", "flat: abstract", "simulated", "lowered"]
        return Entry(
            "Racks with 800 Gb/s inside and 200 between, and 400 inside with 800 between",
            "With 800 Gb/s in a rack and 200 between, go hierarchical; with 400 inside and 800 "
            "between, stay flat.",
            CONDITION,
            "where a rack has one uplink the first half gains nothing; where each GPU has one "
            "the second is false.",
            paragraphs(
                f"4 racks of 8 GPUs, {bytes_said(self.size)}, {INNER * 1e6:g} us inside and "
                f"{OUTER * 1e6:g} us between. What “between” means decides: one uplink that a "
                "rack's GPUs share, or one for each.",
                table([*head, "rings by rack: abstract", "simulated", "lowered", "gain"], cells),
                "For m racks of g a flat ring takes 2(mg - 1)/(mg) S at the pace of the slowest "
                "link; rings by rack take 2(g - 1)/g S inside and, on one uplink, 2(m - 1)/m S "
                "between. The two are equal where the inside is m times as fast: with 4 racks "
                "exactly at 800 to 200, where only latency speaks for the hierarchy. With an "
                "uplink a GPU the part between is cut by g, and the hierarchy wins both times.",
            ),
            (
                f"price(collc.parse({RINGS!r}), placed(two_level(4, 8, "
                '(5e-6, 1 / 100e9), (10e-6, 1 / 25e9), 1), {"host": 4, "gpu": 8}), 256 * 2**20)',
            ),
        )


@cache
def speeds() -> Speeds:
    rows = []
    for inside, between in ((800, 200), (400, 800)):
        for uplinks in (1, 8):
            ends = (INNER, 8 / inside / 1e9), (OUTER, 8 / between / 1e9)
            on, sizes = two_level(4, 8, *ends, uplinks), {"host": 4, "gpu": 8}
            both = [cost(s, on, sizes, 256 * MIB, simulated=True) for s in (RING, RINGS)]
            rows.append((inside, between, uplinks, both[0], both[1]))
    return Speeds(256 * MIB, tuple(rows))
