"""What XLA's own collectives, and a ppermute, cost on GPUs: by NCCL's model and XLA's kernels.

NCCL reckons t = latency + bytes / bandwidth for each algorithm and protocol, and takes the least. Its
constants rank, they are no truth: ``error`` says how far posted logs are from them, ``calibrated`` up to
how many devices there are any.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from collc.errors import MachineError, nearest
from collc.language.ir import Ints
from collc.machine.rings import Cells, Rings, cells, direct, rings
from collc.machine.topology import Machine
from collc.machine.tuning import (
    ERROR,
    GB,
    US,
    VERSION,
    Constants,
    calibrated,
    constants,
    data,
    error,
    link_class,
    of_version,
)

__all__ = [
    "ERROR",
    "VERSION",
    "Constants",
    "Native",
    "calibrated",
    "candidates",
    "constants",
    "error",
    "native",
]

_LEAST_NVLS = 3  # devices in a node: NCCL sets it up for more than two
# What XLA is asked for: see lowering.
_ASKED = {
    "all_reduce": "all_reduce",
    "reduce": "all_reduce",
    "broadcast": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "scatter": "reduce_scatter",
    "all_gather": "all_gather",
    "gather": "all_gather",
    "all_to_all": "all_to_all",
}


@dataclass(frozen=True)
class Native:
    """What one of XLA's own collectives costs.

    Attributes:
      algorithm: "ring", "tree", "nvls", "nvls-tree" (NVLS in each node, a tree between), "p2p", XLA's
        "one-shot" and "two-shot"; "none" where a group is one device.
      protocol: "LL", "LL128", "Simple"; "" where there is none.
      latency, bandwidth: seconds that do not grow with the size, and that do.
      in_network: whether NVSwitches add or copy.
    """

    algorithm: str
    protocol: str
    latency: float
    bandwidth: float
    in_network: bool = False

    @property
    def seconds(self) -> float:
        return self.latency + self.bandwidth


def native(
    machine: Machine, groups: Ints, collective: str, size: float, version: str = VERSION
) -> Native:
    """What a collective costs as XLA runs it, on all groups at once.

    ``groups``: devices, [groups, n]; the groups share NICs and uplinks. ``collective``: its name as a
    function of schedules; ``reduce`` and the like cost what they are lowered to. ``size``: bytes of the
    whole buffer of a rank. Raises MachineError.
    """
    return min(candidates(machine, groups, collective, size, version), key=lambda c: c.seconds)


def candidates(
    machine: Machine, groups: Ints, collective: str, size: float, version: str = VERSION
) -> tuple[Native, ...]:
    """What there is to choose from: as ``native``. XLA's own kernel, where it has one, is alone."""
    groups = np.asarray(groups)
    asked = _checked(machine, groups, collective, size)
    if groups.shape[1] == 1:
        return (Native("none", "", 0.0, 0.0),)
    group = _Group(machine, groups, constants(machine, version))
    if asked == "all_to_all":
        return (group.direct(size),)
    if asked == "all_reduce" and (kernel := group.kernel(size)):
        return (kernel,)
    return tuple(group.ring(asked, size)) + tuple(group.other(asked, size))


def _checked(machine: Machine, groups: Ints, collective: str, size: float) -> str:
    if collective not in _ASKED:
        raise MachineError(f"XLA has no collective {collective!r}. {nearest(collective, _ASKED)}")
    if not (math.isfinite(size) and size > 0):
        raise MachineError(f"a size of {size} bytes has no price. Give 1 byte or more.")
    if groups.ndim != 2 or not groups.size:
        raise MachineError(
            f"groups are an array [groups, n] of devices, not one of {groups.shape}."
        )
    if groups.min() < 0 or groups.max() >= machine.devices:
        raise MachineError(
            f"groups name device {groups.max() if groups.min() >= 0 else groups.min()}, but {machine} "
            f"has {machine.devices}: 0 to {machine.devices - 1}. Take a larger machine."
        )
    if len(np.unique(groups)) < groups.size:
        raise MachineError("a device is in two groups, or twice in one. Name each of them once.")
    return _ASKED[collective]


class _Group:
    """All groups at once; those that differ are taken to be as the one that is worst off."""

    def __init__(self, machine: Machine, groups: Ints, own: Constants) -> None:
        self.data, self.wires = of_version(own.version), link_class(machine)
        self.machine, self.own, self.n = machine, own, groups.shape[1]
        self.gpu: dict[str, Any] = self.data["gpu"].get(own.gpu, {})
        self.cut: Cells = cells(machine, groups)
        self.reached = own.efficiency(machine)
        self.rings: Rings = rings(self.cut, self.reached, self.wires == "pcie")
        self.nodes = int(self.cut.nodes.max())
        self.local = int(self.cut.count.min())
        self.scale = min(self.nodes, 3) - 1  # which of NCCL's columns: one node, two, more
        host = groups // (machine.node.devices // machine.node.hosts)
        self.on_a_host = bool((host == host[:, :1]).all())

    def near(self, algorithm: str, protocol: int) -> float:
        """Seconds of a hop inside a node. Of an NVLink that NCCL has constants for, those count."""
        hop = self.data["hop"][self.wires][algorithm][protocol] * US
        late = self.rings.near
        return float(np.maximum(late, hop).mean()) if len(late) and not self.gpu else hop

    def far(self, algorithm: str, protocol: int) -> float:
        hop = self.data["hop"]["net"][algorithm][protocol] * US
        late = self.rings.far
        return float(np.maximum(late, hop).mean()) if len(late) else hop

    def most(self, what: str, channels: bool = True) -> float:
        """The most that NCCL says a protocol moves, bytes a second; no limit where it says nothing."""
        if not self.gpu:
            return math.inf
        return self.gpu[what][self.scale] * (self.gpu["channels"] if channels else 1) * GB

    def ring(self, asked: str, size: float) -> Iterator[Native]:
        """lat = base + (2(n - 1) - x) intra + x inter, x = 2(nodes - 1); half as many for a half."""
        turns = 2 if asked == "all_reduce" else 1
        far = turns * (self.nodes - 1)
        bus = self.rings.both
        rates = (min(bus / 2, self.ll), min(bus * 0.92, self.most("ring_ll128")), bus)
        for p, name in self.protocols():
            late = self.data["base"]["ring"][p] * US + far * self.far("ring", p)
            late += (turns * (self.n - 1) - far) * self.near("ring", p)
            yield Native("ring", name, late, size * turns * (self.n - 1) / self.n / rates[p])

    @property
    def ll(self) -> float:
        return self.most("ll", channels=False)

    def protocols(self) -> list[tuple[int, str]]:
        """Those that NCCL allows: LL128 on NVLink only."""
        fine = self.wires == "nvlink"
        return [(p, s) for p, s in enumerate(self.data["protocols"]) if fine or s != "LL128"]

    def other(self, asked: str, size: float) -> Iterator[Native]:
        if asked == "all_reduce":
            yield from self.tree(size)
        nvls = self.gpu.get("nvls")
        if nvls and self.local >= _LEAST_NVLS and (self.nodes == 1 or asked == "all_reduce"):
            yield self.nvls(nvls, asked, size)

    def tree(self, size: float) -> Iterator[Native]:
        """A chain in nodes, a double tree between.

        lat = base + 2 ((n / nodes - 1) intra + lg nodes inter).
        """
        bus = min(self.rings.both * 0.92, self.most("tree"))
        ll128 = bus * (7 / 9 if self.nodes == 1 else 120 / 128)
        rates = (min(bus / 3.8, self.ll), min(ll128, self.most("tree_ll128")), bus)
        hops = self.n // self.nodes - 1, _lg(self.nodes)
        for p, name in self.protocols():
            late = self.data["base"]["tree"][p] * US
            late += 2 * (hops[0] * self.near("tree", p) + hops[1] * self.far("tree", p))
            part = _part(self.data["tree"][name], size)
            yield Native("tree", name, late, size / (rates[p] / 2 * part))

    def nvls(self, nvls: Mapping[str, Any], asked: str, size: float) -> Native:
        """Switches add and copy: one hop, and nobody sends for others. Between nodes a double tree."""
        n, channels = self.n, nvls["channels"]
        # Where links are slower than those of the model, so is this.
        slower = min(1.0, self.rings.within / (self.gpu["channels"] * self.gpu["rate"] * GB))
        bus = (channels - 1) * nvls["rate"] * nvls["efficiency"] * GB * slower
        late = self.near("nvls", 2)
        if asked != "all_reduce":
            return Native("nvls", "Simple", late, size / (bus * (n - 1) / n), True)
        bus, name = 2 * bus, "nvls"  # adding and copying go on at the same time
        if self.nodes > 1:
            # A node sends no more than it holds where there are two, else up to twice that.
            net = self.rings.between * (2 if self.nodes == 2 else 1)
            bus, name = min(bus, net, channels * nvls["tree"][self.scale] * GB), "nvls-tree"
            late += 2 * _lg(self.nodes) * self.far("nvls", 2)
        return Native(name, "Simple", late, size * 2 * (n - 1) / n / bus, True)

    def kernel(self, size: float) -> Native | None:
        """XLA's own kernel for small sums on one host's NVLink; None where it takes NCCL."""
        xla, n = data()["xla"], self.n
        if not (self.gpu and self.on_a_host) or n > xla["ranks"] or size > xla["two_shot"]:
            return None
        # A kernel whose ranks signal by flags: the base of a Simple protocol would be too much.
        launch = (self.data["base"]["ring"][0] + xla["sync"]) * US
        one = min(size, xla["one_shot"]) * (n - 1) / self.rings.within
        if size <= xla["one_shot"]:
            return Native("one-shot", "", launch, one)
        two = Native(
            "two-shot", "", launch + xla["sync"] * US, size * 2 * (n - 1) / n / self.rings.within
        )
        # More bytes never take less: XLA's threshold is right for some GPU, and a bit late for others.
        return replace(two, latency=max(two.latency, launch + one - two.bandwidth))

    def direct(self, size: float) -> Native:
        """All messages at once; those to other nodes are posted to a NIC one by one."""
        load, posted = direct(self.cut)
        busy = float((load * self.machine.beta / self.reached).max()) * size / self.n
        hop = self.far("ring", 2) if self.nodes > 1 else self.near("ring", 2)
        late = self.data["base"]["ring"][2] + posted * data()["xla"]["post"]
        return Native("p2p", "Simple", late * US + hop, busy)


def _lg(nodes: int) -> int:
    return nodes.bit_length() - 1


def _part(table: list[float], size: float) -> float:
    """What part of its bandwidth a tree reaches: in steps in NCCL, between them along a line here."""
    at = math.log2(max(size, 64) / 64)
    return float(np.interp(at, np.arange(len(table) + 1), [*table, 1.0]))
