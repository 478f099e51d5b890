"""What the commands that take --machine share: the mesh that it suggests, and what to note of it."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated

import typer

from collc.analysis.mesh import parse_mesh
from collc.cli.common import placed
from collc.errors import MachineError
from collc.language.algebra import Schedule
from collc.machine.placement import Placement, advice, left_out
from collc.machine.topology import Machine

Order = Annotated[
    str,
    typer.Option(
        "--order",
        metavar="DEVICE,...",
        help="The device of each rank. Default: rank r is device r.",
        show_default=False,
    ),
]


def parse_order(text: str) -> list[int] | None:
    """The devices of ``--order``; None where it is not said. Raises MachineError."""
    if not text:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,9}", word) for word in words):
        raise MachineError(f"--order {text}: devices are numbers between commas, as in 0,4,1,5.")
    return [int(word) for word in words]


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
