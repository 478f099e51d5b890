"""Recursive doubling: the fewest steps for a small buffer, all of which travels every time."""

from collc import language as cl
from collc.language import ALL, add, copy, ranks


@cl.all_reduce
def all_reduce(n):
    """lg n exchanges of S; other n fold into the power of two below: floor(lg n) + 2 steps.

    Partners add in the same order, but where the wire is narrower than the sums they do not.
    """
    p = 1 << (n.bit_length() - 1)
    r, rest = ranks(p), ranks(n)[p:]
    yield add(ALL, rest, rest - p)
    for k in range(p.bit_length() - 1):
        yield add(ALL, r, r ^ (1 << k))
    yield copy(ALL, rest - p, rest)
