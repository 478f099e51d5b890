"""Bruck's all-to-all: logarithmic latency, paid for by forwarding."""

from collc import language as cl
from collc.language import copy, ranks


@cl.all_to_all
def all_to_all(n):
    """ceil(lg n) steps: a chunk with j ranks to go takes the hop 2^k if j has that bit.

    Each rank sends lg n/2 of its buffer where n is a power of two, and less elsewhere.
    """
    s, j = ranks(n)[:, None], ranks(n)[None, :]
    hop = 1
    while hop < n:
        to_go = j[:, (j[0] & hop) != 0]
        here = s + to_go % hop
        yield copy((s, (s + to_go) % n), here % n, (here + hop) % n)
        hop *= 2
