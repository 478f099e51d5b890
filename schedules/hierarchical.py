"""Two-level all-reduce: scatter inside, reduce between, gather inside."""

from collc.schedules import ring, tree

from collc import language as cl


@cl.family
def hierarchical(outer, inner):
    """Between the hosts goes 1/n of the buffer, where n is the size of a host."""
    return ring.reduce_scatter @ inner >> tree.double_all_reduce @ outer >> ring.all_gather @ inner
