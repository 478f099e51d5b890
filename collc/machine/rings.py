"""Where NCCL's rings and direct messages run on a machine: what each link carries, what that allows.

A ring goes through all devices of a group in a node, then on to the next node, and back to the first.
There are as many as the group has NICs in a node; each has its share of the bytes. Nodes follow one
another as they come in the group; within a node NCCL looks for the best order itself, which is taken
to be that of the devices.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from collc.language.ir import Ints
from collc.machine.topology import Floats, Machine


@dataclass(frozen=True, eq=False)
class Cells:
    """Groups of devices, cut by node: the devices of a group in a node are a cell.

    Attributes:
      device: all devices, cell by cell and group by group.
      cell, group: the cell of each of them; the group of each cell.
      start, end: of each cell, in ``device``.
      next: the cell of the group's next node, around; itself where the group is in one node.
    """

    machine: Machine
    device: Ints
    cell: Ints
    group: Ints
    start: Ints
    end: Ints
    next: Ints

    @cached_property
    def count(self) -> Ints:
        """Devices in each cell."""
        return self.end - self.start

    @cached_property
    def nodes(self) -> Ints:
        """Nodes of each group."""
        return np.bincount(self.group)


def cells(machine: Machine, groups: Ints) -> Cells:
    """Groups, [groups, n], cut by node."""
    device = groups.reshape(-1)
    key = np.arange(len(groups)).repeat(groups.shape[1]) * machine.nodes + machine.node_of(device)
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    order = first.argsort()  # a group's nodes in the order in which it comes to them
    cell = np.empty_like(order)
    cell[order] = np.arange(len(order))
    cell = cell[inverse.reshape(-1)]
    sort = np.lexsort((device, cell))
    device, cell = device[sort], cell[sort]
    end = np.bincount(cell).cumsum()
    group = first[order] // groups.shape[1]
    last = np.bincount(group).cumsum()
    follows = np.arange(1, len(order) + 1)
    follows[last - 1] = np.concatenate([[0], last[:-1]])
    return Cells(machine, device, cell, group, np.concatenate([[0], end[:-1]]), end, follows)


@dataclass(frozen=True, eq=False)
class Rings:
    """Rings of all groups at once.

    Attributes:
      near, far: latencies of the machine's links between neighbours in a node, and between nodes.
      within, between, both: bytes a second that a group sends around, as far as the links in nodes,
        those between them, and all allow; inf where there are none.
    """

    near: Floats
    far: Floats
    within: float
    between: float
    both: float


def rings(cut: Cells, reached: Floats, cross: bool) -> Rings:
    """The rings. ``reached``: what part of its bandwidth is reached on each link.

    They leave a node by the NIC by which they came, or, with ``cross``, by another where that is
    quicker: on a host whose GPUs are not all alike near to its NICs.
    """
    found = [_over(cut, reached, crossed) for crossed in (False, True)[: 1 + cross]]
    return max(found, key=lambda each: each.both)


def _over(cut: Cells, reached: Floats, crossed: bool) -> Rings:
    """The rings; ``crossed``: they leave by the NIC of the device before the one that they came to."""
    machine, n = cut.machine, len(cut.device)
    before = np.arange(n) - 1
    before[cut.start] = cut.end - 1
    weight = np.ones(n)  # of the way into each device from the one before
    far = np.zeros(len(machine.beta))
    far_late = np.zeros(0)
    if cut.nodes.max() > 1:
        entry, leaving, follows, share = _crossings(cut)
        leaving = before[entry] if crossed else leaving
        paths = machine.paths(cut.device[leaving], cut.device[entry[follows]])
        far, far_late = machine.crossed(paths, share), paths.latency
        # The way that closes the ring in a node is not gone where the last device sends it on. Where
        # that has another NIC, the ring has to come back to the one by which it came.
        open = (entry != leaving) & (leaving == before[entry])
        weight -= np.bincount(entry[open], share[open], n)
    alone = (cut.count > 1)[cut.cell]
    paths = machine.paths(cut.device[before[alone]], cut.device[alone])
    near = machine.crossed(paths, weight[alone])
    cost = machine.beta / reached
    return Rings(paths.latency, far_late, *(_rate(load * cost) for load in (near, far, near + far)))


def _rate(seconds: Floats) -> float:
    worst = float(seconds.max(initial=0.0))
    return 1 / worst if worst else np.inf


def _crossings(cut: Cells) -> tuple[Ints, Ints, Ints, Floats]:
    """Where rings enter and leave nodes, one row for each ring and cell.

    Where in ``device`` the ring enters the cell and where it leaves, the row of the next node, and the
    ring's share of the bytes. A ring enters and leaves a node by one NIC.
    """
    node = cut.machine.node
    nic = node.nic[cut.device % node.devices]
    key = cut.cell * (nic.max() + 1) + nic
    found, entry = np.unique(key, return_index=True)
    leaving = len(key) - 1 - np.unique(key[::-1], return_index=True)[1]
    owner = found // (nic.max() + 1)
    nics = np.bincount(owner)
    most = np.full(len(cut.nodes), len(node.links))
    np.minimum.at(most, cut.group, nics)
    row = np.arange(len(owner)) - (nics.cumsum() - nics)[owner]
    kept = (row < most[cut.group[owner]]) & (cut.nodes[cut.group[owner]] > 1)
    owner, entry, leaving, row = owner[kept], entry[kept], leaving[kept], row[kept]
    table = np.full((len(cut.group), int(row.max()) + 1), -1, np.int64)
    table[owner, row] = np.arange(len(owner))
    return entry, leaving, table[cut.next[owner], row], 1 / most[cut.group[owner]]


def direct(cut: Cells) -> tuple[Floats, int]:
    """Every device to every other of its group, a byte each: what each link carries, [links].

    And how many messages a device sends to other nodes, at most.
    """
    machine, node = cut.machine, cut.machine.node
    load = np.zeros(len(machine.beta))
    at = np.arange(len(cut.device))
    count, start = cut.count[cut.cell], cut.start[cut.cell]
    for shift in range(1, int(cut.count.max())):
        here = at[count > shift]
        other = start[here] + (here - start[here] + shift) % count[here]
        paths = machine.paths(cut.device[here], cut.device[other])
        load += machine.crossed(paths, np.ones(len(here)))
    group = cut.group[cut.cell]
    size = np.bincount(group)[group]
    far = (size - count).astype(float)
    first = len(node.links) * machine.node_of(cut.device)
    for routes in (node.leave, node.enter) if far.any() else ():
        own = routes[cut.device % node.devices]
        on = own >= 0
        each = np.broadcast_to(far[:, None], own.shape)[on]
        load += np.bincount((own + first[:, None])[on], each, len(load))
    if machine.network.rack:
        rack = machine.rack_of(cut.device)
        key = group * machine.racks + rack
        _, inverse, among = np.unique(key, return_inverse=True, return_counts=True)
        out = (size - among[inverse.reshape(-1)]).astype(float)
        up = len(node.links) * machine.nodes + 2 * rack
        for links in (up, up + 1):
            load += np.bincount(links, out, len(load))
    return load, int(far.max(initial=0))
