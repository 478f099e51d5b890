"""All checks of one host: the facts that they need, and what they find."""

import importlib.util
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from collc.runtime.doctor import flags, limits, names, network, pcie, rdma, versions
from collc.runtime.doctor.devices import Probe, devices, probe, visible_gpus
from collc.runtime.doctor.finding import Finding, note
from collc.runtime.doctor.host import Host
from collc.runtime.doctor.jobs import job, scheduler
from collc.runtime.doctor.nccl import nccl
from collc.runtime.doctor.settings import settings

Counters = dict[str, rdma.Counts]


@dataclass(frozen=True)
class Facts:
    """What is not in files and variables. ``known``: XLA's flags, asked for where one is unknown."""

    python: tuple[int, int]
    packages: Mapping[str, str]
    probe: Probe
    name: str
    addresses: tuple[str, ...]
    clock: bool | None
    limits: limits.Limits
    kubernetes: bool = False
    known: tuple[str, ...] = ()


def facts(host: Host, timeout_s: float) -> Facts:
    """Asks the system, and jax in another process."""
    name = socket.gethostname()
    found = probe(host.environment, timeout_s)
    return Facts(
        (sys.version_info.major, sys.version_info.minor),
        installed(),
        found,
        name,
        names.addresses(name),
        names.kernel_clock(),
        limits.limits(host),
        importlib.util.find_spec("kubernetes") is not None,
        flags.known_flags() if found.unknown else (),
    )


def installed() -> dict[str, str]:
    """The versions of the packages that matter, of those that are there."""
    found = {}
    for name in versions.PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def examine(host: Host, own: Facts) -> list[Finding]:
    """What all checks of one host find, from devices to counters."""
    of = job(host.environment)
    across, several = of is not None and of.across, of is not None
    leads = of is not None and of.leads
    on_gpus = own.probe.platform in ("gpu", "cuda")
    driver = versions.driver_version(host)
    rdma_there = bool(host.entries(rdma.ROOT))
    return [
        *devices(host, own.probe, own.packages),
        *versions.python(own.python),
        *versions.packages(own.packages),
        *versions.driver(driver, own.packages, on_gpus),
        *flags.xla(host, own.probe.platform, own.probe.unknown, own.probe.malformed, own.known),
        *settings(host.environment),
        *nccl(host),
        *scheduler(host.environment, of, visible_gpus(host), own.kubernetes),
        *names.own_name(own.name, own.addresses, across, leads),
        *names.clock(host, own.clock, across),
        *limits.allowed(own.limits, rdma_there, several),
        *rdma.rdma(host),
        *network.tcp(host),
        *network.interfaces(host),
        *pcie.pcie(host),
        *_absent(host),
    ]


def counters(host: Host) -> Counters:
    """All counters of errors, by check."""
    return {
        rdma.CHECK: rdma.counts(host),
        "interfaces": network.counts(host),
        pcie.CHECK: pcie.counts(host),
    }


def grown(host: Host, before: Counters, sent: tuple[int, int] | None) -> list[Finding]:
    """Errors counted since ``before``, while the links were swept: those are there now."""
    found, after = [], counters(host)
    remedies = {rdma.CHECK: rdma.ERRORS, "interfaces": network.ERRORS, pcie.CHECK: pcie.ERRORS}
    for check, counts in after.items():
        more = rdma.grown(before.get(check, {}), counts)
        when = "more while the links were swept"
        found += rdma.counted(check, more, remedies[check], when, worse=True)
    now = network.segments(host)
    if sent and now:
        more = network.retransmitted(
            now[0] - sent[0], now[1] - sent[1], "while the links were swept"
        )
        found += [finding for finding in more if finding.remedy]
    return found


def _absent(host: Host) -> list[Finding]:
    """One line on counters that are not there: nothing is known of those."""
    absent = []
    if not host.entries(rdma.ROOT):
        absent.append(f"RDMA ({rdma.ROOT})")
    if network.segments(host) is None:
        absent.append("TCP (/proc/net/snmp)")
    if not any(network.counts(host).values()):
        absent.append(f"interfaces ({network.NET})")
    if not any(pcie.counts(host).values()):
        absent.append("PCIe errors of GPUs and network cards (aer_dev_*)")
    return [note("absent", f"not there, so not checked: {', '.join(absent)}")] if absent else []
