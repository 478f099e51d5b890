"""Schedules, orders and families that tests need beside the library's."""

import numpy as np

from collc import language as cl
from collc.language import copy, ranks


@cl.broadcast(chunks=3)
def chain(n):
    """Three pieces down a chain, one behind the other."""
    for t in range(n + 1):
        c = ranks(3)
        src = t - c
        chosen = (src >= 0) & (src < n - 1)
        yield copy(c[chosen], src[chosen], src[chosen] + 1)


@cl.order
def backwards(n):
    return np.arange(n)[::-1]


@cl.order
def odd_first(n):
    r = np.arange(n)
    return np.argsort(np.concatenate([r[1::2], r[::2]]))


@cl.family
def two_halves(axis):
    """A ring and a tree, side by side."""
    from collc.schedules import ring, tree

    return (ring.all_reduce | tree.all_reduce) @ axis
