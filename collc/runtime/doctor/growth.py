"""Which counters of errors have grown while the links were swept: those are wrong now."""

from collc.runtime.doctor import network, pcie, rdma
from collc.runtime.doctor.counters import Counts, counted, more
from collc.runtime.doctor.finding import Finding, Level
from collc.runtime.doctor.host import Host

WHEN = "while the links were swept"


def counters(host: Host) -> dict[str, Counts]:
    """All counters of errors, by check."""
    return {
        rdma.CHECK: rdma.counts(host),
        network.CHECK: network.counts(host),
        pcie.CHECK: pcie.counts(host),
    }


def grown(host: Host, before: dict[str, Counts], sent: tuple[int, int] | None) -> list[Finding]:
    """Errors counted since ``before``, and a share of TCP segments sent again since ``sent``."""
    remedies = {rdma.CHECK: rdma.ERRORS, network.CHECK: network.ERRORS, pcie.CHECK: pcie.ERRORS}
    found = []
    for check, counts in counters(host).items():
        now = more(before.get(check, {}), counts)
        found += counted(check, now, remedies[check], f"more {WHEN}", Level.ERROR)
    after = network.segments(host)
    if sent and after:
        again = network.retransmitted(after[0] - sent[0], after[1] - sent[1], WHEN)
        found += [finding for finding in again if finding.level != Level.OK]
    return found
