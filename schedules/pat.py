"""Parallel aggregated trees (Jeaugey, arXiv 2506.20252): a binomial tree for every chunk, all at once.

Far hops come first, with few chunks; the hops that carry many are the near ones.
"""

from collc import language as cl
from collc.language import copy, ranks


@cl.all_gather
def all_gather(n):
    """ceil(lg n) steps, over ever nearer ranks; each rank sends (n - 1)/n of the buffer."""
    r = ranks(n)[:, None]
    hop = 1 << (n - 1).bit_length()
    while hop > 1:
        hop //= 2
        o = ranks(n - hop)[None, :: 2 * hop]
        yield copy((r - o) % n, r, (r + hop) % n)


reduce_scatter = all_gather.reversed()
all_reduce = reduce_scatter >> all_gather
