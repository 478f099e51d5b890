"""In-order binary trees, rooted at rank 0: latency logarithmic in the number of ranks."""

import numpy as np

from collc import language as cl
from collc.language import ALL, add, copy, ranks


def levels(n):
    """The edges (child, parent) by level, leaves first: ceil(lg n) levels, odd ranks are leaves."""
    for bit in (1 << k for k in range((n - 1).bit_length())):
        child = ranks(n)[bit :: 2 * bit]
        parent = child - bit | 2 * bit  # next to it, a level up
        yield child, np.where(parent < n, parent, child - bit)


def mirror(n, r):
    """The second tree: for even n no rank is inner in both, for odd n rank 0 alone is."""
    return n - 1 - r if n % 2 == 0 else (r + 1) % n


@cl.reduce
def reduce(n):
    """ceil(lg n) steps of at most two rounds, the last of one; all but the root send S once."""
    for child, parent in levels(n):
        yield add(ALL, child, parent)


broadcast = reduce.reversed()
all_reduce = reduce >> broadcast


@cl.all_reduce(chunks=2)
def double_all_reduce(n):
    """A tree for each half: at most 2 S sent by a rank. For n = 2^k >= 4: 4k - 2 rounds of S/2."""
    for child, parent in levels(n):
        yield add(0, child, parent), add(1, mirror(n, child), mirror(n, parent))
    for child, parent in reversed(list(levels(n))):
        yield copy(0, parent, child), copy(1, mirror(n, parent), mirror(n, child))
