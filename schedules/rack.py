"""A tree that follows the racks: no schedule sends less between them."""

from itertools import chain, zip_longest

import numpy as np

from collc import language as cl
from collc.language import ALL, add, ranks
from collc.schedules.binomial import levels


def tree(members):
    """The steps of a binomial tree over some ranks, to the first of them."""
    return [add(ALL, members[child], members[parent]) for child, parent in levels(len(members))]


@cl.family
def all_reduce(*racks):
    """Between m racks go m - 1 messages of S each way, as few as can be.

    With at most g ranks in a rack, ceil(lg g) + ceil(lg m) steps to rank 0, and as many back.
    """
    if not all(isinstance(rack, tuple) and rack for rack in racks):
        raise ValueError(f"a rack is a tuple of ranks, as in (0, 1), (2, 3); not {racks}")
    groups = [np.array(rack) for rack in sorted(map(sorted, racks))]
    leaders = np.array([group[0] for group in groups])

    @cl.reduce
    def reduce(n):
        """First within the racks, at once, then between their first ranks."""
        if sorted(chain(*racks)) != ranks(n).tolist():
            raise ValueError(f"the racks {racks} do not hold each of the ranks 0 to {n - 1} once")
        for level in zip_longest(*map(tree, groups)):
            yield tuple(move for move in level if move)
        yield from tree(leaders)

    return reduce >> reduce.reversed()
