"""Chains, rooted at rank 0: slow as they stand, bandwidth-optimal once sliced."""

from collc import language as cl
from collc.language import ALL, add


@cl.reduce
def reduce(n):
    """n - 1 steps, one hop of S each. In k slices: n + k - 2 steps of S/k, so near S for many."""
    for r in range(n - 1, 0, -1):
        yield add(ALL, r, r - 1)


broadcast = reduce.reversed()
all_reduce = reduce >> broadcast
