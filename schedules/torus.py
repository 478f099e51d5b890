"""All-reduce on a torus: all dimensions work at once, each on a share of the buffer."""

from collc import language as cl
from collc.schedules import ring


def nested(axis, *others):
    """Scatter along one axis, all-reduce the shards along the others, gather back."""
    if not others:
        return ring.all_reduce @ axis
    return ring.reduce_scatter @ axis >> nested(*others) >> ring.all_gather @ axis


@cl.family
def torus(*axes):
    """As many parts as axes, part i beginning along axis i: each of N ranks sends 2(N - 1)/N S."""
    turns = [axes[i:] + axes[:i] for i in range(len(axes))]
    return cl.beside(*(nested(*turn) for turn in turns))
