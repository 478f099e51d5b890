"""A job's hosts together: their clocks, the order of their devices, their links, and all findings."""

import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import jax

from collc.planning.agree import distributed, meet
from collc.runtime.doctor import network, pcie, rdma
from collc.runtime.doctor.devices import Placed, order
from collc.runtime.doctor.finding import Finding, Level, Said, error, message, note
from collc.runtime.doctor.growth import counters, grown
from collc.runtime.doctor.host import Host
from collc.runtime.doctor.jobs import Job
from collc.runtime.doctor.names import apart
from collc.runtime.doctor.sweep import ends, sweep
from collc.runtime.hosts import host_of_each
from collc.runtime.init import init
from collc.runtime.patience import notice

JOB = "all hosts"
COUNTED = (rdma.CHECK, network.CHECK, network.TCP, pcie.CHECK)
LOOK = (
    "Look at the logs of the other processes; if they only took long, give --timeout more seconds."
)


@dataclass(frozen=True)
class Asked:
    """What was found. ``prints``: whether it is this process that has to say it."""

    found: tuple[Said, ...]
    prints: bool


@dataclass
class SoFar:
    """What is known of the job so far: a failure on the way loses nothing of it."""

    hosts: dict[int, str]
    found: list[Said]
    whole: list[Finding]

    def fails(self, problem: Exception, remedy: str = LOOK) -> None:
        self.whole.append(error("job", message(problem), remedy))


def ask(
    host: Host, name: str, own: list[Finding], job: Job | None, links: bool, timeout_s: float
) -> Asked:
    """What was found on all hosts of the job. All of its processes have to call it.

    ``job``: None for a process on its own. What fails on the way, here or at another process, is a
    finding too, and all that was found before it is kept.
    """
    so_far = SoFar({0: name}, [(name, finding) for finding in own], [])
    starts = job is None or _start(so_far, timeout_s)
    prints = True
    if job is None or distributed():
        try:
            so_far.hosts = host_of_each(timeout_s)
            times = meet("read its clock", repr(time.time()), timeout_s)
            so_far.whole += apart({so_far.hosts[p]: float(at) for p, at in times.items()})
            so_far.found = _all_of(so_far.hosts, own, timeout_s)  # before what may fail
            prints = jax.process_index() == 0
            if starts:
                across = job is not None and job.across
                _measure(so_far, host, links, across, timeout_s)
        except Exception as problem:  # of jax, gloo or another process: whatever it is, say it
            so_far.fails(problem)
    together = JOB if len(set(so_far.hosts.values())) > 1 else so_far.hosts[0]
    found = [*so_far.found, *((together, finding) for finding in so_far.whole)]
    return Asked(tuple(dict.fromkeys(found)), prints)


def _start(so_far: SoFar, timeout_s: float) -> bool:
    """Whether the job starts: where not, unlike programs would wait for each other for ever."""
    found = tuple(so_far.found)
    try:
        with notice(timeout_s, lambda: _aside(so_far.hosts[0], found)):
            init(timeout_s=timeout_s)
    except Exception as problem:
        met = distributed()
        remedy = "Do as it says, then run collc doctor again."
        so_far.fails(problem, remedy if met else "See the log of process 0, and its address.")
        return False
    return True


def _aside(name: str, found: tuple[Said, ...]) -> None:
    """Says on stderr what is amiss here: JAX ends this process if others never come."""
    amiss = [finding for _, finding in found if finding.level in (Level.WARNING, Level.ERROR)]
    lines = [f"  {f.level} {f.check}: {f.found.rstrip('.')}. {f.remedy}" for f in amiss]
    said = f"amiss on {name} so far:" if amiss else f"nothing is amiss on {name} so far"
    waits = f"collc doctor: waiting for the other processes; {said}"
    # In one call: print writes the end of the line on its own, and another thread between them.
    sys.stderr.write("".join(f"{line}\n" for line in (waits, *lines)))
    sys.stderr.flush()


def _measure(so_far: SoFar, host: Host, links: bool, across: bool, timeout_s: float) -> None:
    """The order of devices, the links, and the errors that were counted while those were busy."""
    devices: list[Any] = jax.devices()
    slices = [getattr(d, "slice_index", None) or 0 for d in devices]
    placed = [
        Placed(so_far.hosts[d.process_index], s) for d, s in zip(devices, slices, strict=True)
    ]
    so_far.whole += order(placed, devices[0].platform)
    if not links:
        remedy = "Leave --no-links out to have them measured."
        so_far.whole.append(note("links", "not measured: --no-links", remedy))
        return
    before, sent = counters(host), network.segments(host)
    so_far.whole += sweep(ends(devices, so_far.hosts, across), timeout_s)
    so_far.found += _all_of(so_far.hosts, grown(host, before, sent), timeout_s)


def _all_of(hosts: dict[int, str], own: list[Finding], timeout_s: float) -> list[Said]:
    """The findings of all processes. Counters are a host's, so one process of each tells of them."""
    first = {host: process for process, host in sorted(hosts.items(), reverse=True)}
    said = meet("say its findings", json.dumps([asdict(finding) for finding in own]), timeout_s)
    return [
        (hosts[process], Finding(**row | {"level": Level(row["level"])}))
        for process, text in sorted(said.items())
        for row in json.loads(text)
        if process == first[hosts[process]] or row["check"] not in COUNTED
    ]
