"""What no schedule can beat on a machine, class of link by class of link, without in-network reduction.

Each cut counts: what all devices, all nodes or all racks together have to send, over the bandwidth
with which they can; and the fewest steps of one message each. Sources: those of
``collc.analysis.bounds``, applied to nodes and racks as if they were ranks.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from collc.language.ir import Ints
from collc.language.states import Kind
from collc.machine.topology import NETWORK, UPLINK, Floats, Machine, Node

DEVICE = "device"


@dataclass(frozen=True)
class Bound:
    """Seconds that a collective takes at least: steps, bytes by class, additions.

    ``bytes``: for "device", "net" and "uplink" the seconds for which those links are busy at least.
    """

    steps: float
    bytes: Mapping[str, float]
    adding: float

    @property
    def seconds(self) -> float:
        """Steps, the busiest class and additions, which lock-step pays one after another."""
        return self.steps + max(self.bytes.values(), default=0.0) + self.adding


def bound(machine: Machine, groups: Ints, kind: Kind, size: float) -> Bound:
    """The bound where groups of devices, [groups, n], do a collective on ``size`` bytes at once."""
    n = groups.shape[1]
    if n == 1:
        return Bound(0.0, {}, 0.0)
    nodes, racks = machine.node_of(groups), machine.rack_of(groups)
    found = {DEVICE: _busy(groups, kind, size, *_devices(machine, groups))}
    if (nodes != nodes[:, :1]).any():
        found[NETWORK] = _busy(nodes, kind, size, *_nics(machine))
    if (racks != racks[:, :1]).any():
        up = np.full(machine.racks, machine.network.uplink)
        found[UPLINK] = _busy(racks, kind, size, up, up)
    adds = kind.name in ("all_reduce", "reduce_scatter", "reduce")
    adding = machine.gamma * ((n - 1) * size / n) if adds else 0.0
    return Bound(_steps(machine, nodes), found, adding)


def _busy(places: Ints, kind: Kind, size: float, out: Floats, into: Floats) -> float:
    """Seconds for which the links of places are busy at least.

    ``out``, ``into``: seconds per byte of each place over all its links. What all of them have to
    send, over all their links; or what one has to, over its own.
    """
    sent, received = np.zeros(len(out)), np.zeros(len(into))
    total = whole = 0.0  # whole: what one place, the root's or another, has to move
    n = places.shape[1]
    for group in places:
        own, m = np.unique(group, return_counts=True)
        rest = (n - m) * size / n  # chunks that belong to others
        match kind.name:
            case "all_reduce":
                total += 2 * (len(own) - 1) * size
            case "reduce_scatter":
                total += (len(own) - 1) * size
                sent[own] += rest
            case "all_gather":
                total += (len(own) - 1) * size
                received[own] += rest
            case "all_to_all":
                sent[own] += m * rest
                received[own] += m * rest
            case "broadcast" | "reduce":
                total += (len(own) - 1) * size
                whole = max(whole, size)
            case "gather" | "scatter":
                whole = max(whole, float(rest.min()))
            case other:
                raise ValueError(other)
    used = np.unique(places)
    each = np.concatenate([sent[used] * out[used], received[used] * into[used]])
    mean = max(_joint(out[used]), _joint(into[used])) * len(used)
    least = min(out[used].min(), into[used].min())
    return max(float(each.max()), float(whole * least), float(total / len(used) * mean))


def _joint(beta: Floats) -> float:
    """Seconds per byte over several links at once."""
    if (beta == beta[0]).all():
        return float(beta[0]) / len(beta)
    return 1 / float((1 / beta).sum())


def _devices(machine: Machine, groups: Ints) -> tuple[Floats, Floats]:
    """Seconds per byte out of and into each device, over all the ways that its group can use."""
    nodes = np.sort(machine.node_of(groups), axis=1)
    inside, outside = (nodes[:, 1:] == nodes[:, :-1]).any(), (nodes[:, :1] != nodes).any()
    out, into = _ways(machine.node, bool(inside), bool(outside))
    return np.tile(out, machine.nodes), np.tile(into, machine.nodes)


@functools.lru_cache(maxsize=64)
def _ways(node: Node, inside: bool, outside: bool) -> tuple[Floats, Floats]:
    """As ``_devices``, of each device of a node, with the ways within the node, out of it, or both."""
    beta = np.array([link.beta for link in node.links])
    sides = []
    for ways, network, end in (
        (node.within, node.leave, 0),
        (node.within.swapaxes(0, 1), node.enter, -1),
    ):
        own = np.zeros(node.devices)
        for i in range(node.devices):
            near = {_kept(way)[end] for way in ways[i] if len(_kept(way))} if inside else set()
            found = [beta[k] for k in sorted(near)]
            if outside and _kept(network[i])[end] not in near:  # else it leads over the same link
                found.append(beta[_kept(network[i])].max())
            own[i] = _joint(np.array(found))
        sides.append(own)
    return sides[0], sides[1]


def _nics(machine: Machine) -> tuple[Floats, Floats]:
    """Seconds per byte out of and into each node, over all its NICs."""
    node = machine.node
    sides = []
    for routes, end in ((node.leave, -1), (node.enter, 0)):
        links = sorted({int(_kept(route)[end]) for route in routes})
        own = _joint(np.array([node.links[k].beta for k in links]))
        sides.append(np.full(machine.nodes, own))
    return sides[0], sides[1]


def _kept(route: Ints) -> Ints:
    """The links of a route."""
    return route[route >= 0]


def _steps(machine: Machine, nodes: Ints) -> float:
    """Seconds of the fewest messages one after another: each step at most doubles who has heard.

    With p ports a step reaches p + 1 times as many; between nodes all ranks of a node may send.
    """
    node, n = machine.node, nodes.shape[1]
    whole = math.ceil if machine.ports == 1 else float
    near = node.latency[~np.eye(node.devices, dtype=bool)]
    far = node.out.min() + machine.network.latency + node.into.min() if node.leave.size else 0.0
    each = [np.unique(group, return_counts=True)[1] for group in nodes]
    inside, most = any((m > 1).any() for m in each), max(int(m.max()) for m in each)
    spread = max(len(m) for m in each)
    least = min(near.tolist() if inside else [far])
    if spread > 1:
        least = min(least, far)
    steps = whole(_log(n, machine.ports + 1)) * least
    return max(steps, whole(_log(spread, most * machine.ports + 1)) * far)


def _log(n: int, base: int) -> float:
    """The logarithm, exact where it is an integer."""
    found = math.log(n, base)
    return round(found) if base ** round(found) == n else found
