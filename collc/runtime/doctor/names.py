"""This host's own name, and its clock."""

import ctypes
import sys
from collections.abc import Mapping, Sequence
from statistics import median_low

from collc.runtime.addresses import is_loopback, resolved
from collc.runtime.doctor.finding import Finding, error, listed, note, ok, warning
from collc.runtime.doctor.host import Host

UNSYNCHRONIZED = 5  # what adjtimex returns then (TIME_ERROR)
SYNCHRONIZED = "/run/systemd/timesync/synchronized"
APART_S = 1.0


def addresses(name: str) -> tuple[str, ...]:
    """What the name resolves to; nothing if it does not."""
    try:
        found = resolved(name)
    except OSError:
        return ()
    return tuple(dict.fromkeys(address.partition("%")[0] for address in found))


def own_name(name: str, found: Sequence[str], across: bool, leads: bool = False) -> list[Finding]:
    """Where gloo listens that jax starts by itself, and the coordinator: at what its own name means.

    ``across``: the job is on several machines. ``leads``: the others look for this one by its name.
    """
    check = "host name"
    remedy = (
        f"Write the address that other hosts reach, as in '10.0.0.5 {name}', into /etc/hosts, and take "
        f"{name} out of the line of 127.0.0.1 or 127.0.1.1."
    )
    if not found:
        what = f"{name} does not resolve to an address"
        return [error(check, what, remedy) if across else note(check, what, remedy)]
    shown = f"{name} resolves to {listed(found)}"
    back = [address for address in found if is_loopback(address)]
    if back and leads:
        what = f"{shown}, and the coordinator listens there: other hosts do not reach it"
        return [error(check, what, remedy)]
    if back and across:
        what = (
            f"{shown}: other hosts do not reach the gloo of jax.distributed.initialize there; "
            "collc.init listens where it reaches the coordinator"
        )
        return [warning(check, what, remedy)]
    if back:
        return [ok(check, f"{shown}, which is enough for one host")]
    return [ok(check, shown)]


def kernel_clock() -> bool | None:
    """Whether the kernel's clock is kept by NTP; None where the system does not say (adjtimex)."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return None
    state = adjtimex(ctypes.create_string_buffer(512))  # zeros: it reads only
    return None if state < 0 else state != UNSYNCHRONIZED


def clock(host: Host, kernel: bool | None, across: bool) -> list[Finding]:
    """Whether something keeps this host's clock. ``across``: the job is on several machines."""
    check = "clock"
    if kernel or host.path(SYNCHRONIZED).exists():
        return [ok(check, "kept by NTP")]
    if kernel is None:
        what = "the system does not say whether its clock is kept, so it was not checked"
        return [note(check, what, "Ask its NTP: chronyc tracking, or timedatectl.")]
    remedy = "systemctl enable --now chrony (or systemd-timesyncd); in a container, on its host."
    what = "nothing keeps this host's clock (NTP): it runs away from those of others"
    return [warning(check, what, remedy) if across else note(check, what, remedy)]


def apart(times: Mapping[str, float]) -> list[Finding]:
    """Clocks of hosts, read at about the same time, in seconds."""
    check = "clocks"
    if len(times) < 2:
        return []
    spread = max(times.values()) - min(times.values())
    if spread <= APART_S:
        return [ok(check, f"within {max(spread, 0.001):.3f} s of each other on {len(times)} hosts")]
    middle = median_low(times.values())
    off = {host: at - middle for host, at in times.items()}
    far = [f"{host} by {delta:+.1f} s" for host, delta in off.items() if abs(delta) > APART_S / 2]
    few = len(far) <= (len(times) - 1) // 2  # more agree than differ, so those are to blame
    who = (
        f"differ from the others: {listed(far)}"
        if few
        else f"are {spread:.1f} s apart: {listed(tuple(times))}"
    )
    remedy = "Start chrony on these hosts: chronyc makestep, chronyc tracking."
    return [warning(check, f"clocks {who}", remedy)]
