"""What the commands that take --machine share: the mesh that it suggests, and what to note of it."""

from collections.abc import Iterator, Mapping

from collc.analysis.mesh import parse_mesh
from collc.cli.common import placed
from collc.errors import MachineError
from collc.language.algebra import Schedule
from collc.machine.placement import Placement, advice, left_out
from collc.machine.topology import Machine


def own_mesh(machine: Machine) -> dict[str, int]:
    """The mesh that a machine suggests: gpu, and host where there are several nodes."""
    gpus = {"gpu": machine.node.devices}
    return gpus if machine.nodes == 1 else {"host": machine.nodes, **gpus}


def on_mesh(
    schedule: Schedule, mesh: str, machine: Machine, source: str
) -> tuple[Schedule, Mapping[str, int]]:
    """The schedule on axes with sizes: those of ``--mesh``, else the machine's, all of them.

    Raises MachineError for axes without a size, MeshError where it cannot be told which axis is meant.
    """
    if mesh:
        sizes = parse_mesh(mesh)
        schedule = placed(schedule, sizes, source)
    else:
        sizes = own_mesh(machine)
        if schedule.axes == ("host",):  # it may have one
            sizes = {"host": machine.nodes, **sizes}
        schedule = schedule if schedule.axes else schedule @ tuple(sizes)
    if missing := [axis for axis in schedule.axes if axis not in sizes]:
        raise MachineError(
            f"{schedule} is placed on {', '.join(missing)}, which has no size here. Say all of them, as "
            "in --mesh rack=2,host=4,gpu=8."
        )
    return schedule, sizes


def notes(place: Placement) -> Iterator[str]:
    """What is to be known of a placement: devices left out, and a better order."""
    if left := left_out(place):
        yield left
    if better := advice(place):
        yield str(better)
