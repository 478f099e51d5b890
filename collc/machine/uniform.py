"""Machines by a few numbers: what formulas are about."""

import networkx as nx

from collc.machine.graph import OUTSIDE, node, wire
from collc.machine.shape import spoke
from collc.machine.topology import NETWORK, Machine, Network


def uniform(n: int, alpha: float, beta: float, gamma: float = 0.0, ports: int = 1) -> Machine:
    """n devices, any two alike: a message of b bytes takes alpha + b * beta seconds, full duplex.

    A device sends one message and receives one at a time; with more ``ports`` as many, whose latencies
    overlap but whose bytes share its wire. ``gamma``: seconds per byte added.
    """
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_node("switch", kind="switch")
    for i in range(n):
        graph.add_node(f"gpu{i}", kind="gpu", index=i)
        spoke(graph, f"gpu{i}", "switch", "link", 1 / beta, alpha)
    return Machine(f"uniform({n})", node(graph, "uniform"), 1, Network(), gamma, ports)


def two_level(
    nodes: int,
    devices: int,
    inner: tuple[float, float],
    outer: tuple[float, float],
    nics: int = 0,
    gamma: float = 0.0,
    network: Network | None = None,
) -> Machine:
    """Nodes of devices behind a switch each: (alpha, beta) within a node, ``inner``, and between them.

    ``outer`` is that of one NIC; devices share ``nics`` of them, or have one each.
    """
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_node("switch", kind="switch")
    nics = nics or devices
    for i in range(nics):
        graph.add_node(f"nic{i}", kind="nic", index=i)
        spoke(graph, f"nic{i}", OUTSIDE, NETWORK, 1 / outer[1], outer[0])
    for i in range(devices):
        graph.add_node(f"gpu{i}", kind="gpu", index=i)
        spoke(graph, f"gpu{i}", "switch", "link", 1 / inner[1], inner[0])
        # As if the NIC were the device's own: its wire costs nothing beside the NIC's.
        wire(graph, f"gpu{i}", f"nic{i * nics // devices}", "board", 1e6 / outer[1])
    text = f"two_level({nodes} x {devices})"
    return Machine(text, node(graph, text), nodes, network or Network(), gamma)
