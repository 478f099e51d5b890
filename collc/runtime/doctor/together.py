"""A job's hosts together: their clocks, the order of their devices, their links, and all findings."""

import json
import time
from dataclasses import asdict
from typing import Any

import jax

from collc.errors import CollcError
from collc.planning.agree import distributed, meet
from collc.runtime.doctor.devices import Placed, order
from collc.runtime.doctor.examine import counters, grown
from collc.runtime.doctor.finding import Finding, Level, error, note
from collc.runtime.doctor.host import Host
from collc.runtime.doctor.names import apart
from collc.runtime.doctor.network import segments
from collc.runtime.doctor.sweep import ends, sweep
from collc.runtime.hosts import named
from collc.runtime.init import init

JOB = "all hosts"
Said = tuple[str, Finding]  # the host, and what was found there


def ask(
    host: Host, name: str, own: list[Finding], several: bool, links: bool, timeout_s: float
) -> list[Said]:
    """What was found on all hosts of the job, on every process. All of them have to call it.

    ``several``: this is one of several processes. Raises PlanError where one does not come.
    """
    whole: list[Finding] = []
    started = True
    if several:
        try:
            init(timeout_s=timeout_s)
        except CollcError as e:
            said = " ".join(str(e).split())
            if not distributed():
                whole = [error("job", said, "See the log of process 0, and its address.")]
                return [(name, finding) for finding in [*own, *whole]]
            remedy = "Do as it says, then run collc doctor again."
            whole.append(error("job", said, remedy))
            started = False  # on every process: unlike programs would wait for each other for ever
    machine = host.text("/proc/sys/kernel/random/boot_id") or name
    names = meet("say its host", json.dumps([name, machine]), timeout_s)
    hosts = named({process: tuple(json.loads(text)) for process, text in names.items()})
    times = meet("read its clock", repr(time.time()), timeout_s)
    whole += apart({hosts[p]: float(at) for p, at in times.items()})
    if started:
        devices: list[Any] = jax.devices()
        slices = [getattr(d, "slice_index", None) or 0 for d in devices]
        placed = [Placed(hosts[d.process_index], s) for d, s in zip(devices, slices, strict=True)]
        whole += order(placed, devices[0].platform)
        if links:
            before, sent = counters(host), segments(host)
            whole += sweep(ends(devices, hosts), timeout_s)
            own = [*own, *grown(host, before, sent)]
        else:
            whole.append(note("links", "not measured: --no-links"))
    everyone = meet("say its findings", json.dumps([asdict(finding) for finding in own]), timeout_s)
    found = [
        (hosts[p], read(row)) for p, text in sorted(everyone.items()) for row in json.loads(text)
    ]
    together = JOB if len(set(hosts.values())) > 1 else hosts[0]
    return list(dict.fromkeys([*found, *((together, finding) for finding in whole)]))


def read(row: dict[str, str]) -> Finding:
    """A finding from another process."""
    return Finding(row["check"], Level(row["level"]), row["found"], row["remedy"])
