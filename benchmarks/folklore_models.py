"""Folklore about all-to-all, and about embeddings."""

from dataclasses import dataclass
from functools import cache

from common import table
from folklore_common import (
    CONDITION,
    FALSE,
    KIB,
    MIB,
    NATIVE,
    Cost,
    Entry,
    on,
    paragraphs,
    said,
)

from collc.machine.catalog import model
from collc.machine.scaling.table import percent
from collc.machine.scaling.work import UTILISATION
from collc.machine.units import size as bytes_said

EXCHANGES = {
    "pairwise": "pairwise.all_to_all @ (host, gpu)",
    "two-level": "pairwise.all_to_all @ gpu >> pairwise.all_to_all @ host",
    "native": "native.all_to_all @ (host, gpu)",
    "native two-level": "native.all_to_all @ gpu >> native.all_to_all @ host",
}
FABRIC = "infiniband"


@dataclass(frozen=True)
class Exchange:
    """All-to-all, flat and two-level, ours and XLA's own: by GPUs and bytes. Messages between hosts."""

    flat: int
    two: int
    rows: tuple[tuple[int, int, dict[str, Cost]], ...]

    def gain(self, devices: int, size: int, kind: str) -> float:
        """How much quicker two-level is, in the lowered model; ``kind``: "native " or ""."""
        costs = next(c for n, s, c in self.rows if (n, s) == (devices, size))
        flat = costs["native" if kind else "pairwise"]
        return flat.lowered / costs[f"{kind}two-level"].lowered

    def entry(self) -> Entry:
        cells = [
            [n, bytes_said(size), *(said(t) for name in ("pairwise", "two-level") for t in
             (c[name].abstract, c[name].simulated, c[name].lowered)),
             said(c["native"].lowered), said(c["native two-level"].lowered),
             f"{self.gain(n, size, 'native '):.2f}"]
            for n, size, c in self.rows
        ]  # fmt: skip
        head = [
            "GPUs",
            "S",
            "flat: abstract",
            "sim.",
            "lowered",
            "two-level: abstract",
            "sim.",
            "lowered",
        ]
        return Entry(
            "All-to-all, flat and two-level",
            "Two-level all-to-all is faster on 64 GPUs; at small scale it is slower.",
            CONDITION,
            "true of XLA's own and small buffers: two launches and every byte twice against "
            "fewer messages.",
            paragraphs(
                f"`{FABRIC}`, hosts of 8. On 64 GPUs a GPU sends {self.flat} messages to other "
                f"hosts, in two levels {self.two}. Gain: XLA's own flat over XLA's own in two "
                "levels.",
                table([*head, "XLA's own", "in two levels", "gain"], cells),
                "On 16 GPUs two levels lose at every size. On 64 they win while the messages are small; "
                "of 64 MiB the model, which errs by 12 %, cannot tell. Of our own pairwise exchange, "
                "whose rounds are launched one by one and run at the network's pace, two levels are "
                "quicker at all these sizes; the simulation, without lock-step, agrees.",
            ),
            (
                f'collc cost "{EXCHANGES["two-level"]}" --machine {FABRIC}:8 --size 64KiB',
                f'collc cost "{EXCHANGES["native"]}" --machine {FABRIC}:8 --size 64KiB',
            ),
        )


@cache
def exchange() -> Exchange:
    rows = tuple(
        (n, size, {k: on(FABRIC, n, s, size, simulated=True) for k, s in EXCHANGES.items()})
        for n in (16, 64)
        for size in (64 * KIB, MIB, 64 * MIB)
    )
    hosts, each = 8, 8
    return Exchange(each * (hosts - 1), hosts - 1, rows)


# BERT-large: Devlin et al. 2019. Layers, hidden, feed-forward, tokens, positions, segments.
LAYERS, HIDDEN, FORWARD, TOKENS, POSITIONS, SEGMENTS = 24, 1024, 4096, 30_522, 512, 2


def parameters() -> dict[str, int]:
    """The parameters of BERT-large, without heads: with biases and norms."""
    norm = 2 * HIDDEN
    attention = 4 * (HIDDEN * HIDDEN + HIDDEN)
    dense = HIDDEN * FORWARD + FORWARD + FORWARD * HIDDEN + HIDDEN
    return {
        "token embeddings": TOKENS * HIDDEN,
        "other embeddings": (POSITIONS + SEGMENTS) * HIDDEN + norm,
        "layers": LAYERS * (attention + dense + 2 * norm),
        "pooler": HIDDEN * HIDDEN + HIDDEN,
    }


SEQUENCES, LENGTH = 32, 512  # on each GPU
CLUSTERS = ("ethernet", "infiniband")


@dataclass(frozen=True)
class Embeddings:
    """BERT-large on 64 H100, bfloat16: steps with all gradients reduced, and all but the embeddings'.

    ``rows``: cluster, communication with and without, by XLA's own.
    """

    counted: dict[str, int]
    compute: float
    rows: tuple[tuple[str, Cost, Cost], ...]

    @property
    def share(self) -> float:
        """Of the parameters, that are embeddings."""
        of = self.counted
        return (of["token embeddings"] + of["other embeddings"]) / sum(of.values())

    def steps(self, kind: str) -> tuple[float, float]:
        """Seconds of a step, with the embeddings' gradients reduced and without."""
        whole, rest = next((a, b) for name, a, b in self.rows if name == kind)
        return self.compute + whole.lowered, self.compute + rest.lowered

    def gain(self, kind: str) -> float:
        """How much of the step is gained."""
        before, after = self.steps(kind)
        return 1 - after / before

    def entry(self) -> Entry:
        rows = [
            [
                kind,
                said(a.lowered),
                said(b.lowered),
                *map(said, self.steps(kind)),
                percent(self.gain(kind)),
            ]
            for kind, a, b in self.rows
        ]
        each = ", ".join(f"{what} {n:,}" for what, n in self.counted.items())
        return Entry(
            "A BERT-large whose embeddings stay local",
            "Keep BERT-large's embeddings local and most of the communication is gone.",
            FALSE,
            f"the embeddings are {percent(self.share)} of the bytes, and no step gains more than "
            "that.",
            paragraphs(
                f"Counted: {each}; {sum(self.counted.values()):,} in all. On 64 H100, hosts of 8, "
                f"bfloat16, {SEQUENCES} sequences of {LENGTH} a GPU, 6 FLOP a token and parameter "
                f"outside the embeddings at {UTILISATION:.0%} of the peak: {said(self.compute)} of "
                "compute, nothing hidden, XLA's own all-reduce, all gradients at once:",
                table(
                    ["network", "all reduced", "all but embeddings", "step", "step then", "gained"], rows
                ),
                "What is local is also no longer the same everywhere: vocabulary that is split "
                "over devices is another model of communication, and rows that few tokens touch "
                "are better sent as rows. Where embeddings are most of a model, as in "
                "recommenders, the saying is right.",
            ),
            (
                "collc scale --machine ethernet --devices 64 --compute "
                f"{self.compute * 1e3:.1f}ms --parameters {2 * sum(self.counted.values())}",),
        )  # fmt: skip


@cache
def embeddings() -> Embeddings:
    found = parameters()
    total = sum(found.values())
    local = found["token embeddings"] + found["other embeddings"]
    compute = 6 * (total - local) * SEQUENCES * LENGTH / (model("h100").peak * UTILISATION)
    rows = tuple(
        (kind, *(on(kind, 64, NATIVE, 2 * n) for n in (total, total - local))) for kind in CLUSTERS
    )
    return Embeddings(found, compute, rows)
