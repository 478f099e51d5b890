"""A schedule over several axes, put together from an algorithm for each."""

from collections.abc import Mapping

from collc.errors import PlanError
from collc.language.algebra import Schedule, then
from collc.planning.registry import Algorithm, algorithm


def native(collective: str) -> Schedule:
    """XLA's own."""
    found = algorithm("native").get(collective)
    assert found is not None, collective
    return found


def composed(own: Mapping[str, Algorithm], collective: str, axes: tuple[str, ...]) -> Schedule:
    """The collective over some axes, outermost first, by each one's algorithm.

    Inner axes scatter first and gather last. An axis whose algorithm has no scatter form reduces at
    its level. One that has no form of the collective takes XLA's own, but for an all-reduce: then
    PlanError.
    """
    if collective == "all_reduce":
        return _all_reduce(own, axes)
    order = axes[::-1] if collective in ("reduce_scatter", "all_to_all") else axes
    return then(*((own[axis].get(collective) or native(collective)) @ axis for axis in order))


def _all_reduce(own: Mapping[str, Algorithm], axes: tuple[str, ...]) -> Schedule:
    down: list[Schedule] = []
    up: list[Schedule] = []
    outermost, *inner = axes
    for axis in reversed(inner):
        scatter, gather = own[axis].get("reduce_scatter"), own[axis].get("all_gather")
        if scatter is not None and gather is not None:
            down.append(scatter @ axis)
            up.append(gather @ axis)
        else:
            down.append(_sum(own[axis], axis))
    return then(*down, _sum(own[outermost], outermost), *up[::-1])


def _sum(own: Algorithm, axis: str) -> Schedule:
    if own.all_reduce is None:
        raise PlanError(
            f"{own.source} has no all-reduce; name another schedule for {axis}, or native"
        )
    return own.all_reduce @ axis
