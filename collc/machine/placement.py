"""Which device each rank of a mesh is, which links each axis uses, whether another order is better."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations

import numpy as np

from collc.errors import MachineError
from collc.language.ir import Ints, integer
from collc.machine.topology import NETWORK, SOCKET, UPLINK, Machine


@dataclass(frozen=True, eq=False)
class Placement:
    """A mesh on a machine: ``order`` is the device of each rank, linear in the order of ``sizes``."""

    machine: Machine
    sizes: Mapping[str, int]
    order: Ints

    @cached_property
    def classes(self) -> dict[str, str]:
        """For each axis the outermost class of link between neighbours along it."""
        return {axis: _outermost(self.machine, *self._along(axis)) for axis in self.sizes}

    def crossings(self, axis: str) -> int:
        """How many neighbours along an axis, around it, are on other nodes or sockets."""
        machine, (a, b) = self.machine, self._along(axis)
        far = machine.node_of(a) != machine.node_of(b)
        if SOCKET in machine.kinds:
            links = machine.paths(a, b).links
            between = machine.kind[links] == machine.kinds.index(SOCKET)
            far |= (between & (links >= 0)).any(axis=1)
        return int(np.count_nonzero(far))

    def _along(self, axis: str) -> tuple[Ints, Ints]:
        grid = self.order.reshape(list(self.sizes.values()))
        at = list(self.sizes).index(axis)
        return grid.reshape(-1), np.roll(grid, -1, at).reshape(-1)


def placed(
    machine: Machine, sizes: Mapping[str, int], order: Sequence[int] | Ints | None = None
) -> Placement:
    """The placement of a mesh; without an order rank r is device r.

    Raises MachineError where there are too few devices, or the order does not name each rank's once.
    """
    count = math.prod(sizes.values())
    mesh = ", ".join(f"{axis or 'n'}={n}" for axis, n in sizes.items())
    if count > machine.devices:
        raise MachineError(
            f"{machine} has {machine.devices:,} devices, but the mesh ({mesh}) has {count:,} ranks. "
            "Take more hosts, or a smaller mesh."
        )
    if order is None:
        return Placement(machine, dict(sizes), np.arange(count))
    found = [integer(d) for d in np.asarray(order).reshape(-1).tolist()]
    if None in found or len(found) != count or len(set(found)) != count:
        raise MachineError(
            f"the order of the mesh ({mesh}) names {len(found)} devices, {len(set(found))} of them "
            f"different; it has to name {count} different ones, one for each rank."
        )
    devices = np.array(found, np.int64)
    if devices.min() < 0 or devices.max() >= machine.devices:
        bad = devices[(devices < 0) | (devices >= machine.devices)][0]
        raise MachineError(f"{machine} has no device {bad}: they are 0 to {machine.devices - 1:,}.")
    return Placement(machine, dict(sizes), devices)


def _outermost(machine: Machine, src: Ints, dst: Ints) -> str:
    apart = src != dst
    if not apart.any():
        return "none"
    src, dst = src[apart], dst[apart]
    if (machine.rack_of(src) != machine.rack_of(dst)).any():
        return UPLINK
    if (machine.node_of(src) != machine.node_of(dst)).any():
        return NETWORK
    links = machine.paths(src, dst).links
    used = np.unique(machine.kind[links[links >= 0]])
    return machine.kinds[int(used.max())]


def left_out(placement: Placement) -> str:
    """What is said where a mesh takes less than the machine; "" where it takes all of it."""
    machine, used = placement.machine, len(placement.order)
    if used == machine.devices:
        return ""
    nodes = len(np.unique(machine.node_of(placement.order)))
    plural = "s" if machine.nodes > 1 else ""
    return (
        f"the mesh takes {used:,} of {machine.devices:,} devices, on {nodes:,} of "
        f"{machine.nodes:,} node{plural}"
    )


@dataclass(frozen=True)
class Advice:
    """A better order: ``devices`` by rank, and by axis the neighbours on other nodes or sockets.

    ``axes``: how the axes are to be nested, where otherwise than in the mesh; else (). ``across``:
    "hosts", or "sockets" where all devices are in one node.
    """

    devices: tuple[int, ...]
    before: Mapping[str, int]
    after: Mapping[str, int]
    axes: tuple[str, ...]

    across: str

    def __str__(self) -> str:
        each = "; ".join(
            f"along {axis} {before:,} neighbours are on other {self.across}, "
            f"in a better order {self.after[axis]:,}"
            for axis, before in self.before.items()
            if before != self.after[axis]
        )
        nested = f", the axes nested {', '.join(self.axes)} from the outside inwards"
        return (
            f"the mesh crosses {self.across} needlessly: {each}. Make it with the devices in ascending "
            f"order{nested if self.axes else ''}."
        )


def advice(placement: Placement) -> Advice | None:
    """A better order of the devices; None where none was found.

    Tried: the same devices in ascending order, with the axes nested in every order. Better is one in
    which fewer neighbours are on other nodes or sockets and no axis has more of them; or one in which
    fewer axes leave them in some hops only, where the slow hops hold up the quick ones.
    """
    own = {axis: placement.crossings(axis) for axis in placement.sizes}
    best, found = _badness(placement, own), None
    one_node = len(np.unique(placement.machine.node_of(placement.order))) == 1
    across = "sockets" if one_node else "hosts"
    for axes, order in _orders(placement):
        other = Placement(placement.machine, placement.sizes, order)
        after = {axis: other.crossings(axis) for axis in placement.sizes}
        if all(after[a] <= own[a] for a in own) and after != own:
            score = (-1, sum(after.values()))  # better along every axis
        else:
            score = _badness(other, after)
            if score[0] == best[0]:
                continue
        if score < best:
            nested = () if axes == tuple(placement.sizes) else axes
            best, found = score, Advice(tuple(order.tolist()), own, after, nested, across)
    return found


def _badness(placement: Placement, crossings: Mapping[str, int]) -> tuple[int, int]:
    """Axes of which some hops leave a node and some do not; and all hops that do."""
    count = len(placement.order)
    return sum(0 < n < count for n in crossings.values()), sum(crossings.values())


def _orders(placement: Placement) -> Iterator[tuple[tuple[str, ...], Ints]]:
    """The ascending devices, with the axes nested in each order; that of the mesh comes first."""
    names, shape = list(placement.sizes), list(placement.sizes.values())
    devices = np.sort(placement.order)
    for nesting in (
        permutations(range(len(names))) if len(names) <= 5 else [tuple(range(len(names)))]
    ):
        grid = devices.reshape([shape[i] for i in nesting])
        yield tuple(names[i] for i in nesting), grid.transpose(np.argsort(nesting)).reshape(-1)
