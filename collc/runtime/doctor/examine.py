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
from collc.runtime.doctor.jobs import read_job, scheduler
from collc.runtime.doctor.nccl import nccl
from collc.runtime.doctor.settings import settings


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


def gathered(host: Host, timeout_s: float) -> Facts:
    """Asks the system, and jax in another process."""
    name = socket.gethostname()
    found = probe(host.environment, timeout_s)
    return Facts(
        python=(sys.version_info.major, sys.version_info.minor),
        packages=installed(),
        probe=found,
        name=name,
        addresses=names.addresses(name),
        clock=names.kernel_clock(),
        limits=limits.limits(host),
        kubernetes=importlib.util.find_spec("kubernetes") is not None,
        known=flags.library_flags() if found.unknown else (),
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
    job, unclear = read_job(host.environment)
    across, several = job is not None and job.across, job is not None
    leads = job is not None and job.leads
    on_gpus = own.probe.platform in ("gpu", "cuda")
    driver = versions.driver_version(host)
    rdma_there = bool(host.entries(rdma.ROOT))
    return [
        *devices(host, own.probe, own.packages),
        *versions.python(own.python),
        *versions.packages(own.packages),
        *versions.driver(driver, own.packages, on_gpus),
        *flags.xla(host, own.probe, own.known),
        *settings(host.environment),
        *nccl(host),
        *unclear,
        *scheduler(host.environment, job, visible_gpus(host), own.kubernetes),
        *names.own_name(own.name, own.addresses, across, leads),
        *names.clock(host, own.clock, across),
        *limits.allowed(own.limits, rdma_there, several),
        *rdma.rdma(host),
        *network.tcp(host),
        *network.interfaces(host),
        *pcie.pcie(host),
        *_absent(host),
    ]


def _absent(host: Host) -> list[Finding]:
    """One line on counters that are not there: nothing is known of those."""
    absent = []
    if not host.entries(rdma.ROOT):
        absent.append(f"RDMA ({rdma.ROOT})")
    if visible_gpus(host) and versions.driver_version(host) is None:
        absent.append("NVIDIA's driver (/proc/driver/nvidia/version)")
    if network.segments(host) is None:
        absent.append("TCP (/proc/net/snmp)")
    if not any(network.counts(host).values()):
        absent.append(f"interfaces ({network.NET})")
    if not any(pcie.counts(host).values()):
        absent.append("PCIe errors of GPUs and network cards (aer_dev_*)")
    if not absent:
        return []
    remedy = "In a container, mount /sys and use the host's network; else there is nothing to do."
    return [note("absent", f"not there, so not checked: {', '.join(absent)}", remedy)]
