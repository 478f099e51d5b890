"""A parameter server: every rank works, and rank 0 or the first k ranks serve."""

from collc import language as cl
from collc.language import ALL, add, copy, ranks


@cl.reduce
def push(n):
    """One step, n - 1 rounds: rank 0 receives the whole of everyone, (n - 1) S."""
    yield add(ALL, ranks(n)[1:], 0)


@cl.broadcast
def pull(n):
    """One step, n - 1 rounds: rank 0 sends the whole to everyone, (n - 1) S."""
    yield copy(ALL, 0, ranks(n)[1:])


star = push >> pull


@cl.family
def shards(k):
    """k servers, each for 1/k of the buffer: a server moves (n - 1) S/k each way."""

    @cl.all_reduce(chunks=k)
    def push_pull(n):
        """Chunk c is served by rank c mod n; the workers take turns, so that all servers are busy."""
        c, t = ranks(k)[:, None], ranks(n)[None, 1:]
        yield add(c, (c + t) % n, c % n)
        yield copy(c, c % n, (c + t) % n)

    return push_pull
