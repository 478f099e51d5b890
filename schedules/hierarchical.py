"""All-reduce on a hierarchy: scatter inside, reduce between, gather inside."""

from collc.schedules import ring, tree

from collc import language as cl


@cl.family
def hierarchical(outer, *inner):
    """Axes from the outside in. What a level works on is 1/n of the level inside it, of size n."""
    if not inner:
        return tree.double_all_reduce @ outer
    *between, innermost = inner
    middle = hierarchical(outer, *between)
    return ring.reduce_scatter @ innermost >> middle >> ring.all_gather @ innermost
