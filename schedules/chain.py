"""Chains, rooted at rank 0: slow as they stand, bandwidth-optimal once sliced."""

from collc import language as cl
from collc.language import ALL, add


@cl.reduce
def reduce(n):
    """n - 1 steps of S. In k slices n + k - 2 of S/k: near S for many, where a tree stays at 2 S."""
    for r in range(n - 1, 0, -1):
        yield add(ALL, r, r - 1)


broadcast = reduce.reversed()
all_reduce = reduce >> broadcast
