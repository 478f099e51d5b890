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

    def crossings(self, axis: str) -> tuple[int, int]:
        """How many neighbours along an axis, around it, are on other nodes, and on other sockets."""
        machine, (a, b) = self.machine, self._along(axis)
        apart = machine.node_of(a) != machine.node_of(b)
        sockets = 0
        if SOCKET in machine.kinds:
            links = machine.paths(a, b).links
            between = (links >= 0) & (machine.kind[links] == machine.kinds.index(SOCKET))
            sockets = int(np.count_nonzero(between.any(axis=1) & ~apart))
        return int(np.count_nonzero(apart)), sockets

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
    """A better order: ``devices`` by rank, and by axis the neighbours on other ``places``.

    ``axes``: how the axes are to be nested, where otherwise than in the mesh; else (). ``places``:
    "hosts", or "sockets" where as many neighbours are on other hosts.
    """

    devices: tuple[int, ...]
    before: Mapping[str, int]
    after: Mapping[str, int]
    axes: tuple[str, ...]
    places: str

    def __str__(self) -> str:
        each = "; ".join(
            f"along {axis} {before:,} neighbours are on other {self.places}, "
            f"in a better order {self.after[axis]:,}"
            for axis, before in self.before.items()
            if before != self.after[axis]
        )
        nested = f", the axes nested {', '.join(self.axes)} from the outside inwards"
        return (
            f"the mesh crosses {self.places} needlessly: {each}. Make it with the devices in ascending "
            f"order{nested if self.axes else ''}."
        )


Crossings = Mapping[str, tuple[int, int]]


def advice(placement: Placement) -> Advice | None:
    """A better order of the devices; None where none was found.

    Tried: the same devices in ascending order, with the axes nested in every order. Better is one in
    which fewer axes that would fit into a node leave theirs; or as many, and fewer neighbours are on
    other nodes, or then on other sockets, and along no axis more. What is best of all these has no
    better order itself.
    """
    own = _crossings(placement)
    best, found = None, None
    for axes, order in _orders(placement):
        other = Placement(placement.machine, placement.sizes, order)
        after = _crossings(other)
        if not _better(placement, own, after):
            continue
        score = (_misfits(placement, after), *_total(after))
        if best is None or score < best:
            by = 0 if any(after[a][0] != own[a][0] for a in own) else 1
            best = score
            found = Advice(
                tuple(order.tolist()),
                {axis: n[by] for axis, n in own.items()},
                {axis: n[by] for axis, n in after.items()},
                () if axes == tuple(placement.sizes) else axes,
                ("hosts", "sockets")[by],
            )
    return found


def _crossings(placement: Placement) -> Crossings:
    return {axis: placement.crossings(axis) for axis in placement.sizes}


def _better(placement: Placement, own: Crossings, after: Crossings) -> bool:
    misfits = _misfits(placement, own), _misfits(placement, after)
    if misfits[0] != misfits[1]:
        return misfits[1] < misfits[0]
    fewer = all(after[axis] <= own[axis] for axis in own)
    return fewer and _total(after) < _total(own)


def _misfits(placement: Placement, crossings: Crossings) -> int:
    """Axes as long as a node has devices that leave their nodes all the same."""
    fits = placement.machine.node.devices
    return sum(placement.sizes[a] == fits and n > 0 for a, (n, _) in crossings.items())


def _total(crossings: Crossings) -> tuple[int, int]:
    return sum(n for n, _ in crossings.values()), sum(k for _, k in crossings.values())


def _orders(placement: Placement) -> Iterator[tuple[tuple[str, ...], Ints]]:
    """The ascending devices, with the axes nested in each order; that of the mesh comes first."""
    names, shape = list(placement.sizes), list(placement.sizes.values())
    devices = np.sort(placement.order)
    for nesting in (
        permutations(range(len(names))) if len(names) <= 5 else [tuple(range(len(names)))]
    ):
        grid = devices.reshape([shape[i] for i in nesting])
        yield tuple(names[i] for i in nesting), grid.transpose(np.argsort(nesting)).reshape(-1)
