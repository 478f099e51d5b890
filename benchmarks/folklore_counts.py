"""Folklore about bytes and messages: naive all-reduce, servers, stars and trees."""

from dataclasses import dataclass
from functools import cache

from common import table
from folklore_common import (
    CONDITION,
    FALSE,
    KIB,
    MIB,
    TRUE,
    Cost,
    Counts,
    Entry,
    cost,
    counts,
    paragraphs,
    said,
)

from collc.machine.text import machine
from collc.machine.uniform import uniform
from collc.machine.units import size as bytes_said

# 10 Gb/s with TCP, as clusters had it when parameter servers were common.
LATE, RATE = 50e-6, 1.25e9
RESNET = 102_228_128  # ResNet-50: 25,557,032 parameters in float32, as bytes


@dataclass(frozen=True)
class Naive:
    """All to all against a ring: counted on n ranks, priced on one DGX H100 with n = 8."""

    n: int
    naive: Counts
    ring: Counts
    prices: tuple[tuple[int, Cost, Cost, Cost], ...]  # bytes; one-shot, ring, XLA's own

    def entry(self) -> Entry:
        rows = [
            [
                bytes_said(size),
                *one.cells()[::2],
                *ring.cells()[::2],
                f"{said(own.lowered)} ({own.how})",
            ]
            for size, one, ring, own in self.prices
        ]
        n = self.n
        return Entry(
            "Naive all-reduce against the ring",
            "Naive all-reduce sends n(n - 1) messages, a ring only 2(n - 1): always take the ring.",
            CONDITION,
            "true of bytes, false of messages, and false for small buffers.",
            paragraphs(
                f"Counted on {n} ranks: naive, each rank sends all of its S to each other one, "
                f"{self.naive.messages:,} messages and {int(self.naive.bytes):,} S in all. The ring "
                f"sends {self.ring.messages:,} messages, twice as many, of S/{n}: "
                f"{self.ring.bytes} S in all. So it moves n/2 = "
                f"{self.naive.bytes / self.ring.bytes} times fewer bytes, but in 2(n - 1) steps "
                "instead of one. 2(n - 1) is its number of steps, or its bytes in S, not its "
                "messages.",
                "On one DGX H100, eight GPUs that reach each other at once, one step of many "
                "bytes beats 14 steps of few as long as S is small. XLA has its own kernel for "
                "that:",
                table(
                    ["S", "naive, abstract", "lowered", "ring, abstract", "lowered", "XLA's own"],
                    rows,
                ),
            ),
            (
                "collc cost allpairs.one_shot --machine dgx-h100 --size 16KiB",
                "collc cost ring.all_reduce --machine dgx-h100 --size 16KiB",
            ),
        )


@cache
def naive() -> Naive:
    host, sizes = machine("dgx-h100"), {"": 8}
    prices = tuple(
        (size, *(cost(s, host, sizes, size) for s in ("allpairs.one_shot", "ring.all_reduce")),
         cost("native.all_reduce @ gpu", host, {"gpu": 8}, size))
        for size in (16 * KIB, MIB, 64 * MIB)
    )  # fmt: skip
    n = 64
    return Naive(n, counts("allpairs.one_shot", n), counts("ring.all_reduce", n), prices)


@dataclass(frozen=True)
class Servers:
    """Parameter servers on 10 Gb/s: 100 workers with k shards, and 20 workers on four."""

    size: int
    star: Cost
    twenty: Cost
    twenty_ring: Cost
    twenty_counts: Counts
    shards: tuple[tuple[int, Counts, Cost], ...]  # k; on 100 ranks
    ring: Cost
    ring_counts: Counts

    def entry(self) -> Entry:
        rows = [[k, f"{float(c.received):.4g} S", *price.cells()] for k, c, price in self.shards]
        rows.append(["ring", f"{float(self.ring_counts.received):.4g} S", *self.ring.cells()])
        twenty = float(self.twenty_counts.received)
        return Entry(
            "One server, four servers, k shards",
            "100 workers on one parameter server choke it; 20 workers on four servers are fine; "
            "k shards make it k times faster.",
            CONDITION,
            "k shards divide a server's load by k, but it takes about n of them to be as good as "
            "a ring.",
            paragraphs(
                f"ResNet-50 in float32, {self.size / 1e6:.0f} MB, on {RATE * 8 / 1e9:g} Gb/s and "
                f"{LATE * 1e6:g} us, one port a rank. In SPMD every rank is a worker, and k of "
                "them serve beside: so n - 1 others, not n workers, send (n - 1)/k S to a "
                "server, which sends as much back in the next step; servers also work. 100 ranks:",
                table(["k", "busiest receives", "abstract", "simulated", "lowered"], rows),
                f"20 workers on four servers: the busiest rank receives {twenty:g} S, a server's "
                "19/4 S and, where the sums come back, 3/4 S of the other servers; "
                f"{said(self.twenty.abstract)}, where a ring of 20 takes "
                f"{said(self.twenty_ring.abstract)}. Fine beside {said(self.star.abstract)} of "
                "100 workers on one, not beside a ring.",
            ),
            (
                'price(collc.parse("server.shards(4)"), placed(uniform(20, 50e-6, 1 / 1.25e9), '
                '{"": 20}), 102_228_128).abstract',
            ),
        )


@cache
def servers() -> Servers:
    many = uniform(100, LATE, 1 / RATE)
    few = uniform(20, LATE, 1 / RATE)

    def on(what: str, on=many, simulated: bool = True) -> Cost:
        return cost(what, on, {"": on.devices}, RESNET, simulated=simulated)

    shards = tuple(
        (k, counts(f"server.shards({k})", 100), on(f"server.shards({k})"))
        for k in (1, 4, 10, 50, 100)
    )
    return Servers(
        RESNET,
        on("server.star"),
        on("server.shards(4)", few),
        on("ring.all_reduce", few),
        counts("server.shards(4)", 20),
        shards,
        on("ring.all_reduce"),
        counts("ring.all_reduce", 100),
    )


@dataclass(frozen=True)
class Star:
    """A star and a ring of n ranks."""

    n: int
    star: Counts
    ring: Counts
    price: tuple[Cost, Cost]

    @property
    def bytes(self) -> float:
        return float(self.star.sent / self.ring.sent)

    @property
    def time(self) -> float:
        star, ring = self.price
        assert star.abstract is not None and ring.abstract is not None  # XLA's own takes no part
        return star.abstract / ring.abstract

    def entry(self) -> Entry:
        star, ring = self.price
        return Entry(
            "Eight GPUs and the star's 4 times",
            "With n = 8 the centre of a star moves 4 times what a rank of a ring does.",
            TRUE,
            "of the bytes that it sends, and of those that it receives. In time it is 8 times.",
            paragraphs(
                f"Counted on {self.n} ranks: the centre receives {self.star.received} S and sends "
                f"{self.star.sent} S; a ring's rank sends {float(self.ring.sent)} S. "
                f"{self.star.sent} / {float(self.ring.sent)} = {self.bytes:g}, in general n/2. "
                "But the centre can send only what it has received and added, while a ring's "
                "rank does both at once: for 64 MiB on 50 GB/s without latency "
                f"{said(star.abstract)} against {said(ring.abstract)}, {self.time:g} times, in "
                f"general n. Simulated: {said(star.simulated)} and {said(ring.simulated)}.",
            ),
            ("collc verify server.star --mesh gpu=8", "collc verify ring.all_reduce --mesh gpu=8"),
        )  # fmt: skip


@cache
def star() -> Star:
    on = uniform(8, 0.0, 1 / 50e9)
    prices = tuple(
        cost(s, on, {"": 8}, 64 * MIB, simulated=True) for s in ("server.star", "ring.all_reduce")
    )
    return Star(8, counts("server.star", 8), counts("ring.all_reduce", 8), (prices[0], prices[1]))


@dataclass(frozen=True)
class Roots:
    """What the roots of a star, a binomial and a binary tree receive in a reduce: n and counts."""

    rows: tuple[tuple[int, Counts, Counts, Counts], ...]

    def entry(self) -> Entry:
        cells = [
            [n, *(f"{c.root} S" for c in (star, binomial, tree)), f"{tree.received} S"]
            for n, star, binomial, tree in self.rows
        ]
        return Entry(
            "A tree's root",
            "A tree's root moves (N - 1) S.",
            FALSE,
            "only a star's does.",
            paragraphs(
                "What rank 0 receives while it reduces; inner ranks of a tree pass on one sum, "
                "not all they have heard. The binary tree is in order: its root has one child, "
                "and no rank more than two.",
                table(["N", "star", "binomial tree", "binary tree", "its busiest rank"], cells),
            ),
            ("collc verify tree.reduce --mesh gpu=64", "collc verify server.reduce --mesh gpu=64"),
        )


@cache
def roots() -> Roots:
    names = ("server.reduce", "binomial.reduce", "tree.reduce")
    rows = []
    for n in (8, 64, 1024):
        star, binomial, tree = (counts(name, n) for name in names)
        rows.append((n, star, binomial, tree))
    return Roots(tuple(rows))
