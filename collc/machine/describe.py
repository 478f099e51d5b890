"""A machine in a few lines that a person reads."""

from collections.abc import Callable

import numpy as np

from collc.machine.shape import BOARD
from collc.machine.topology import NETWORK, Machine
from collc.machine.units import bandwidth, seconds


def describe(machine: Machine) -> str:
    """Devices, nodes, links by class with bandwidth each way and latency, racks, what was assumed."""
    node = machine.node
    model = f", {machine.gpu.upper()}" if machine.gpu else ""
    hosts = machine.nodes * node.hosts
    each = f"{_many(hosts, 'host')} of {node.devices // node.hosts}"
    rows = [("devices", f"{_many(machine.devices, 'GPU')}{model}: {each}")]
    if node.hosts > 1:
        rows.append(("nodes", f"{machine.nodes} of {node.hosts} hosts, {node.devices} GPUs each"))
    used = {int(i) for ways in (node.within, node.leave, node.enter) for i in ways[ways >= 0]}
    links = [node.links[i] for i in sorted(used)]
    for kind in dict.fromkeys(link.kind for link in links):
        if kind != BOARD:  # a wire that costs nothing
            betas = sorted({link.beta for link in links if link.kind == kind}, reverse=True)
            nics = f"{_many(node.nics, 'NIC')} of a node, " if kind == NETWORK else ""
            rows.append((kind, f"{nics}{_range(betas, _bandwidth)} each way"))
    away = ~np.eye(node.devices, dtype=bool)
    if away.any():
        inside = f"{_range(sorted(set(node.latency[away])), seconds)} from GPU to GPU in a node"
        rows.append(("latency", inside))
    if machine.nodes > 1:
        rows += _network(machine)
    adding = f"{_bandwidth(machine.gamma)} added by a GPU" if machine.gamma else "takes no time"
    rows.append(("adding", adding))
    rows.append(
        ("ports", f"{_many(machine.ports, 'message')} of a GPU in flight at once, each way")
    )
    rows += [("assumed", sentence) for sentence in machine.assumed]
    width = max(len(name) for name, _ in rows)
    lines = [str(machine)]
    last = ""
    for name, what in rows:
        lines.append(f"  {'' if name == last else name:{width}}  {what}".rstrip())
        last = name
    return "\n".join(lines)


def _network(machine: Machine) -> list[tuple[str, str]]:
    node, net = machine.node, machine.network
    late = node.out[:, None] + net.latency + node.into[None, :]
    same = late[node.nic[:, None] == node.nic[None, :]]
    rows = [("latency", f"{_range(sorted(set(same)), seconds)} from node to node")]
    if net.rails:
        rows.append(
            ("rails", f"a rail for each of {node.nics} NICs; {seconds(net.across)} more to others")
        )
    if net.rack:
        each = f"{_many(machine.racks, 'rack')} of {_many(net.rack, 'node')}"
        hop = f"{seconds(net.hop)} more between racks" if net.hop else "as quick between racks"
        rows.append(("racks", f"{each}, {_bandwidth(net.uplink)} up and down; {hop}"))
    return rows


def _bandwidth(beta: float) -> str:
    """Of seconds per byte: 1 / (1 / 1e9) is not quite 1e9."""
    return bandwidth(float(f"{1 / beta:.6g}"))


def _range(values: list[float], shown: Callable[[float], str]) -> str:
    texts = list(dict.fromkeys(shown(float(value)) for value in values))
    return texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"


def _many(n: int, what: str) -> str:
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"
