"""What a machine is: nodes that are alike, the links inside them, and the network between.

    machine ::= nodes * node, a network
    node    ::= devices, directed links, a route for each pair and one to the network and back
    link    ::= seconds per byte, shared by all messages that cross it
    network ::= latency, rails, racks with uplinks

A node is what is wired by more than the network: a host with its GPUs, or an NVLink domain of
several hosts. Devices are numbered node by node. All times are seconds, all sizes bytes.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collc.errors import MachineError
from collc.language.ir import Ints

Floats = NDArray[np.float64]
MOST_DEVICES = 1 << 20
NETWORK, UPLINK = "net", "uplink"  # the kinds of link that leave a node, and a rack
SOCKET = "socket"  # the kind between the CPUs of a host


@dataclass(frozen=True)
class Link:
    """One direction of a wire, or of what messages share.

    ``kind`` is its class ("nvlink", "pcie", "socket", "net", ...); ``beta``: seconds per byte.
    """

    name: str
    kind: str
    beta: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.beta) and self.beta > 0):
            raise MachineError(f"link {self.name}: {self.beta!r} seconds per byte is not positive.")


@dataclass(frozen=True, eq=False)
class Node:
    """Devices and the links inside a node. Routes are indices of ``links``, padded with -1.

    Attributes:
      devices: how many there are; they come first to last from ``hosts`` equal hosts.
      within: routes, [from, to, hops]; all -1 from a device to itself.
      latency: seconds that a message from one to another takes beside its bytes, [from, to].
      leave, enter: routes to the network and from it, [device, hops]; no hops on a lone node.
      out, into: their latencies, [device].
      nic: the index of each device's NIC, by which rails are told apart; [device].
    """

    devices: int
    hosts: int
    links: tuple[Link, ...]
    within: Ints
    latency: Floats
    leave: Ints
    enter: Ints
    out: Floats
    into: Floats
    nic: Ints

    @cached_property
    def nics(self) -> int:
        """How many NICs its devices use; 0 where it has none."""
        return len(np.unique(self.nic[self.nic >= 0]))


@dataclass(frozen=True)
class Network:
    """What is between nodes: ``latency`` of a message, beside those inside the two nodes.

    ``rails``: NICs of one number share a switch; ``across``: the further latency of a message between
    unlike ones. ``rack``: nodes in a rack, 0 where there are no racks; ``uplink``: seconds per byte
    into and out of a rack; ``hop``: the further latency between racks.
    """

    latency: float = 0.0
    rails: bool = False
    across: float = 0.0
    rack: int = 0
    uplink: float = 0.0
    hop: float = 0.0

    def __post_init__(self) -> None:
        for what in ("latency", "across", "uplink", "hop"):
            value = getattr(self, what)
            if not (math.isfinite(value) and value >= 0):
                raise MachineError(f"network: {what} is {value!r} s, which cannot be.")
        if self.rack and not self.uplink:
            raise MachineError("racks need the bandwidth of their uplinks: racks=4 uplink=200GB/s.")


@dataclass(frozen=True, eq=False)
class Paths:
    """Ways of messages: ``latency`` [m], and the links that each crosses in order, [m, hops].

    The links are padded with -1, anywhere.
    """

    latency: Floats
    links: Ints


@dataclass(frozen=True, eq=False)
class Machine:
    """Nodes, the network, and what a device adds to a message.

    Attributes:
      text: what ``machine`` reads back.
      gamma: seconds per byte that is added to a device's own.
      ports: messages that a device has in flight at once, each way, before latencies add up.
      gpu: the catalogue's name of the model, by which NCCL's constants are found; "" if unknown.
      assumed: what was not said and therefore assumed, in sentences.
    """

    text: str
    node: Node
    nodes: int
    network: Network
    gamma: float = 0.0
    ports: int = 1
    gpu: str = ""
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.gamma) and self.gamma >= 0):
            raise MachineError(f"{self.text}: {self.gamma!r} s for each byte added cannot be.")
        if self.ports < 1:
            raise MachineError(f"{self.text}: a device has at least one port, not {self.ports}.")
        if self.nodes < 1 or self.devices > MOST_DEVICES:
            raise MachineError(
                f"{self.text}: {self.devices:,} devices; there can be 1 to {MOST_DEVICES:,}."
            )
        if self.nodes > 1 and not self.node.leave.shape[1]:
            raise MachineError(
                f"{self.text}: {self.nodes} nodes, but no NIC leads out of one. Say nics= and net=."
            )
        if self.network.rack and self.nodes % self.network.rack:
            raise MachineError(
                f"{self.text}: {self.nodes} nodes cannot be in racks of {self.network.rack}."
            )

    @property
    def devices(self) -> int:
        return self.nodes * self.node.devices

    @property
    def racks(self) -> int:
        """How many racks there are; 1 where the network has none."""
        return self.nodes // self.network.rack if self.network.rack else 1

    def node_of(self, device: Any) -> Any:
        """The node of a device, or of each of an array."""
        return device // self.node.devices

    def rack_of(self, device: Any) -> Any:
        """The rack of a device, or of each of an array."""
        node = self.node_of(device)
        return node // self.network.rack if self.network.rack else node * 0

    @cached_property
    def beta(self) -> Floats:
        """Seconds per byte of every link: node by node, then up and down of each rack."""
        own = np.tile([link.beta for link in self.node.links], self.nodes)
        return np.concatenate([own, np.full(self._uplinks, self.network.uplink)])

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The classes of its links, each once, from the inside outwards."""
        own = dict.fromkeys(link.kind for link in self.node.links)
        return (*own, UPLINK) if self._uplinks else tuple(own)

    @cached_property
    def kind(self) -> Ints:
        """The class of every link, as an index of ``kinds``."""
        own = np.tile([self.kinds.index(link.kind) for link in self.node.links], self.nodes)
        return np.concatenate([own, np.full(self._uplinks, len(self.kinds) - 1)]).astype(np.int64)

    @property
    def _uplinks(self) -> int:
        return 2 * self.racks if self.network.rack else 0

    def name(self, link: int) -> str:
        """The name of a link, as ``node3/nic0 out`` or ``rack1 up``."""
        own, count = self.node.links, len(self.node.links)
        if link < self.nodes * count:
            return f"node{link // count}/{own[link % count].name}"
        rack, down = divmod(link - self.nodes * count, 2)
        return f"rack{rack} {'down' if down else 'up'}"

    def paths(self, src: Ints, dst: Ints) -> Paths:
        """The ways from devices to other devices, [m]."""
        g, count, node = self.node.devices, len(self.node.links), self.node
        a, b = src // g, dst // g
        i, j = src % g, dst % g
        near = a == b
        hops = max(node.within.shape[2], node.leave.shape[1] + node.enter.shape[1] + 2)
        links = np.full((len(src), hops), -1, np.int64)
        latency = np.empty(len(src))

        def put(rows: Any, at: int, found: Ints, of: Ints) -> int:
            shifted = np.where(found >= 0, found + count * of[:, None], -1)
            links[rows, at : at + found.shape[1]] = shifted
            return at + found.shape[1]

        latency[near] = node.latency[i[near], j[near]]
        put(near, 0, node.within[i[near], j[near]], a[near])
        far = ~near
        if far.any():
            a, b, i, j = a[far], b[far], i[far], j[far]
            net, at = self.network, put(far, 0, node.leave[i], a)
            late = node.out[i] + net.latency + node.into[j]
            if net.rails:
                late = late + np.where(node.nic[i] != node.nic[j], net.across, 0.0)
            if net.rack:
                up, down = a // net.rack, b // net.rack
                other = up != down
                first = self.nodes * count
                links[far, at] = np.where(other, first + 2 * up, -1)
                links[far, at + 1] = np.where(other, first + 2 * down + 1, -1)
                late = late + np.where(other, net.hop, 0.0)
                at += 2
            put(far, at, node.enter[j], b)
            latency[far] = late
        return Paths(latency, links)

    def crossed(self, paths: Paths, bytes: Floats) -> Floats:
        """The bytes that every link carries of messages of these sizes, [links]."""
        on = paths.links >= 0
        each = np.broadcast_to(bytes[:, None], paths.links.shape)[on]
        return np.bincount(paths.links[on], each, len(self.beta)).astype(np.float64, copy=False)

    def __str__(self) -> str:
        return self.text
