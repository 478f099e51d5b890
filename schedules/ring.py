"""Rings: each rank sends 2(n - 1)/n of the buffer, the least there is, in 2(n - 1) steps."""

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

# Half of every chunk goes round the other way: the dual of a gather scatters against its direction.
two_way_reduce_scatter = reduce_scatter | all_gather.reversed()
two_way_all_gather = all_gather | reduce_scatter.reversed()
two_way_all_reduce = two_way_reduce_scatter >> two_way_all_gather


@cl.family
def rings(*orders):
    """A ring over each order of the ranks, with an equal share of the buffer."""
    return cl.beside(*(all_reduce.relabel(order=order) for order in orders))
