"""The order of a job's devices: host by host, whichever process and slice they belong to."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType

from collc.analysis.mesh import checked_axes, show_mesh
from collc.errors import MeshError


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
    axes = checked_axes(axes)
    if (size := math.prod(axes.values())) != len(devices):
        raise MeshError(
            f"the axes {show_mesh(axes)} need {size} devices, but the job has {len(devices)} "
            f"({_counts(each)}). Give sizes whose product is {len(devices)}."
        )
    flat = np.empty(len(devices), dtype=object)
    flat[:] = [device for own in each.values() for device in own]
    return flat.reshape(tuple(axes.values())), tuple(axes)


def shape(axes: Any, axis_types: Any) -> dict[str, str]:
    """What processes that are to make one mesh have to ask for alike, in words.

    >>> shape({"data": 4, "model": np.int64(2)}, None)
    {'axes': 'data=4,model=2', 'axis_types': 'Auto'}
    >>> shape(None, [AxisType.Auto, AxisType.Explicit])
    {'axes': 'host and gpu', 'axis_types': 'Auto,Explicit'}
    """
    asked = "host and gpu" if axes is None else repr(axes)
    if isinstance(axes, Mapping):
        asked = show_mesh(axes)
    each = axis_types if isinstance(axis_types, Sequence) else [axis_types or AxisType.Auto]
    words = [getattr(kind, "name", repr(kind)) for kind in each]
    if len(set(words)) == 1:  # as if it were given once
        words = words[:1]
    return {"axes": asked, "axis_types": ",".join(words)}


def _even(each: Mapping[str, list[Any]]) -> int:
    counts = {len(own) for own in each.values()}
    if len(counts) > 1:
        raise MeshError(
            f"the hosts have different numbers of devices ({_counts(each)}), so they make no mesh of "
            "host and gpu. Give each the same number, leave the odd ones out, or say the shape of "
            "the mesh, as in collc.init(axes={'data': 6})."
        )
    return counts.pop()


def _counts(each: Mapping[str, list[Any]], most: int = 8) -> str:
    """The hosts by how many devices they have, the rarest first.

    >>> _counts({"h0": [0, 1], "h1": [2], "h2": [3, 4]})
    '1 on h1, 2 on h0, h2'
    """
    hosts: dict[int, list[str]] = {}
    for host, own in each.items():
        hosts.setdefault(len(own), []).append(host)
    parts = []
    for count, names in sorted(hosts.items(), key=lambda item: (len(item[1]), item[0])):
        more = f" and {len(names) - most} more" if len(names) > most else ""
        parts.append(f"{count} on {', '.join(names[:most])}{more}")
    return ", ".join(parts)


def _slice(device: Any) -> int:
    return getattr(device, "slice_index", None) or 0
