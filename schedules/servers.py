"""Several parameter servers: every rank works, and the first k ranks serve a chunk each."""

from collc import language as cl
from collc.language import add, ranks


@cl.family
def push(k):
    """One step, n - 1 rounds: chunk c of k ends at rank c, which receives (n - 1) S/k."""

    @cl.reduce(roots=k)
    def to_servers(n):
        """The workers take turns, so that all servers are busy."""
        c, t = ranks(k)[:, None], ranks(n)[None, 1:]
        yield add(c, (c + t) % n, c)

    return to_servers


@cl.family
def pull(k):
    """One step, n - 1 rounds: chunk c of k goes from rank c to all, which sends (n - 1) S/k."""
    return push(k).reversed()
