"""Rings: bandwidth-optimal, latency linear in the number of ranks."""

from collc import language as cl
from collc.language import add, copy, ranks


@cl.reduce_scatter
def reduce_scatter(n):
    """Chunk c sets out from rank c + 1 and comes home to rank c, summed, n - 1 hops later."""
    c = ranks(n)
    for t in range(1, n):
        yield add(c, (c + t) % n, (c + t + 1) % n)


@cl.all_gather
def all_gather(n):
    """Chunk c leaves home, rank c, and is copied once around the ring."""
    c = ranks(n)
    for t in range(n - 1):
        yield copy(c, (c + t) % n, (c + t + 1) % n)


all_reduce = reduce_scatter >> all_gather
