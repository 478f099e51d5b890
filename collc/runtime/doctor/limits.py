"""What the system allows a process: shared memory, locked memory, open files."""

import math
import os
import re
from dataclasses import dataclass

from collc.machine import units
from collc.runtime.doctor.finding import Finding, count, listed, note, ok, warning
from collc.runtime.doctor.host import Host

SHARED = 1 << 30  # a container's 64 MiB are too few for NCCL between processes
FILES = 4096
LOCKED = 0.5  # of the host's memory: what is registered for RDMA is less than that


@dataclass(frozen=True)
class Limits:
    """Bytes of /dev/shm and of locked memory, and open files; None is unknown, -1 unlimited."""

    shared: int | None
    locked: int | None
    files: int | None
    memory: float = math.inf  # bytes that the host has


def limits(host: Host) -> Limits:
    """The limits of this process."""
    try:
        disk = os.statvfs(host.path("/dev/shm"))
        shared = disk.f_frsize * disk.f_blocks
    except (OSError, AttributeError):  # Windows has no statvfs
        shared = None
    total = re.search(r"^MemTotal: *(\d+) kB", host.text("/proc/meminfo") or "", re.M)
    memory = int(total[1]) * 1024 if total else math.inf
    try:
        import resource
    except ImportError:
        return Limits(shared, None, None, memory)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    unlimited = resource.RLIM_INFINITY
    return Limits(
        shared, -1 if locked == unlimited else locked, -1 if files == unlimited else files, memory
    )


def allowed(own: Limits, rdma: bool, several: bool) -> list[Finding]:
    """``rdma``: the host has RDMA devices. ``several``: the job has several processes."""
    check, found = "limits", []
    if own.shared is None:
        what = "/dev/shm is not there: NCCL exchanges through it between processes of a host"
        found.append(note(check, what, "Mount a tmpfs at /dev/shm."))
    elif own.shared < SHARED:
        what = f"/dev/shm has {own.shared >> 20} MiB; NCCL fails when it is full"
        remedy = (
            "docker run --shm-size=8g; in Kubernetes an emptyDir with medium: Memory at /dev/shm."
        )
        found.append(warning(check, what, remedy))
    if rdma and own.locked is not None and 0 <= own.locked < own.memory * LOCKED:
        what = (
            f"{units.size(own.locked)} of memory may be locked: RDMA needs as much as it sends from"
        )
        remedy = (
            "ulimit -l unlimited; in systemd LimitMEMLOCK=infinity; docker run --ulimit memlock=-1"
        )
        found.append(warning(check, what, remedy))
    if several and own.files is not None and 0 <= own.files < FILES:
        what = f"{count(own.files, 'file')} may be open: every process connects to every other"
        found.append(warning(check, what, "ulimit -n 65536; in systemd LimitNOFILE=65536"))
    if found:
        return found
    read = {"shared memory": own.shared, "locked memory": own.locked, "open files": own.files}
    there = [name for name, value in read.items() if value is not None]
    unread = [name for name, value in read.items() if value is None]
    rest = f"; not checked: {listed(unread)}" if unread else ""
    return [ok(check, f"enough {listed(there)}{rest}")]
