"""What NCCL and XLA reckon with on a machine: latencies, what they reach of a wire, how sure that is.

They are keyed by NCCL's version and GPU in ``nccl.toml``, with their sources.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from collc.errors import MachineError, nearest
from collc.machine.topology import NETWORK, UPLINK, Floats, Machine

VERSION = "2.30"
ERROR = {"one node": 0.35, "several": 0.12}  # median, relative, of NCCL's model against posted logs
US, GB = 1e-6, 1e9

_PCIE = ("pcie", "socket")


@dataclass(frozen=True)
class Constants:
    """What ppermutes and NCCL's algorithms are reckoned with on a machine. Seconds.

    Attributes:
      version: of NCCL.
      gpu: the model whose constants these are; "" where only the machine's links are known.
      launch: of a round: NCCL's base latency and XLA's launch.
      near, far: NCCL's latency of a hop inside a node and between nodes.
      reached: what part of a link's bandwidth NCCL reaches, by class of link.
    """

    version: str
    gpu: str
    launch: float
    near: float
    far: float
    reached: Mapping[str, float]

    def round(self, latency: float, far: bool) -> float:
        """What a round takes beside its bytes. ``latency``: of the machine's slowest way in it."""
        if far:
            return self.launch + max(self.far, latency)
        return self.launch + (self.near if self.gpu else max(self.near, latency))

    def efficiency(self, machine: Machine) -> Floats:
        """What part of its bandwidth is reached on each link, [links]."""
        return np.array([self.reached[kind] for kind in machine.kinds])[machine.kind]


@cache
def data() -> dict[str, Any]:
    """The whole file."""
    return tomllib.loads(Path(__file__).with_name("nccl.toml").read_text(encoding="utf-8"))


def of_version(version: str) -> dict[str, Any]:
    """The constants of a version. Raises MachineError where it is not known."""
    known = [key for key in data() if key[0].isdigit()]
    if version not in known:
        raise MachineError(f"no constants of NCCL {version!r} are known. {nearest(version, known)}")
    return data()[version]


def model(machine: Machine, version: str) -> tuple[str, dict[str, Any]]:
    """The GPU's name and constants; "" and {} where NCCL has none, or its links are no NVLink."""
    name = data()["same"].get(machine.gpu, machine.gpu)
    gpu = of_version(version)["gpu"].get(name)
    return (name, gpu) if gpu and link_class(machine) == "nvlink" else ("", {})


def link_class(machine: Machine) -> str:
    """NCCL's class of the links between the devices of a node."""
    routes = machine.node.within
    used = {machine.node.links[i].kind for i in np.unique(routes[routes >= 0])}
    return "pcie" if used & set(_PCIE) else "nvlink"


def constants(machine: Machine, version: str = VERSION) -> Constants:
    """The constants for a machine. Raises MachineError for a version that is not known."""
    own, wire, node = of_version(version), data()["wire"], machine.node
    name, gpu = model(machine, version)
    reached = {kind: wire.get(kind, wire["node"]) for kind in machine.kinds}
    reached |= {kind: wire["net"] for kind in (NETWORK, UPLINK) if kind in reached}
    first = node.within[:, :, :1].reshape(node.devices, -1)
    if gpu and first.size:
        # All that leaves a device, where it has several wires.
        whole = max(sum(1 / node.links[i].beta for i in set(row.tolist()) - {-1}) for row in first)
        bus = gpu["channels"] * gpu["rate"] * GB
        for i in set(first.reshape(-1).tolist()) - {-1}:
            reached[node.links[i].kind] = min(1.0, bus / whole) if whole else 1.0
    return Constants(
        version=version,
        gpu=name,
        launch=(own["base"]["ring"][2] + data()["xla"]["launch"]) * US,
        near=own["hop"][link_class(machine)]["ring"][2] * US,
        far=own["hop"]["net"]["ring"][2] * US,
        reached=reached,
    )


def error(machine: Machine, devices: int) -> float:
    """How far the model is from posted logs, relative and median, on that many devices."""
    return ERROR["one node" if devices <= machine.node.devices else "several"]


def calibrated(machine: Machine, version: str = VERSION) -> int:
    """The number of devices up to which posted logs agree with the constants."""
    name, _ = model(machine, version)
    return max(log["devices"] for log in data()["log"] if log["gpu"] == name)
