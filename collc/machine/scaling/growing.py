"""Machines of one kind that grow by hosts, and the mesh of host and gpu on so many of their devices."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from collc.errors import MachineError
from collc.machine.text import machine as read_machine
from collc.machine.topology import Machine
from collc.machine.words import split

LEAST, MOST = 8, 4096  # devices, where nobody says else

Machines = Callable[[int], Machine]  # of so many devices


def machines(text: str) -> Machines:
    """The machines of one kind: of so many devices, in whole nodes. Raises MachineError."""
    said = split(text)
    if said.hosts is not None:
        raise MachineError(
            f"{text}: the number of hosts is what is scaled. Leave :{said.hosts} or hosts= out."
        )
    if "racks" in said.words:
        raise MachineError(
            f"{text}: racks= counts the racks of one machine, and hosts are added here. "
            "Leave racks= and uplink= out, or in Python pass a function from devices to a machine."
        )
    node = read_machine(text).node

    @cache
    def make(devices: int) -> Machine:
        nodes = -(-devices // node.devices)
        return read_machine(replace(said, hosts=nodes * node.hosts).text("+".join(said.parts)))

    return make


def default_counts(make: Machines) -> tuple[int, ...]:
    """LEAST to MOST devices, doubling: parts of a node, the node, then two, four, ... nodes."""
    node = make(1).node.devices
    found = []
    n = min(LEAST, node)
    while n < node:
        found.append(n)
        n *= 2
    n = node * -(-LEAST // node) if node < LEAST else node
    while n <= MOST:
        found.append(n)
        n *= 2
    return tuple(found)


def mesh(on: Machine, devices: int) -> dict[str, int]:
    """Host and gpu for so many devices: a part of a node, or whole nodes. Raises MachineError."""
    node = on.node.devices
    if devices <= node:
        return {"host": 1, "gpu": devices}
    if devices % node:
        raise MachineError(
            f"{devices:,} devices are no whole number of nodes of {node}. "
            f"Say {devices // node * node:,}, or up to {node} for a part of one node."
        )
    return {"host": devices // node, "gpu": node}
