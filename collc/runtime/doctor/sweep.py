"""The sweep of links: one payload over each, by jax's own ppermute, as training sends it."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from collc.planning.agree import meet
from collc.runtime.doctor.finding import Finding
from collc.runtime.doctor.links import Link, judge, rounds, suspects, usual

SMALLEST, TIMES, LARGEST = 1 << 20, 8, {"cpu": 8 << 20}  # bytes
QUICK_S = 2e-3  # a link that takes less is measured with more bytes: latency says little of it
TURNS = 5


@dataclass(frozen=True)
class Ends:
    """Between whom links are: a device for each host, or all devices where there is one host."""

    names: tuple[str, ...]
    devices: tuple[Any, ...]
    kind: str


def ends(devices: Sequence[Any], hosts: Mapping[int, str]) -> Ends:
    """The first device of each host; of a single host all devices. ``hosts`` by process."""
    first: dict[str, Any] = {}
    for device in devices:
        first.setdefault(hosts[device.process_index], device)
    if len(first) > 1:
        return Ends(tuple(first), tuple(first.values()), "host")
    return Ends(tuple(f"device {d.id}" for d in devices), tuple(devices), "device")


def sweep(between: Ends, timeout_s: float) -> list[Finding]:
    """Measures all links and judges them. All processes of the job have to call it.

    A link is slow only if it was so twice.
    """
    largest = LARGEST.get(between.devices[0].platform, 64 << 20)
    size, seconds = SMALLEST, measured(between, SMALLEST, timeout_s)
    while seconds and usual(seconds) < QUICK_S and size < largest:
        size *= TIMES
        seconds = measured(between, size, timeout_s)
    if suspects(seconds):
        again = measured(between, size, timeout_s)
        seconds = {link: min(taken, again[link]) for link, taken in seconds.items()}
    return judge(seconds, size, between.kind)


def measured(between: Ends, size: int, timeout_s: float) -> dict[Link, float]:
    """Seconds of each link for ``size`` bytes, on every process: as its receiver has seen it."""
    mine = {}
    if any(device.process_index == jax.process_index() for device in between.devices):
        mine = _mine(between, size)
    said = meet(
        "measure links", json.dumps([[*link, taken] for link, taken in mine.items()]), timeout_s
    )
    rows = [row for _, text in sorted(said.items()) for row in json.loads(text)]
    return {(a, b): taken for a, b, taken in rows}


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
