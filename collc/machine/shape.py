"""Hosts by a few numbers: what the catalogue and words say, and the graph of such a node."""

from dataclasses import dataclass

import networkx as nx

from collc.errors import MachineError
from collc.machine import speeds
from collc.machine.graph import OUTSIDE, wire
from collc.machine.topology import NETWORK
from collc.machine.units import bandwidth, parse_bandwidth, parse_time, seconds

BOARD = "board"  # the class of a wire that costs nothing beside the NIC behind it
MOST_GPUS = 576  # of a node: the largest NVLink domain that there is


@dataclass(frozen=True)
class Wire:
    """Bytes a second, each way, and seconds of the whole way; None: not said."""

    bandwidth: float
    latency: float | None = None


def parse_wire(text: str, example: str) -> Wire:
    """``450GB/s,1us``, or only the bandwidth. Raises MachineError."""
    found = text.split(",")
    if len(found) > 2:
        raise MachineError(
            f"{text!r} is not a bandwidth and a latency: {len(found)} values. Write {example}."
        )
    return Wire(parse_bandwidth(found[0]), parse_time(found[1]) if found[1:] else None)


@dataclass(frozen=True)
class Tree:
    """PCIe instead of a switch for all: sockets, PCIe switches of each, the wire between sockets."""

    sockets: int
    switches: int
    socket: Wire


@dataclass(frozen=True)
class Shape:
    """A node: ``domain`` hosts of ``gpus`` GPUs and ``nics`` NICs each.

    ``link``: from a GPU to each other one, of class ``kind``; ``net``: of a NIC, and the whole way
    from a GPU to one of another node. Latencies are said.
    """

    gpus: int
    link: Wire
    kind: str
    nics: int
    net: Wire
    domain: int = 1
    tree: Tree | None = None

    def __post_init__(self) -> None:
        if self.gpus * self.domain > MOST_GPUS:
            raise MachineError(
                f"a node of {self.domain} x {self.gpus} GPUs: at most {MOST_GPUS} are in one "
                "NVLink domain. Say more hosts= of fewer gpus=."
            )
        evenly(self.gpus, self.nics)

    @property
    def share(self) -> int:
        """How many NICs only one GPU uses: they are as one."""
        return 1 if self.tree else max(1, self.nics // self.gpus)

    @property
    def ends(self) -> float:
        """Seconds of a tree's PCIe, from a GPU to a NIC at its socket, here and there."""
        return (self.link.latency or 0.0) + 4 * speeds.PCIE_HOP

    @property
    def assumed(self) -> tuple[str, ...]:
        """What drawing it assumes, in sentences."""
        if self.tree and (self.net.latency or 0.0) < self.ends:
            return (f"{seconds(self.ends)} for PCIe alone, more than net= says",)
        if self.share == 1:
            return ()
        one = bandwidth(self.share * self.net.bandwidth)
        return (f"the {self.share} NICs of a GPU are counted as one of {one}",)


def evenly(gpus: int, nics: int) -> None:
    """Whether the GPUs of a host can share its NICs, or each have several. Raises MachineError."""
    many, few = max(nics, gpus), min(nics, gpus)
    if few and many % few:
        raise MachineError(
            f"{gpus} GPUs and {nics} NICs in a host: neither number divides the other, so they "
            f"cannot share evenly. Say nics={gpus}."
        )


def spoke(
    graph: "nx.DiGraph[str]", a: str, hub: str, kind: str, bandwidth: float, latency: float
) -> None:
    """A wire to a hub and back, with the latency of the whole way on its first half."""
    wire(graph, a, hub, kind, bandwidth)
    graph.edges[a, hub]["latency"] = latency


def draw(shape: Shape, hosts: int) -> "nx.DiGraph[str]":
    """The graph of a node with so many hosts."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    (_tree if shape.tree else _star)(graph, shape, hosts)
    return graph


def _star(graph: "nx.DiGraph[str]", shape: Shape, hosts: int) -> None:
    """All GPUs at one switch, each with its share of NICs at its side."""
    count = hosts * shape.gpus
    if count > 1:
        graph.add_node("switch", kind="switch")
    for i in range(count):
        graph.add_node(f"gpu{i}", kind="gpu", index=i)
        if count > 1:
            late = shape.link.latency or 0.0
            spoke(graph, f"gpu{i}", "switch", shape.kind, shape.link.bandwidth, late)
    if not shape.nics:
        return
    nics = shape.nics // shape.share
    rate = shape.net.bandwidth * shape.share
    for i in range(hosts * nics):
        _nic(graph, i, rate, shape.net.latency or 0.0)
    for i in range(count):
        wire(graph, f"gpu{i}", f"nic{i * nics // shape.gpus}", BOARD, 1e6 * rate)


def _tree(graph: "nx.DiGraph[str]", shape: Shape, hosts: int) -> None:
    """Sockets joined with each other, PCIe switches at them, GPUs at those; NICs at the sockets."""
    tree = shape.tree
    assert tree and hosts == 1 and shape.link.latency is not None
    end, hop, rate = shape.link.latency / 2, speeds.PCIE_HOP, shape.link.bandwidth
    for s in range(tree.sockets):
        graph.add_node(f"cpu{s}", kind="cpu")
        for t in range(s):
            between = tree.socket
            wire(graph, f"cpu{t}", f"cpu{s}", "socket", between.bandwidth, between.latency or 0.0)
    switches = tree.sockets * tree.switches
    for w in range(switches):
        graph.add_node(f"switch{w}", kind="switch")
        wire(graph, f"switch{w}", f"cpu{w // tree.switches}", "pcie", rate, hop)
    for i in range(shape.gpus):
        graph.add_node(f"gpu{i}", kind="gpu", index=i)
        wire(graph, f"gpu{i}", f"switch{i * switches // shape.gpus}", "pcie", rate, end)
    late = max(0.0, (shape.net.latency or 0.0) - shape.ends)
    for i in range(shape.nics):
        _nic(graph, i, shape.net.bandwidth, late)
        wire(graph, f"nic{i}", f"cpu{i * tree.sockets // shape.nics}", "pcie", rate, hop)


def _nic(graph: "nx.DiGraph[str]", i: int, rate: float, latency: float) -> None:
    """A NIC with its way to the network."""
    graph.add_node(f"nic{i}", kind="nic", index=i)
    spoke(graph, f"nic{i}", OUTSIDE, NETWORK, rate, latency)
