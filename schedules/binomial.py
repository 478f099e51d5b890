"""Binomial trees, rooted at rank 0: logarithmic latency, one message at a time."""

from collc import language as cl
from collc.language import ALL, add, ranks


def levels(n):
    """The edges (child, parent) by level, leaves first: ceil(lg n) levels."""
    for bit in (1 << k for k in range((n - 1).bit_length())):
        child = ranks(n)[bit :: 2 * bit]
        yield child, child - bit


@cl.reduce
def reduce(n):
    """ceil(lg n) steps of one round; every rank but the root sends S once."""
    for child, parent in levels(n):
        yield add(ALL, child, parent)


broadcast = reduce.reversed()
all_reduce = reduce >> broadcast
