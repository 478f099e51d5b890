"""TCP and the network interfaces: what they have lost, and how fast they are."""

import re

from collc.runtime.doctor.counters import Counts, counted
from collc.runtime.doctor.finding import Finding, count, listed, note, ok, warning
from collc.runtime.doctor.host import Host
from collc.runtime.doctor.nccl import selected, variables

CHECK, TCP, NET = "interfaces", "TCP", "/sys/class/net"
RETRANSMITTED, DROPPED, OVERFLOWS = 0.01, 0.001, 0.001  # shares from which on it is worth a warning
ENOUGH = 10_000  # segments or packets below which a share says nothing

CABLE = "See its cable, transceiver and switch port: ethtool -S INTERFACE names what was lost."
RINGS = "ethtool -G INTERFACE rx 4096 for larger rings; ethtool -S INTERFACE names what was lost."
ERRORS = {
    **dict.fromkeys(
        ("rx_errors", "tx_errors", "rx_crc_errors", "rx_frame_errors", "tx_carrier_errors"), CABLE
    ),
    **dict.fromkeys(("rx_fifo_errors", "rx_over_errors"), RINGS),
}
# The kernel counts apart from rx_dropped what found no room in the card's rings.
DROPS = {"rx": ("rx_dropped", "rx_missed_errors"), "tx": ("tx_dropped",)}


def segments(host: Host) -> tuple[int, int] | None:
    """TCP segments sent, and how many of them again, since boot."""
    own = _table(host, "/proc/net/snmp", "Tcp:")
    return (
        (own["OutSegs"], own["RetransSegs"]) if {"OutSegs", "RetransSegs"} <= own.keys() else None
    )


def tcp(host: Host) -> list[Finding]:
    """TCP since boot: retransmitted segments, connections that found no room."""
    sent = segments(host)
    found = [] if sent is None else retransmitted(*sent, "since boot")
    overflows = _table(host, "/proc/net/netstat", "TcpExt:").get("ListenOverflows", 0)
    if overflows > OVERFLOWS * _table(host, "/proc/net/snmp", "Tcp:").get("PassiveOpens", 0):
        what = (
            f"{count(overflows, 'connection')} found a listener's queue full since boot "
            "(ListenOverflows)"
        )
        remedy = "sysctl -w net.core.somaxconn=4096: many processes reach the coordinator at once."
        found.append(warning(TCP, what, remedy))
    return found


def retransmitted(sent: int, again: int, when: str) -> list[Finding]:
    """What the share of segments that had to be sent again says."""
    share = again / sent if sent else 0.0
    what = f"{share:.2%} of {count(sent, 'segment')} were sent again {when}"
    if share > RETRANSMITTED and sent >= ENOUGH:
        remedy = (
            "Look for lost packets: ethtool -S, the switch's drops, ping -s 8972 -M do for the MTU."
        )
        return [warning(TCP, what, remedy)]
    return [ok(TCP, what)]


def counts(host: Host) -> Counts:
    """The counters of errors that are there, by interface."""
    found = {}
    for name in _interfaces(host):
        every = host.numbers(f"{NET}/{name}/statistics")
        found[name] = {counter: n for counter, n in every.items() if counter in ERRORS}
    return found


def interfaces(host: Host) -> list[Finding]:
    """Errors, drops, state and speed of the interfaces, but for loopback."""
    names, errors = _interfaces(host), counts(host)
    found = counted(CHECK, errors, ERRORS, "since it came up")
    for name in names:
        found += _drops(host, name)
    filters = variables(host).get("NCCL_SOCKET_IFNAME")
    chosen = selected(filters, names) if filters else []
    for name in chosen:
        if host.text(f"{NET}/{name}/operstate") == "down":
            what = f"{name}, which NCCL_SOCKET_IFNAME chooses, is down"
            found.append(
                warning(CHECK, what, f"ip link set {name} up, or choose another interface.")
            )
    for name in names:
        if host.text(f"{NET}/{name}/duplex") == "half":
            what = f"{name} runs in half duplex"
            found.append(
                warning(CHECK, what, f"ethtool -s {name} autoneg on; see its switch port.")
            )
    found += _speeds(host, chosen, names)
    read = [name for name, own in errors.items() if own]
    if read and not found:
        bare = [name for name in names if name not in read]
        rest = f"; no counters at {listed(bare)}" if bare else ""
        found.append(ok(CHECK, f"{listed(read)}: no errors counted{rest}"))
    return found


def _interfaces(host: Host) -> list[str]:
    return [name for name in host.entries(NET) if name != "lo" and host.entries(f"{NET}/{name}")]


def _drops(host: Host, name: str) -> list[Finding]:
    own, found = host.numbers(f"{NET}/{name}/statistics"), []
    for way, names in DROPS.items():
        dropped = sum(own.get(counter, 0) for counter in names)
        packets = own.get(f"{way}_packets", 0)
        if packets >= ENOUGH and dropped > DROPPED * packets:
            what = f"{name} has dropped {dropped:,} of {packets:,} packets ({way})"
            remedy = f"ethtool -G {name} {way} 4096 for larger rings; see who sends too fast."
            found.append(warning(CHECK, what, remedy))
    return found


def _speeds(host: Host, chosen: list[str], names: list[str]) -> list[Finding]:
    """Interfaces of different speeds: NCCL uses all that it is given."""
    speeds: dict[int, list[str]] = {}
    for name in chosen or names:
        speed = host.number(f"{NET}/{name}/speed")
        if speed and speed > 0 and host.text(f"{NET}/{name}/operstate") == "up":
            speeds.setdefault(speed, []).append(name)
    if len(speeds) < 2:
        return []
    shown = "; ".join(f"{speed:,} Mb/s: {listed(at)}" for speed, at in sorted(speeds.items()))
    remedy = f"Choose equal ones: NCCL_SOCKET_IFNAME={','.join(speeds[max(speeds)])}"
    if chosen:
        return [warning(CHECK, f"NCCL_SOCKET_IFNAME chooses unequal interfaces: {shown}", remedy)]
    return [note(CHECK, f"interfaces of different speeds: {shown}", remedy)]


def _table(host: Host, file: str, name: str) -> dict[str, int]:
    """Two lines that begin with ``name``: the fields, and their values."""
    rows = [
        line.split()[1:] for line in (host.text(file) or "").splitlines() if line.startswith(name)
    ]
    if len(rows) != 2 or len(rows[0]) != len(rows[1]):
        return {}
    return {
        field: int(value)
        for field, value in zip(*rows, strict=True)
        if re.fullmatch(r"[0-9]{1,20}", value)
    }
