"""Halving and doubling: logarithmic latency at the bandwidth of a ring, for any number of ranks.

For n = 2^k as costly as recursive halving and doubling (Rabenseifner); the circulant form (Träff
2024) costs the same for every n, and each rank does the same relative to itself.
"""

from collc import language as cl
from collc.language import add, copy, ranks


def spans(n):
    """(far, near): n halved, rounded up, down to 1; ceil(lg n) pairs."""
    while n > 1:
        n, far = -(-n // 2), n
        yield far, n


@cl.reduce_scatter
def reduce_scatter(n):
    """ceil(lg n) steps; each rank sends (n - 1)/n of its buffer, half of the chunks left each time."""
    r = ranks(n)[:, None]
    for far, near in spans(n):
        o = ranks(far)[None, near:]
        yield add((r + o) % n, r, (r + near) % n)


@cl.all_gather
def all_gather(n):
    """ceil(lg n) steps; what a rank holds doubles each time, at times less one chunk."""
    r = ranks(n)[:, None]
    for far, near in reversed(list(spans(n))):
        o = ranks(far)[None, near:]
        yield copy((r + o) % n, (r + near) % n, r)


all_reduce = reduce_scatter >> all_gather
