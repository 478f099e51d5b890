"""From a graph of devices, switches, CPUs and NICs to a node with its routes.

A graph is a ``networkx.DiGraph``. Its nodes are names with ``kind`` "gpu", "nic", "switch" or "cpu";
gpus and nics also have ``index``. An edge is one direction of a wire: ``kind`` (the class of link),
``bandwidth`` (bytes a second) and ``latency`` (seconds). A NIC has an edge to "network" and one back.
"""

from itertools import pairwise

import networkx as nx
import numpy as np

from collc.errors import MachineError
from collc.machine.topology import Link, Node

OUTSIDE = "network"
_A_HOP = 1e-12  # seconds: far below any latency


def wire(
    graph: "nx.DiGraph[str]", a: str, b: str, kind: str, bandwidth: float, latency: float = 0.0
) -> None:
    """A wire both ways, each with the whole bandwidth (bytes a second) and latency (seconds)."""
    graph.add_edge(a, b, kind=kind, bandwidth=bandwidth, latency=latency)
    graph.add_edge(b, a, kind=kind, bandwidth=bandwidth, latency=latency)


def node(graph: "nx.DiGraph[str]", text: str, hosts: int = 1) -> Node:
    """The node of a graph: for each pair of devices the way of least latency, then of fewest hops.

    Of several NICs a device takes the nearest, of equally near ones the one with most bandwidth left.
    Raises MachineError where there is no device, or no way between two.
    """
    gpus = _of(graph, "gpu")
    if not gpus:
        raise MachineError(f"{text}: there is no GPU. Name a model, as in {text}+h100.")
    edges = [(a, b) for a, b, e in graph.edges(data=True) if OUTSIDE not in (a, b)]
    outside = [(a, b) for a, b in graph.edges if OUTSIDE in (a, b)]
    index = {edge: i for i, edge in enumerate([*edges, *outside])}
    links = tuple(
        Link(f"{a} -> {b}", graph.edges[a, b]["kind"], 1 / graph.edges[a, b]["bandwidth"])
        for a, b in index
    )
    inner = graph.subgraph([v for v in graph if v != OUTSIDE]).copy()
    # Never through another GPU, unless a wire joins the two: GPUs forward nothing by themselves.
    inverse = inner.reverse()
    ways = {gpu: _ways(inner, gpu) for gpu in gpus}
    back = {gpu: _ways(inverse, gpu) for gpu in gpus}
    n = len(gpus)
    routes, late = {}, np.zeros((n, n))
    for i, a in enumerate(gpus):
        for j, b in enumerate(gpus):
            if i == j:
                continue
            if b not in ways[a]:
                raise MachineError(f"{text}: no link leads from {a} to {b}. Add one.")
            late[i, j], path = ways[a][b]
            routes[i, j] = [index[e] for e in pairwise(path)]
    nics = _nics(graph, gpus, ways, back)
    leave, enter, out, into = [], [], np.zeros(n), np.zeros(n)
    for i, gpu in enumerate(gpus if nics else ()):
        nic = nics[i]
        (to, forth), (fro, path) = ways[gpu][nic], back[gpu][nic]
        out[i] = to + graph.edges[nic, OUTSIDE]["latency"]
        into[i] = fro + graph.edges[OUTSIDE, nic]["latency"]
        leave.append([index[e] for e in pairwise(forth)] + [index[nic, OUTSIDE]])
        home = path[::-1]
        enter.append([index[OUTSIDE, nic]] + [index[e] for e in pairwise(home)])
    hops = max((len(r) for r in routes.values()), default=0)
    within = np.full((n, n, hops), -1, np.int64)
    for (i, j), route in routes.items():
        within[i, j, : len(route)] = route
    order = {name: k for k, name in enumerate(_of(graph, "nic"))}
    return Node(
        devices=n,
        hosts=hosts,
        links=links,
        within=within,
        latency=late,
        leave=_padded(leave, n),
        enter=_padded(enter, n),
        out=out,
        into=into,
        nic=np.array([order[nic] for nic in nics] if nics else [-1] * n, np.int64),
    )


def _of(graph: "nx.DiGraph[str]", kind: str) -> list[str]:
    found = [(data["index"], v) for v, data in graph.nodes(data=True) if data.get("kind") == kind]
    return [v for _, v in sorted(found)]


Ways = dict[str, tuple[float, list[str]]]


def _ways(graph: "nx.DiGraph[str]", gpu: str) -> Ways:
    """The best way to whatever can be reached: seconds, and the nodes on it."""
    ends = {v for v, d in graph.nodes(data=True) if d.get("kind") in ("gpu", "nic")} - {gpu}

    def weight(a: str, b: str, edge: dict[str, float]) -> float | None:
        """None where there is no passing; of two equally quick ways the shorter one is taken."""
        return None if a in ends else edge["latency"] + _A_HOP

    paths = nx.single_source_dijkstra_path(graph, gpu, weight=weight)
    late = nx.get_edge_attributes(graph, "latency")
    return {v: (sum(late[e] for e in pairwise(p)), p) for v, p in paths.items()}


def _nics(
    graph: "nx.DiGraph[str]", gpus: list[str], ways: dict[str, Ways], back: dict[str, Ways]
) -> list[str]:
    """The NIC of each device; [] where there are none."""
    nics = _of(graph, "nic")
    taken = dict.fromkeys(nics, 0)

    def left(nic: str) -> float:
        """The bandwidth of a NIC that would be left for one device more."""
        return graph.edges[nic, OUTSIDE]["bandwidth"] / (taken[nic] + 1)

    chosen = []
    for gpu in gpus if nics else ():
        near = [nic for nic in nics if nic in ways[gpu] and nic in back[gpu]]
        if not near:
            raise MachineError(f"no link leads from {gpu} to a NIC. Add one.")
        best = min(near, key=lambda nic: (_hops(ways[gpu][nic]), -left(nic), nics.index(nic)))
        taken[best] += 1
        chosen.append(best)
    return chosen


def _hops(way: tuple[float, list[str]]) -> tuple[float, int]:
    return (round(way[0], 12), len(way[1]))


def _padded(rows: list[list[int]], n: int) -> np.ndarray:
    hops = max((len(row) for row in rows), default=0)
    made = np.full((n, hops), -1, np.int64)
    for i, row in enumerate(rows):
        made[i, : len(row)] = row
    return made
