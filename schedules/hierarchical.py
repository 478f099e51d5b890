"""All-reduce on a hierarchy: scatter inside, reduce between, gather inside."""

from collc import language as cl
from collc.schedules import ring, tree


@cl.family
def hierarchical(outer, *inner):
    """Rings inside, a double tree outside: each axis of n ranks leaves 1/n to those outside it."""
    if not inner:
        return tree.double_all_reduce @ outer
    *between, innermost = inner
    middle = hierarchical(outer, *between)
    return ring.reduce_scatter @ innermost >> middle >> ring.all_gather @ innermost
