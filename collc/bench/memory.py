"""Whether a sweep fits into memory, before it begins."""

import os
from contextlib import suppress
from pathlib import Path

import jax
from jax.sharding import Mesh

from collc.errors import DataError
from collc.machine.units import show_size

MEMINFO = Path("/proc/meminfo")
LIMIT, USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
BUFFERS = 5  # input, output, two on the way, and one to spare
CHECKED = 4  # on the host: the data, what is expected, what came back, the numbers it is made of


def fits(mesh: Mesh, size: int, inputs: int, check: bool) -> None:
    """Raises DataError where ``size`` bytes per rank are too many.

    ``inputs``: how many of them are alive at once beside the buffers of the call that runs.
    """
    count = mesh.devices.size
    device = mesh.devices.flat[0]
    on_device = size * (inputs + BUFFERS)
    on_host = size * CHECKED * count if check else 0
    if device.platform == "cpu":
        _enough(size, count, on_device * count + on_host, available(), "this machine has")
        return
    _enough(size, count, on_host, available(), "this machine has")
    limit = (device.memory_stats() or {}).get("bytes_limit")
    _enough(size, count, on_device, limit, "each device has", " on each")


def available() -> int | None:
    """Bytes that this process can still have, or None where the system does not say."""
    found: list[int] = []
    try:
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
        kib = {name: rest for name, _, rest in (line.partition(":") for line in lines)}
        found.append(int(kib["MemAvailable"].split()[0]) * 1024)
    except (OSError, ValueError, LookupError):
        with suppress(AttributeError, OSError, ValueError):
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(OSError, ValueError):  # a container's own limit; "max" where it has none
        found.append(int(LIMIT.read_text()) - int(USED.read_text()))
    return min(found) if found else None


def exhausted(error: Exception, size: int) -> DataError | None:
    """What to say where the devices ran out of memory after all; None for other errors."""
    if not isinstance(error, jax.errors.JaxRuntimeError) or "RESOURCE_EXHAUSTED" not in str(error):
        return None
    return DataError(
        f"the devices ran out of memory at {show_size(size)} bytes per rank. End below."
    )


def _enough(
    size: int, count: int, needed: int, limit: int | None, whose: str, each: str = ""
) -> None:
    if limit is not None and needed > limit:
        raise DataError(
            f"{show_size(size)} bytes on each of {count} devices take about {_gib(needed)}{each}, "
            f"and {whose} {_gib(limit)} left. End at a smaller size, or take a smaller mesh."
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
