"""Folklore about shares of a step: 64 GPUs, eight on PCIe, a slow network."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from common import table
from folklore_common import (
    BERT,
    CONDITION,
    NATIVE,
    RING,
    RINGS,
    Cost,
    Entry,
    cost,
    paragraphs,
    said,
)

from collc.machine.catalog import model
from collc.machine.scaling.table import percent
from collc.machine.scaling.work import UTILISATION
from collc.machine.text import machine

SHOWN = {RING: "flat ring", RINGS: "rings by host", NATIVE: "XLA's own"}


@dataclass(frozen=True)
class Share:
    """64 GPUs whose flat ring takes 70 % of the step; what other schedules leave of that.

    ``rows``: machine, and by schedule its cost and share of the step.
    """

    before: float
    after: float
    rows: tuple[tuple[str, dict[str, Cost], dict[str, float]], ...]

    @property
    def quicker(self) -> float:
        """How much quicker communication has to become."""
        return self.before / (1 - self.before) * (1 - self.after) / self.after

    @property
    def step(self) -> float:
        """How much quicker the step is then."""
        return (1 - self.after) / (1 - self.before)

    def entry(self) -> Entry:
        rows = [
            [text, SHOWN[s], *c.cells()[::2], percent(shares[s])]
            for text, costs, shares in self.rows
            for s, c in costs.items()
        ]
        return Entry(
            "64 GPUs: communication falls from 70 % to 30 % of the step",
            "On 64 GPUs the right all-reduce takes communication from 70 % of the step down to "
            "30 %.",
            CONDITION,
            "a NIC for each GPU, and a flat ring before. With one NIC a host, no schedule does it.",
            paragraphs(
                f"From 70 % to 30 %, communication has to become {self.quicker:.3g} times "
                f"quicker, and the step {self.step:.3g} times. 8 hosts of 8 H100; BERT-large in "
                f"bfloat16, {BERT / 1e6:.0f} MB. Compute is chosen so that the flat ring has its "
                "70 % by the lowered price; shares are by that price too.",
                table(["machine", "schedule", "abstract", "lowered", "share of the step"], rows),
                "A flat ring leaves a host through one NIC, whatever the number of NICs; cut "
                "into shards by a scatter inside, the buffer leaves through all of them. That "
                "alone comes near; XLA's own goes beyond, since NCCL uses all NICs and the "
                "NVSwitches add. Who measures 70 % with XLA's own has another problem.",
            ),
            tuple(f'collc cost "{s}" --machine infiniband:8 --size {BERT}' for s in (RING, RINGS)),
        )


@cache
def share() -> Share:
    rows = []
    for text in ("infiniband:8", "infiniband:8 nics=1"):
        costs = {s: cost(s, machine(text), {"host": 8, "gpu": 8}, BERT) for s in SHOWN}
        compute = costs[RING].lowered * 3 / 7
        rows.append((text, costs, {s: c.lowered / (c.lowered + compute) for s, c in costs.items()}))
    return Share(0.7, 0.3, tuple(rows))


VGG = 138_357_544 * 4  # bytes of VGG-16's gradients in float32
VGG_FLOPS = 3 * 31e9  # of an image: 15.5 G multiply-adds forward, twice as much backward
GPU_FLOPS = 8e12  # reached by a GPU of that time in float32
ACROSS = (0, 4, 1, 5, 2, 6, 3, 7)  # from socket to socket with every hop


@dataclass(frozen=True)
class Eight:
    """VGG-16 on 8 PCIe GPUs: a ring in good and bad order; speed-ups over one GPU by batch."""

    good: Cost
    bad: Cost
    batches: tuple[tuple[int, float, float, float], ...]  # images a GPU, compute, good, bad

    @property
    def window(self) -> tuple[float, float]:
        """Batches between which the good order gives 6 to 7, and the bad one under 4."""
        second = GPU_FLOPS / VGG_FLOPS
        # 8 / (1 + ring/compute) is at least 6, and under 4 for the bad ring.
        return 3 * self.good.lowered * second, self.bad.lowered * second

    def entry(self) -> Entry:
        rows = [[b, said(c), good, bad] for b, c, good, bad in self.batches]
        low, high = self.window
        return Entry(
            "8 GPUs that give 6 to 7 times one, and under 4 in bad order",
            "8 GPUs give 6 to 7 times one, and less than 4 times if the ring is in a bad order.",
            CONDITION,
            f"one machine has both numbers only for batches of {np.ceil(low):.0f} to "
            f"{np.floor(high):.0f} images a GPU.",
            paragraphs(
                f"`pcie-8`: two sockets of four GPUs. VGG-16, {VGG / 1e6:.0f} MB of float32 "
                f"gradients, nothing hidden, {VGG_FLOPS / 1e9:.0f} GFLOP an image at "
                f"{GPU_FLOPS / 1e12:g} TFLOP/s. In order, two of the ring's eight hops cross "
                f"between the sockets, one each way: {said(self.good.lowered)} (abstract "
                f"{said(self.good.abstract)}, simulated {said(self.good.simulated)}). In the "
                f"order {', '.join(map(str, ACROSS))} all do, four each way: "
                f"{said(self.bad.lowered)} ({said(self.bad.abstract)}, "
                f"{said(self.bad.simulated)}).",
                table(["images a GPU", "compute", "speed-up, in order", "in bad order"], rows),
                f"The bad ring is {self.bad.lowered / self.good.lowered:.2f} times slower. With x "
                "= ring / compute the speed-up is 8 / (1 + x): at least 6 needs x up to 1/3, "
                "under 4 needs more than 1 in the bad order. So both are seen only where compute "
                "takes 3 to 3.9 times the good ring, and then the good order gives 6 to 6.4, not "
                "7.",
            ),
            (
                f"collc cost ring.all_reduce --machine pcie-8 --size {VGG}",
                f"collc cost ring.all_reduce --machine pcie-8 --size {VGG} --order "
                f"{','.join(map(str, ACROSS))}",
            ),
        )  # fmt: skip


@cache
def eight() -> Eight:
    on = machine("pcie-8")
    good = cost("ring.all_reduce @ gpu", on, {"gpu": 8}, VGG, simulated=True)
    bad = cost("ring.all_reduce @ gpu", on, {"gpu": 8}, VGG, ACROSS, simulated=True)
    rows = []
    for batch in (16, 20, 32, 64):
        compute = batch * VGG_FLOPS / GPU_FLOPS
        rows.append((batch, compute, *(8 / (1 + c.lowered / compute) for c in (good, bad))))
    return Eight(good, bad, tuple(rows))


# GPT of 24 layers of 2048, 50,257 tokens and 2048 positions; biases and norms are not counted.
GPT = 24 * 12 * 2048**2 + (50_257 + 2048) * 2048
TOKENS = 16 * 2048  # on each GPU
NETWORKS = {
    "ethernet:8": "one 100 Gb/s port for 8 GPUs, TCP",
    "ethernet:8 nics=8": "100 Gb/s for each GPU, TCP",
    "ethernet:8 net=400Gb/s": "one 400 Gb/s port for 8 GPUs, TCP",
    "infiniband:8": "400 Gb/s for each GPU, InfiniBand",
}


@dataclass(frozen=True)
class Slow:
    """GPT of 1.3 billion parameters on 64 H100: what networks cost. By machine: explicit and native."""

    compute: float
    rows: tuple[tuple[str, Cost, Cost], ...]

    @property
    def half(self) -> float:
        """The share on the first network with half of the batch."""
        own = self.rows[0][2].lowered
        return own / (self.compute / 2 + own)

    def share(self, text: str, overlap: float = 0.0) -> float:
        """XLA's own, of the step; ``overlap``: the share of compute that can hide it."""
        own = next(native.lowered for name, _, native in self.rows if name == text)
        exposed = max(0.0, own - overlap * self.compute)
        return exposed / (self.compute + exposed)

    def entry(self) -> Entry:
        rows = [
            [
                NETWORKS[t],
                *two.cells()[::2],
                said(own.lowered),
                percent(self.share(t)),
                percent(self.share(t, 0.5)),
            ]
            for t, two, own in self.rows
        ]
        head = ["network", "rings by host: abstract", "lowered", "XLA's own", "of the step"]
        return Entry(
            "A 100 Gb/s network that costs 40 % of the step",
            "A 100 Gb/s network eats 40 % of the step.",
            CONDITION,
            "where 8 GPUs share it, and nothing is hidden behind the backward pass.",
            paragraphs(
                f"8 hosts of 8 H100; GPT of {GPT / 1e9:.2f} billion parameters, bfloat16, 16 "
                f"sequences of 2048 tokens a GPU: 6 x parameters x tokens at {UTILISATION:.0%} of "
                f"{model('h100').peak / 1e12:g} TFLOP/s, {said(self.compute)}. With half of the batch "
                f"it would be {percent(self.half)}: this says as much of a batch as of a network.",
                table([*head, "with half of the compute to hide it"], rows),
            ),
            (
                f"collc scale --machine ethernet --compute {self.compute * 1e3:.0f}ms "
                f"--parameters {2 * GPT} --devices 64",
            ),
        )


@cache
def slow() -> Slow:
    compute = 6 * GPT * TOKENS / (model("h100").peak * UTILISATION)
    rows = tuple(
        (t, *(cost(s, machine(t), {"host": 8, "gpu": 8}, 2 * GPT) for s in (RINGS, NATIVE)))
        for t in NETWORKS
    )
    return Slow(compute, rows)
