"""The sweep of links: one payload over each, by jax's own ppermute, as training sends it."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from statistics import median
from threading import Thread
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from collc.planning.agree import meet
from collc.runtime import ending
from collc.runtime.doctor.finding import Finding, error, listed, message
from collc.runtime.doctor.links import CHECK, Link, judge, rounds, suspects, usual

SMALLEST, TIMES, LARGEST = 1 << 20, 8, {"cpu": 8 << 20}  # bytes
QUICK_S = 2e-3  # a link that takes less is measured with more bytes: latency says little of it
TURNS = 5
MARGIN_S = 15.0  # by which processes may be apart when the time is over
BROKEN = (
    "The processes named, or a link between their hosts, do not answer: see their logs, ping and "
    "ss -t there, and firewalls; if they only took long, give --timeout more seconds."
)
left_behind: list[Thread] = []  # threads that still wait for a link


class Broken(Exception):
    """Links that could not be measured."""


@dataclass(frozen=True)
class Ends:
    """Between whom links are: a device for each host, or all devices where there is one host.

    ``shared``: there is no network and no GPU between them, only one machine's memory and cores.
    """

    names: tuple[str, ...]
    devices: tuple[Any, ...]
    kind: str
    shared: bool = False


def ends(devices: Sequence[Any], hosts: Mapping[int, str], across: bool) -> Ends:
    """The first device of each host; of a single host all devices.

    ``hosts`` by process. ``across``: those are on several machines.
    """
    first: dict[str, Any] = {}
    for device in devices:
        first.setdefault(hosts[device.process_index], device)
    if len(first) > 1:
        return Ends(tuple(first), tuple(first.values()), "host", shared=not across)
    shared = devices[0].platform == "cpu"
    return Ends(tuple(f"device {d.id}" for d in devices), tuple(devices), "device", shared)


def sweep(between: Ends, timeout_s: float) -> list[Finding]:
    """Measures all links and judges them. All processes of the job have to call it.

    A link is slow only if it was so twice. Links that fail, or take more than ``timeout_s`` seconds
    altogether, are one finding.
    """
    largest = LARGEST.get(between.devices[0].platform, 64 << 20)
    end = time.monotonic() + timeout_s
    try:
        size, seconds = SMALLEST, measured(between, SMALLEST, end)
        while seconds and usual(seconds) < QUICK_S and size < largest:
            size *= TIMES
            seconds = measured(between, size, end)
        if suspects(seconds) and not between.shared:
            again = measured(between, size, end)
            seconds = {link: min(taken, again[link]) for link, taken in seconds.items()}
    except Broken as broken:
        return [error(CHECK, f"not measured: {broken}", BROKEN)]
    return judge(seconds, size, between.kind, between.shared)


def measured(between: Ends, size: int, end: float) -> dict[Link, float]:
    """Seconds of each link for ``size`` bytes, on every process: as its receiver has seen it.

    Until ``end`` of the monotonic clock. Raises Broken, on every process, where one has failed.
    """
    mine, broken = {}, ""
    if any(device.process_index == jax.process_index() for device in between.devices):
        try:
            mine = in_time(lambda: _mine(between, size), end - time.monotonic())
        except Broken as late:
            broken = str(late)
        except Exception as problem:  # of jax or gloo; the others wait to hear of it
            broken = message(problem)
    own = {"links": [[*link, taken] for link, taken in mine.items()], "broken": broken}
    left = max(end - time.monotonic(), 0.0) + MARGIN_S
    said = {p: json.loads(text) for p, text in meet("measure links", json.dumps(own), left).items()}
    worst = [
        f"process {process}: {other['broken']}"
        for process, other in sorted(said.items())
        if other["broken"]
    ]
    if worst:
        raise Broken(listed(worst, most=2))
    return {(a, b): taken for other in said.values() for a, b, taken in other["links"]}


def in_time(work: Callable[[], dict[Link, float]], seconds: float) -> dict[Link, float]:
    """The result of ``work``; raises what it raises, Broken where it takes longer.

    A collective cannot be broken off: its thread, in ``left_behind``, stays where it hangs.
    """
    done: Future[dict[Link, float]] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as problem:
            done.set_exception(problem)

    thread = Thread(target=run, name=f"{ending.OWN}links", daemon=True)
    thread.start()
    try:
        return done.result(max(seconds, 0.0))
    except TimeoutError:
        if done.done():
            raise
        left_behind.append(thread)
        raise Broken("not done in the time of --timeout") from None


def _mine(between: Ends, size: int) -> dict[Link, float]:
    """Seconds of the links that end at this process's devices."""
    n, me = len(between.devices), jax.process_index()
    mesh = Mesh(np.array(between.devices), ("end",))
    spec = PartitionSpec("end")
    whole = NamedSharding(mesh, spec)
    payload, token = (
        jax.jit(lambda m=m: jnp.ones((n, m), jnp.float32), out_shardings=whole)()
        for m in (size // 4, 1)
    )

    def program(body: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return jax.jit(
            jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        )

    wait = program(lambda x: jax.lax.psum(x, "end"))
    found = {}
    # Hosts' links are apart from each other; those of one host's devices may not be.
    for pairs in rounds(n, together=between.kind == "host"):
        for links in (pairs, [(b, a) for a, b in pairs]):
            send = program(lambda x, links=links: jax.lax.ppermute(x, "end", links))
            jax.block_until_ready(send(payload))
            times = []
            for _ in range(TURNS):
                jax.block_until_ready(wait(token))
                start = time.perf_counter()
                jax.block_until_ready(send(payload))
                times.append(time.perf_counter() - start)
            for a, b in links:
                if between.devices[b].process_index == me:
                    found[between.names[a], between.names[b]] = median(times)
    return found
