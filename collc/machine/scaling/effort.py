"""What it takes to price a schedule, before it is written out: far less for a ring than for servers."""

import math
from collections.abc import Mapping
from functools import cache

from collc.analysis.strands import strands
from collc.language.algebra import Leaf, Schedule
from collc.machine.flow import flow

_SMALL = 32  # ranks on which it is counted


def effort(schedule: Schedule, sizes: Mapping[str, int]) -> float:
    """Sends and ranks x rounds to write out: each step counts once that is like others of its leaf.

    Counted on up to ``_SMALL`` ranks of a leaf; for more it is taken to grow on as from half of them.
    """
    leaves = (strand.leaf for strand in strands(schedule, sizes))
    return sum(_of_leaf(leaf, math.prod(sizes[a] for a in leaf.axes)) for leaf in leaves)


@cache
def _of_leaf(leaf: Leaf, n: int) -> float:
    if leaf.native:
        return 0.0
    if n <= _SMALL:
        first, *rest = leaf.axes
        (part,) = flow(leaf, {first: n} | dict.fromkeys(rest, 1)).parts
        each = {id(moment): moment.messages() for moment in part.moments or ()}
        return float(sum(m.chunks.sum() + m.rounds * n for m in each.values()))
    half, whole = _of_leaf(leaf, _SMALL // 2), _of_leaf(leaf, _SMALL)
    return whole * (whole / half) ** math.log2(n / _SMALL)
