"""All pairs: every rank sends to every other at once. One step, for small buffers and many ports."""

from collc import language as cl
from collc.language import ALL, add, copy, ranks


@cl.all_reduce
def one_shot(n):
    """One step of n - 1 rounds, (n - 1) S. Each rank adds in an order of its own.

    For n > 2 replicas may differ in the last bit, as the certificate tells. ``two_shot`` has one order.
    """
    r, o = ranks(n)[:, None], ranks(n)[None, 1:]
    yield add(ALL, r, (r + o) % n)


@cl.reduce_scatter
def reduce_scatter(n):
    """One step of n - 1 rounds: each rank sends its part of chunk c straight to rank c."""
    c, o = ranks(n)[:, None], ranks(n)[None, 1:]
    yield add(c, (c + o) % n, c)


@cl.all_gather
def all_gather(n):
    """One step of n - 1 rounds: rank c sends chunk c straight to every other."""
    c, o = ranks(n)[:, None], ranks(n)[None, 1:]
    yield copy(c, c, (c + o) % n)


# Consistent: each chunk is summed once, in the one order of its own rank, and then copied.
two_shot = reduce_scatter >> all_gather
