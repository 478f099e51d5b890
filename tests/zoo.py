"""Schedules that tests need beside the library's: other shapes of step, and an inconsistent one."""

import numpy as np

from collc import language as cl
from collc.language import ALL, add, copy, ranks


@cl.all_reduce
def one_shot(n):
    """Everyone sends the whole to everyone, at once: each rank adds in another order."""
    r, t = ranks(n)[None, :], ranks(n)[1:, None]
    yield add(ALL, r, (r + t) % n)


@cl.all_reduce
def doubling(n):
    """Ranks beyond the largest power of two fold in, the others exchange at distance 1, 2, 4..."""
    p = 1 << n.bit_length() - 1
    extra, r, bit = ranks(n)[p:], ranks(p), 1
    yield add(ALL, extra, extra - p)
    while bit < p:
        yield add(ALL, r, r ^ bit)
        bit *= 2
    yield copy(ALL, extra - p, extra)


@cl.reduce_scatter
def direct(n):
    """One step, n - 1 rounds: chunk c goes from everyone straight to rank c."""
    c, t = ranks(n)[None, :], ranks(n)[1:, None]
    yield add(c, (c + t) % n, c)


@cl.gather
def gather(n):
    """Rank 0 gets chunk c from rank c."""
    yield copy(ranks(n)[1:], ranks(n)[1:], 0)


scatter = gather.reversed()


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
