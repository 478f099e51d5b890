"""`collc doctor` as a command: on this host, and on several that print their findings together."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from collc.cli.doctor import doctor, show
from collc.runtime.doctor.finding import error, note, ok, warning

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
from hosts import namespaces  # noqa: E402
from hosts.network import Network  # noqa: E402

sys.path.remove(BENCHMARKS)

# As the console script has it, in a process of its own.
SCRIPT = """
import typer
from collc.cli.doctor import doctor
app = typer.Typer()
app.command()(doctor)
app()
"""
FIELDS = {"host", "check", "level", "found", "remedy"}


def run(monkeypatch, *arguments: str, **environment: str):
    for name in list(os.environ):
        if name.startswith(("NCCL_", "SLURM_", "COLLC_", "OMPI_", "KUBERNETES_")):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    app = typer.Typer()
    app.command()(doctor)
    return CliRunner().invoke(app, arguments)


def test_this_host(monkeypatch):
    flags = "--xla_force_host_platform_device_count=2"
    done = run(monkeypatch, "--json", JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
    found = json.loads(done.stdout)
    assert all(row.keys() == FIELDS for row in found)
    assert {row["host"] for row in found} == {socket.gethostname()}
    assert all(row["remedy"] for row in found if row["level"] in ("warning", "error"))
    assert done.exit_code == any(row["level"] == "error" for row in found)
    (devices,) = [row for row in found if row["check"] == "devices"]
    assert devices["found"].startswith("2 × cpu")
    assert {"python", "versions", "XLA flags", "JAX settings", "host name", "clock"} <= {
        row["check"] for row in found
    }


def test_an_unknown_flag_ends_with_1_and_is_named(monkeypatch):
    flags = "--xla_gpu_autotune_levl=4"
    done = run(monkeypatch, JAX_PLATFORMS="cpu", XLA_FLAGS=flags, NCCL_P2P_DISABLE="1")
    assert done.exit_code == 1
    last = done.stdout.splitlines()[-3:]
    assert last[0].startswith(f"error    XLA flags: this jaxlib does not know {flags}")
    assert "Did you mean --xla_gpu_autotune_level?" in last[1]
    assert last[2].startswith("1 errors, ")
    assert "warning  NCCL settings: NCCL_P2P_DISABLE=1" in done.stdout


def test_findings_of_several_hosts(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    slow = warning("links", "link h0 -> h1", "See the cable.")
    show(
        [
            ("h0", ok("python", "Python 3.12")),
            ("h1", ok("python", "Python 3.12")),
            ("h0", error("limits", "few files", "ulimit -n")),
            ("h1", error("limits", "few files", "ulimit -n")),
            ("h1", note("absent", "RDMA")),
            ("all hosts", slow),
        ]
    )
    assert capsys.readouterr().out.splitlines() == [
        "note     absent: h1: RDMA",
        "warning  links: all hosts: link h0 -> h1",
        "         See the cable.",
        "error    limits: h0, h1: few files",
        "         ulimit -n",
        "1 errors, 1 warnings, 1 checks well",
    ]


def together(address: str, own: list[dict[str, str]], prefixes: list[tuple[str, ...]]):
    """Exit codes and outputs of processes that meet at an address, each on a host of its own name."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    usual = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "COLLC_COORDINATOR": f"{address}:{port}",
        "COLLC_PROCESSES": str(len(own)),
    }
    workers = [
        subprocess.Popen(
            [*prefix, sys.executable, "-c", SCRIPT, "--json"],
            env={
                **os.environ,
                **usual,
                "COLLC_PROCESS": str(me),
                "COLLC_HOST": f"h{me}",
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for me, (prefix, environment) in enumerate(zip(prefixes, own, strict=True))
    ]
    try:
        said = [worker.communicate(timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return [worker.returncode for worker in workers], said


@pytest.mark.newest_only
def test_three_processes_print_their_findings_together():
    """Over loopback, each called a host: process 0 prints all, and the links between them."""
    codes, said = together("127.0.0.1", [{}, {"NCCL_SOCKET_IFNAME": "nowhere"}, {}], [(), (), ()])
    assert codes == [1, 0, 0], said
    assert [out for out, _ in said[1:]] == ["", ""]
    found = json.loads(said[0][0])
    assert {row["host"] for row in found} == {"h0", "h1", "h2", "all hosts"}
    errors = [row for row in found if row["level"] == "error"]
    assert [row["host"] for row in errors] == ["h1"]
    assert "NCCL_SOCKET_IFNAME=nowhere" in errors[0]["found"]
    job = {row["check"]: row for row in found if row["host"] == "all hosts"}
    assert job["mesh order"]["found"] == "host by host: 3 × 2 devices"
    assert "3 hosts" in job["clocks"]["found"]
    assert job["links"]["level"] in ("ok", "warning")  # a busy machine may delay one of them


@pytest.mark.newest_only
def test_a_slow_host_of_an_emulated_network_is_named():
    """Links of 200 Mb/s, but those of h1: 20 Mb/s."""
    if why := namespaces.missing():
        pytest.skip(f"no emulated network: {why}")
    with Network(hosts=3, rate="200mbit") as network:
        network.set_rate("h1", "20mbit")
        prefixes = [network.prefix(host) for host in network.hosts]
        codes, said = together(network.address("h0"), [{}, {}, {}], prefixes)
    assert codes == [0, 0, 0], said
    found = json.loads(said[0][0])
    links = [row for row in found if row["check"] == "links"]
    assert [row["level"] for row in links] == ["warning"], links
    assert links[0]["found"].startswith("host h1, all that it sends and receives, takes ")
    assert links[0]["remedy"].startswith("On h1: ethtool INTERFACE")
    names = [row for row in found if row["check"] == "host name"]
    assert {row["level"] for row in names} == {"ok"}  # each resolves to what others reach
