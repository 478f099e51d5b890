"""The hosts of a job, and the order of its devices: slice by slice, host by host."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import AxisType

from collc.analysis.mesh import show_mesh
from collc.errors import MeshError
from collc.planning.agree import host_name, meet
from collc.runtime.place import place

SHOWN = 8  # hosts of a kind, in a message


def host_of_each(timeout_s: float) -> dict[int, str]:
    """The host of each process of the job. All of them have to call it.

    Raises PlanError where one does not within this time.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        boot = ""
    # Hosts of `collc launch` are of one machine.
    mine = json.dumps([host_name(), "" if place() else boot])
    said = meet("say its host", mine, timeout_s)
    return named({process: tuple(json.loads(text)) for process, text in said.items()})


def named(said: Mapping[int, tuple[str, str]]) -> dict[int, str]:
    """The host of each process, from the name and the machine (its boot) that each said.

    Machines of one name, as ``localhost``, stay apart:

    >>> named({0: ("h0", "a"), 1: ("h0", "a"), 2: ("h1", "b")})
    {0: 'h0', 1: 'h0', 2: 'h1'}
    >>> named({0: ("localhost", "a"), 1: ("localhost", "b")})
    {0: 'localhost (process 0)', 1: 'localhost (process 1)'}
    """
    machines: dict[str, dict[str, int]] = {}  # by name, each with its first process
    for process, (name, machine) in sorted(said.items()):
        machines.setdefault(name, {}).setdefault(machine, process)
    return {
        process: name if len(machines[name]) == 1 else f"{name} (process {machines[name][machine]})"
        for process, (name, machine) in sorted(said.items())
    }


def by_host(devices: Sequence[Any], hosts: Mapping[int, str]) -> dict[str, list[Any]]:
    """The devices of each host, in the order of the mesh.

    By slice, where the platform has slices, then by host, process and device id. A host's place is
    that of its first process, so h10 does not come before h2. Raises MeshError for a host whose
    devices are in several slices.
    """
    first = {host: process for process, host in sorted(hosts.items(), reverse=True)}

    def place(device: Any) -> tuple[int, int, int, int]:
        process = device.process_index
        return _slice(device), first[hosts[process]], process, device.id

    found: dict[str, list[Any]] = {}
    for device in sorted(devices, key=place):
        found.setdefault(hosts[device.process_index], []).append(device)
    for host, own in found.items():
        slices = sorted({_slice(device) for device in own})
        if len(slices) > 1:
            raise MeshError(
                f"the devices of host {host} are in the slices {slices}, so no order of hosts keeps "
                "slices together. Give each host, or container, a name of its own."
            )
    return found


def grid(
    devices: Sequence[Any], hosts: Mapping[int, str], axes: Mapping[str, int] | None = None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The devices in the shape of the mesh, and the names of its axes; the last is the fastest.

    ``axes`` maps names to sizes; without it host and gpu, for which all hosts need equally many
    devices. Raises MeshError for hosts that differ, and for axes that the devices do not fill.
    """
    each = by_host(devices, hosts)
    if axes is None:
        axes = {"host": len(each), "gpu": _even(each)}
    if (size := math.prod(axes.values())) != len(devices):
        raise MeshError(
            f"the axes {show_mesh(axes)} need {size} devices, but the job has {len(devices)} "
            f"({_counts(each)}). Give sizes whose product is {len(devices)}."
        )
    flat = np.empty(len(devices), dtype=object)
    flat[:] = [device for own in each.values() for device in own]
    return flat.reshape(tuple(axes.values())), tuple(axes)


def asked(axes: Mapping[str, int] | None, axis_types: Sequence[AxisType]) -> dict[str, str]:
    """What processes that are to make one mesh have to ask for alike, in words.

    >>> asked({"data": 4, "model": 2}, [AxisType.Auto] * 2)
    {'axes': 'data=4,model=2', 'axis_types': 'Auto,Auto'}
    """
    names = "host and gpu" if axes is None else show_mesh(axes)
    return {"axes": names, "axis_types": ",".join(kind.name for kind in axis_types)}


def _even(each: Mapping[str, list[Any]]) -> int:
    counts = {len(own) for own in each.values()}
    if len(counts) > 1:
        raise MeshError(
            f"the hosts have different numbers of devices ({_counts(each)}), so they make no mesh of "
            "host and gpu. Give each the same number, leave the odd ones out, or say the shape of "
            "the mesh, as in collc.init(axes={'data': 6})."
        )
    return counts.pop()


def _counts(each: Mapping[str, list[Any]]) -> str:
    """The hosts by how many devices they have, the rarest first.

    >>> _counts({"h0": [0, 1], "h1": [2], "h2": [3, 4]})
    '1 on h1, 2 on h0, h2'
    """
    hosts: dict[int, list[str]] = {}
    for host, own in each.items():
        hosts.setdefault(len(own), []).append(host)
    parts = []
    for count, names in sorted(hosts.items(), key=lambda item: (len(item[1]), item[0])):
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        parts.append(f"{count} on {', '.join(names[:SHOWN])}{more}")
    return ", ".join(parts)


def _slice(device: Any) -> int:
    return getattr(device, "slice_index", None) or 0
