"""RDMA ports: their state, their rate, and what their counters say of cables and switches."""

from collc.runtime.doctor.counters import Counts, counted
from collc.runtime.doctor.finding import Finding, count, listed, note, ok, short, warning
from collc.runtime.doctor.host import Host
from collc.runtime.doctor.nccl import selected, variables

CHECK, ROOT = "RDMA", "/sys/class/infiniband"

CABLE = "Reseat or change the cable and transceiver of that port; see the switch's side of it too."
LOST = "See the switch for lost packets; on RoCE, that PFC or ECN is on, and the MTU equal, everywhere."
FULL = "The network is congested: see the switch's buffers, ECN, and who else sends there."
PARTITION = "See the partition keys: opensm's partitions.conf, the port's pkeys/, NCCL_IB_PKEY."
MANAGED = "See the subnet manager's log, and which tools query the fabric so often."
PROGRAM = "NCCL logs a failed completion with its status (NCCL WARN): look there for the peer."
# What each counter of counters/ and hw_counters/ points to. Others are traffic, or benign:
# port_rcv_switch_relay_errors (a switch may well not forward), *_cqe_flush_error (see FLUSHED).
ERRORS = {
    **dict.fromkeys(
        (
            "symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors",
            "local_link_integrity_errors", "port_rcv_remote_physical_errors",
        ), CABLE),
    **dict.fromkeys(
        (
            "out_of_sequence", "packet_seq_err", "implied_nak_seq_err", "local_ack_timeout_err",
            "rnr_nak_retry_err", "req_transport_retries_exceeded", "rx_icrc_encapsulated",
            "roce_adp_retrans", "roce_adp_retrans_to",
        ), LOST),
    **dict.fromkeys(
        (
            "port_xmit_discards", "excessive_buffer_overrun_errors", "out_of_buffer",
            "roce_slow_restart",
        ), FULL),
    **dict.fromkeys(("port_xmit_constraint_errors", "port_rcv_constraint_errors"), PARTITION),
    "VL15_dropped": MANAGED,
    **dict.fromkeys(
        (
            "req_cqe_error", "resp_cqe_error", "resp_local_length_error",
            "req_remote_invalid_request", "req_remote_access_errors", "resp_remote_access_errors",
        ), PROGRAM),
}  # fmt: skip
# Completions that failed hold those flushed when a program ends, which are counted once more.
FLUSHED = {f"{end}_cqe_error": f"{end}_cqe_flush_error" for end in ("req", "resp")}


def ports(host: Host) -> list[tuple[str, str]]:
    """(what it is called, its folder) of each port."""
    return [
        (f"{device} port {port}", f"{ROOT}/{device}/ports/{port}")
        for device in host.entries(ROOT)
        for port in host.entries(f"{ROOT}/{device}/ports")
    ]


def counts(host: Host) -> Counts:
    """The counters of errors that are there, by port."""
    found = {}
    for place, folder in ports(host):
        every = host.numbers(f"{folder}/counters") | host.numbers(f"{folder}/hw_counters")
        found[place] = {
            name: n - every.get(FLUSHED.get(name, ""), 0)
            for name, n in every.items()
            if name in ERRORS
        }
    return found


def rdma(host: Host) -> list[Finding]:
    """State, rates and counters of the ports; nothing where there is no RDMA."""
    found = [f for place, folder in ports(host) for f in _state(host, place, folder)]
    found += _rates(host)
    errors = counts(host)
    found += counted(CHECK, errors, ERRORS, "since its driver was loaded")
    if errors and not found:
        bare = [place for place, own in errors.items() if not own]
        read = count(sum(map(len, errors.values())), "counter")
        rest = f"; no counters at {listed(bare)}" if bare else f", no errors in {read}"
        found.append(ok(CHECK, f"{count(len(errors), 'active port')}{rest}"))
    return found


def _state(host: Host, place: str, folder: str) -> list[Finding]:
    state = host.text(f"{folder}/state")
    if not state:
        remedy = "Look with ibstat; in a container, mount /sys of the host."
        return [note(CHECK, f"{place} does not say its state, so it was not checked", remedy)]
    if state.endswith("ACTIVE"):
        return []
    physical = short(host.text(f"{folder}/phys_state") or "not said")
    what = f"{place} is in state {short(state)} (physical: {physical})"
    if state.endswith("INIT"):
        return [
            warning(
                CHECK, what, "No subnet manager has set it up: start opensm, or see the switch."
            )
        ]
    remedy = "Plug in its cable, or leave it out: NCCL_IB_HCA=^DEVICE."
    return [warning(CHECK, what, remedy)]


def _rates(host: Host) -> list[Finding]:
    """Active ports that NCCL would use, of different rates."""
    devices = host.entries(ROOT)
    filters = variables(host).get("NCCL_IB_HCA")
    used = set(selected(filters, devices) if filters else devices)
    rates: dict[str, list[str]] = {}
    for place, folder in ports(host):
        rate = host.text(f"{folder}/rate")
        if (
            rate
            and place.split()[0] in used
            and (host.text(f"{folder}/state") or "").endswith("ACTIVE")
        ):
            rates.setdefault(rate, []).append(place)
    if len(rates) < 2:
        return []
    shown = "; ".join(f"{short(rate)} at {listed(places)}" for rate, places in rates.items())
    remedy = "See the slower ones' cable and switch port, or choose equal ones with NCCL_IB_HCA."
    return [warning(CHECK, f"ports have different rates: {shown}", remedy)]
