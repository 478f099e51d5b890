"""Halving and doubling: logarithmic latency at the bandwidth of a ring, for any number of ranks.

For n = 2^k as costly as recursive halving and doubling (Rabenseifner); the circulant form (Träff
2024) costs the same for every n, and each rank does the same relative to itself.
"""

from collc import language as cl
from collc.language import ALL, add, copy, ranks


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


@cl.all_reduce
def recursive_doubling(n):
    """floor(lg n) exchanges of S; where n is no power of two, the rest fold in: two more steps.

    Not where the wire is narrower than the sums: there replicas would end with different bits.
    """
    p = 1 << (n.bit_length() - 1)
    r, rest = ranks(p), ranks(n)[p:]
    yield add(ALL, rest, rest - p)
    for k in range(p.bit_length() - 1):
        yield add(ALL, r, r ^ (1 << k))
    yield copy(ALL, rest - p, rest)
