"""Which schedules can be measured beside one another: those of one collective on the same axes."""

from collections.abc import Mapping

from collc.bench.terms import CUT
from collc.errors import MeshError, ScheduleError, nearest
from collc.language.algebra import Schedule, show_axes
from collc.language.states import COLLECTIVES
from collc.lowering.lower import linear


def alike(
    schedules: Mapping[str, Schedule], mesh: Mapping[str, int]
) -> tuple[str, tuple[str, ...]]:
    """The collective that all of them do, and its axes in the order of the ranks.

    Raises ScheduleError where they are not the same, MeshError for an axis that the mesh lacks.
    """
    if not schedules:
        raise ScheduleError("there is no schedule to measure. Give one, such as ring.all_reduce.")
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for name, schedule in schedules.items():
        if not schedule.axes:
            raise ScheduleError(f"{name} is not placed on an axis. Say for example {name} @ gpu.")
        for axis in schedule.axes:
            if axis not in mesh:
                raise MeshError(
                    f"{name} is placed on {axis}, which the mesh does not have. {nearest(axis, mesh)}"
                )
        kind = schedule.collective
        if kind is None or kind.name not in COLLECTIVES:
            what = f"a {kind.name}" if kind else f"{schedule.type}, which is no one collective"
            raise ScheduleError(
                f"{name} is {what}: jax.lax has nothing to compare it with. bench measures "
                f"{', '.join(COLLECTIVES)}."
            )
        found[name] = kind.name, linear(schedule, mesh)
    (first, (collective, axes)), *rest = found.items()
    for name, (other, own) in rest:
        apart = (
            f"{first} is {collective} on {show_axes(axes)}, but {name} is {other} on "
            f"{show_axes(own)}"
        )
        if other != collective or set(own) != set(axes):
            raise ScheduleError(
                f"{apart}. A run compares schedules of one collective on the same axes: measure "
                "them in two runs."
            )
        if own != axes and collective in CUT:
            raise ScheduleError(
                f"{apart}: they number the ranks, and so the chunks, in different orders. Place "
                "both on the axes in the same order."
            )
    return collective, axes
