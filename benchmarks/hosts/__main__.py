"""All-reduces and a train step on 4 hosts of 2 devices, joined by links of 1 Gb/s and of 200 Mb/s.

    python benchmarks/hosts            prints the report and writes it to reports/hosts.md
    python benchmarks/hosts --print    prints it only

The hosts are network namespaces of this machine, so it needs root. Every plan takes turns with XLA's
own psum over all devices, and what crosses each host's link is read from its interface.
"""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[1])  # so that this folder is the package hosts

import common  # noqa: E402

from hosts import namespaces, report  # noqa: E402
from hosts.network import Network  # noqa: E402

HOSTS, DEVICES = 4, 2
PORT = 5601  # of the coordinator, in a host of its own
RATES = {"1gbit": 1e9, "200mbit": 2e8}  # bits per second


def measure(turns: int) -> dict[str, list[dict[str, Any]]]:
    """What the process in each host found, by the rate of the links."""
    found = {}
    # The network is left first: it ends the processes, which are then waited for.
    with ExitStack() as started, Network(HOSTS, next(iter(RATES))) as network:
        workers = [started.enter_context(start(network, host, turns)) for host in network.hosts]
        for rate in RATES:
            for host in network.hosts:
                network.set_rate(host, rate)
            for worker in workers:
                assert worker.stdin
                print(rate, file=worker.stdin, flush=True)
            found[rate] = [answer(worker) for worker in workers]
            print(f"{rate} done", file=sys.stderr)
        for worker in workers:  # all at once: they wait for each other at the end
            assert worker.stdin
            worker.stdin.close()
        for worker in workers:
            worker.wait()
    return found


def start(network: Network, host: str, turns: int) -> subprocess.Popen[str]:
    """The process in a host, which measures when it is told to."""
    flags = (
        f"--xla_force_host_platform_device_count={DEVICES}",
        "--xla_cpu_collective_call_terminate_timeout_seconds=300",
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    )
    coordinator = f"{network.address(network.hosts[0])}:{PORT}"
    part = json.dumps([coordinator, HOSTS, network.hosts.index(host), turns])
    return subprocess.Popen(
        [*network.prefix(host), sys.executable, str(Path(__file__).parent), "--part", part],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def answer(worker: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line of JSON that it prints; gloo prints lines of its own."""
    assert worker.stdout
    for line in worker.stdout:
        if line.startswith("{"):
            return json.loads(line)
    sys.exit(f"hosts: a process ended with {worker.wait()} instead of an answer")


def main() -> None:
    given = common.parser(__doc__ or "", iterations=5).parse_args()
    if given.part:
        from hosts.worker import work

        work(*json.loads(given.part))
        return
    if why := namespaces.missing():
        sys.exit(f"hosts: {why}")
    lines = report.report(measure(given.iterations), RATES, given.iterations)
    common.publish("hosts", "Hosts on slow links", ["jax", "jaxlib", "flax"], lines)


if __name__ == "__main__":
    main()
