"""``collc.pod``: a mesh of GPUs that are not there, to compile for.

XLA compiles for CUDA without a device if it is told what the GPU is like (a target) and which GPUs
NVLink connects (a topology). ``jax.jit(f).lower(...).compile()`` then works on such a mesh as on any
other, with XLA's own defaults, beside the devices that are there; nothing can be run on it.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from collc.analysis.mesh import MOST_RANKS, checked_axes, parse_mesh, show_mesh
from collc.errors import PodError
from collc.lowering import meshes
from collc.receipts.pods import target as targets
from collc.receipts.pods import toolchain
from collc.receipts.pods.target import Target


@dataclass(frozen=True, eq=False)
class Pod:
    """The hardware under a mesh that ``pod`` made.

    ``host_of`` and ``domain_of`` are int64[mesh.size]: the host and the NVLink domain of each of
    ``mesh.devices.flat``, both counted over the whole pod. Two GPUs of one domain talk over NVLink,
    of two domains over the network.
    """

    target: Target
    gpus: int  # of a host
    domain: int  # GPUs of an NVLink domain
    host_of: np.ndarray
    domain_of: np.ndarray

    @property
    def name(self) -> str:
        """The target's name."""
        return self.target.name

    @property
    def memory(self) -> int:
        """Bytes of device memory of one GPU."""
        return self.target.device_memory_size


def pod(
    target: str | os.PathLike[str],
    axes: Mapping[str, int] | None = None,
    *,
    hosts: int | None = None,
    gpus: int | None = None,
    domain: int | None = None,
    axis_types: AxisType | Sequence[AxisType] | None = None,
) -> Mesh:
    """A mesh of compile-only GPUs, in the order of hosts and then of the GPUs of a host.

    target      a name in the catalogue (a100, a100-40gb, h100, h200, b200, gb200-nvl72), or a TOML
                file with the fields of those in collc/receipts/pods/targets
    axes        names and sizes, outermost first; {"host": hosts, "gpu": gpus} unless given
    hosts       how many; without it as many as the axes fill, or one
    gpus        of each host; without it the target's number
    domain      GPUs that NVLink connects; without it the target's number, which for most is a host's
    axis_types  one for all axes or one for each, as in jax.sharding.Mesh; Auto unless given

    ``pod("h100", hosts=64, gpus=8)`` has axes host=64 and gpu=8, ``pod("gb200-nvl72",
    {"rack": 2, "gpu": 72})`` 36 hosts. Equal arguments give equal meshes. Raises PodError where
    sizes do not fit each other, for a target that does not exist or is not well formed, and where
    jax's CUDA plugin or ptxas is missing: ``pip install "collc[pods]"``; MeshError for ``axes`` and
    ``axis_types`` that are none.
    """
    if not isinstance(target, str | os.PathLike) or isinstance(target, bytes):
        raise PodError(f"a pod takes the name of a target or a file, not {target!r}")
    chosen = targets.find(target)
    shape = _shape(chosen, axes, hosts, gpus, domain)
    kinds = meshes.axis_types(axis_types, len(shape.axes))
    devices = _devices(chosen, shape.topology, shape.gpus, shape.domain)
    grid = np.array(devices, dtype=object).reshape(tuple(shape.axes.values()))
    return Mesh(grid, tuple(shape.axes), axis_types=kinds)


def parse_pod(
    text: str,
    mesh: str | None = None,
    *,
    domain: int | None = None,
    axis_types: AxisType | Sequence[AxisType] | None = None,
) -> Mesh:
    """The pod that a text names: TARGET:HOSTSxGPUS, then axes in parentheses unless host and gpu.

    ``h100:64x8``, ``h100:64x8(host=64,data=2,model=4)``, ``my/gpu.toml:4x2``. ``mesh`` gives the
    axes apart, as ``host=64,data=2,model=4``. Raises PodError as ``pod`` does, MeshError for axes.
    """
    # Bounded: long before int() would mind the length of a number.
    form = r"(?P<target>.+):(?P<hosts>[0-9]{1,9})x(?P<gpus>[0-9]{1,9})(?:\((?P<axes>[^()]*)\))?"
    found = re.fullmatch(form, text.strip(), re.ASCII)
    if not found:
        raise PodError(
            f"the pod {text!r}: not of the form TARGET:HOSTSxGPUS. Write it as h100:64x8, or as "
            "h100:64x8(host=64,data=2,model=4)."
        )
    if mesh is not None and found["axes"] is not None:
        raise PodError(
            f"the pod {text!r} names axes, and {mesh!r} does so again. Drop one of them."
        )
    named = found["axes"] if mesh is None else mesh
    return pod(
        found["target"],
        None if named is None else parse_mesh(named),
        hosts=int(found["hosts"]),
        gpus=int(found["gpus"]),
        domain=domain,
        axis_types=axis_types,
    )


def describe(mesh: Mesh) -> Pod | None:
    """The hardware under a mesh of devices of one ``pod``, in any order; None for other meshes."""
    devices = list(mesh.devices.flat)
    if any(device not in _PODS for device in devices):
        return None
    pods = {_PODS[device] for device in devices}
    if len(pods) > 1:
        return None
    ((target, _, gpus, domain),) = pods
    number = np.array([device.id for device in devices], dtype=np.int64)
    return Pod(target, gpus, domain, number // gpus, number // domain)


# ---- shapes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shape:
    axes: Mapping[str, int]
    gpus: int
    domain: int
    topology: str  # XLA's: domains x hosts of a domain x GPUs of such a host


def _shape(
    target: Target,
    axes: Mapping[str, int] | None,
    hosts: int | None,
    gpus: int | None,
    domain: int | None,
) -> _Shape:
    gpus = target.gpus_per_host if gpus is None else _positive("gpus", gpus)
    if axes is not None:
        axes = checked_axes(axes)
        if hosts is None:
            size = math.prod(axes.values())
            if size % gpus:
                raise PodError(
                    f"the axes {show_mesh(axes)} hold {size} GPUs, which do not fill hosts of {gpus} "
                    f"({target.name}). Give axes whose product is a multiple of {gpus}, or gpus=."
                )
            hosts = size // gpus
    hosts = 1 if hosts is None else _positive("hosts", hosts)
    axes = {"host": hosts, "gpu": gpus} if axes is None else axes
    total = hosts * gpus
    if math.prod(axes.values()) != total:
        raise PodError(
            f"the axes {show_mesh(axes)} hold {math.prod(axes.values())} GPUs, but {hosts} hosts with "
            f"{gpus} GPUs each have {total}. Their product has to be {total}."
        )
    if total > MOST_RANKS:
        raise PodError(f"{total:,} GPUs are more than the {MOST_RANKS:,} of the largest pod.")
    if domain is None and gpus > target.gpus_per_domain:
        raise PodError(
            f"hosts of {gpus} GPUs: NVLink connects {target.gpus_per_domain} of {target.name}. Are "
            f"hosts and gpus the wrong way round? If there are such hosts, say domain={gpus}."
        )
    if domain is None:
        # A host with another number of GPUs is another machine; a rack with another number of hosts
        # is a part of one.
        per_host = target.gpus_per_domain == target.gpus_per_host
        domain = gpus if per_host else min(target.gpus_per_domain, total)
    elif _positive("domain", domain) > total:
        raise PodError(
            f"domain={domain} is more than the {total} GPUs of the pod. Give at most {total}."
        )
    if total % domain or (domain % gpus and gpus % domain):
        raise PodError(
            f"{hosts} hosts with {gpus} GPUs each do not divide into NVLink domains of {domain} GPUs. "
            f"Give hosts and gpus that do, or domain=."
        )
    inner = (domain // gpus, gpus) if domain >= gpus else (1, domain)
    return _Shape(axes, gpus, domain, f"{total // domain}x{inner[0]}x{inner[1]}")


def _positive(what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise PodError(f"{what} has to be a positive integer, not {value!r}.")
    return int(value)


# ---- devices ------------------------------------------------------------------------------------

# Of each device: target, topology, GPUs of a host, GPUs of a domain. Compile-only devices live as long
# as the process, and `device.id` counts them within their pod.
_PODS: dict[Any, tuple[Target, str, int, int]] = {}


@cache
def _devices(target: Target, topology: str, gpus: int, domain: int) -> tuple[Any, ...]:
    toolchain.ready()
    try:
        with toolchain.without_gpu():
            described = topologies.get_topology_desc(
                platform="cuda", target_config=target.config(), topology=topology
            )
    except NotImplementedError as e:
        raise PodError(
            "jax has not taken up its CUDA plugin: when it was first used it looked for a GPU's "
            "libraries and found none. Set JAX_PLATFORMS=cpu, or make the pod before that."
        ) from e
    except jax.errors.JaxRuntimeError as e:
        raise PodError(f"XLA refuses the target {target.name}, {topology}: {e}") from e
    devices = tuple(described.devices)
    _PODS.update(dict.fromkeys(devices, (target, topology, gpus, domain)))
    return devices
