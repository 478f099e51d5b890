"""A parameter server: every rank works, and rank 0 or the first k ranks serve."""

from collc import language as cl
from collc.language import ALL, add, copy, ranks


@cl.reduce
def reduce(n):
    """One step, n - 1 rounds: rank 0 receives the whole of everyone, (n - 1) S."""
    yield add(ALL, ranks(n)[1:], 0)


@cl.broadcast
def broadcast(n):
    """One step, n - 1 rounds: rank 0 sends the whole to everyone, (n - 1) S."""
    yield copy(ALL, 0, ranks(n)[1:])


@cl.gather
def gather(n):
    """One step, n - 1 rounds: rank 0 receives each rank's chunk, (n - 1)/n S."""
    yield copy(ranks(n)[1:], ranks(n)[1:], 0)


scatter = gather.reversed()
star = reduce >> broadcast


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
