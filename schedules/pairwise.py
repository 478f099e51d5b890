"""Pairwise all-to-all: every chunk goes straight from its source to its destination."""

from collc import language as cl
from collc.language import copy, ranks


@cl.all_to_all
def all_to_all(n):
    """n - 1 steps; in step t rank r sends to rank r + t. Each rank sends (n - 1)/n of its buffer."""
    r = ranks(n)
    for t in range(1, n):
        yield copy((r, (r + t) % n), r, (r + t) % n)


@cl.family
def two_level(outer, inner):
    """Within m hosts of n, then between them: n - 1 + m - 1 steps, m - 1 messages out for a rank."""
    return all_to_all @ inner >> all_to_all @ outer
