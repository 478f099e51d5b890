"""`collc doctor` as a command: on this host, and on several that print their findings together."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from threading import Event
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from collc.cli import app, common
from collc.cli.doctor import show
from collc.errors import PlanError
from collc.runtime.doctor import sweep
from collc.runtime.doctor import together as hosts_together
from collc.runtime.doctor.finding import error, note, ok, warning
from collc.runtime.doctor.host import Host
from collc.runtime.doctor.jobs import Job

from ..emulated import Network, namespaces

DOCTOR = ("-m", "collc", "doctor", "--json")
# A link that never answers, or that fails at once.
BROKEN = """
import sys, time
from collc.cli import main
from collc.runtime.doctor import sweep
def hang(between, size):
    time.sleep(600)
def fail(between, size):
    raise RuntimeError("UNAVAILABLE: Gloo")
sweep._mine = {name}
sys.argv = ["collc", "doctor", *sys.argv[1:]]
main()
"""
FIELDS = {"host", "check", "level", "found", "remedy"}


def run(monkeypatch, *arguments: str, **environment: str):
    for name in list(os.environ):
        if name.startswith(("NCCL_", "SLURM_", "COLLC_", "OMPI_", "KUBERNETES_")):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_this_host(monkeypatch):
    flags = "--xla_force_host_platform_device_count=2"
    done = run(monkeypatch, "--json", JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
    found = json.loads(done.stdout)
    assert all(row.keys() == FIELDS for row in found)
    assert {row["host"] for row in found} == {socket.gethostname()}
    assert all(row["remedy"] for row in found if row["level"] != "ok")
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
    first, last = done.stdout.partition(f"error    XLA flags: this jaxlib does not know {flags}")[
        ::2
    ]
    assert "Did you mean --xla_gpu_autotune_level" in last
    assert "error " not in first
    assert last.splitlines()[-1].startswith("1 error, ")
    assert "warning  NCCL settings: NCCL_P2P_DISABLE=1" in done.stdout


def test_findings_of_several_hosts(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    slow = warning("links", "link h0 -> h1", "See the cable.")
    show(
        [
            ("h0", ok("python", "Python 3.12")),
            ("h1", ok("python", "Python 3.12")),
            ("h2", ok("limits", "enough")),  # not well, since others have few files
            ("h0", error("limits", "few files", "ulimit -n")),
            ("h1", error("limits", "few files", "ulimit -n")),
            ("h1", note("absent", "RDMA", "mount /sys")),
            ("all hosts", slow),
        ]
    )
    assert capsys.readouterr().out.splitlines() == [
        "note     absent: h1: RDMA",
        "         mount /sys",
        "warning  links: all hosts: link h0 -> h1",
        "         See the cable.",
        "error    limits: h0, h1: few files",
        "         ulimit -n",
        "1 error, 1 warning, 1 check well",
    ]


def errors(stdout: str) -> list[dict[str, str]]:
    """The errors in what was printed, which has to be one document that holds more than those."""
    found = json.loads(stdout)
    assert {"python", "versions", "devices"} <= {row["check"] for row in found}
    return [row for row in found if row["level"] == "error"]


def test_what_fails_on_the_way_loses_no_finding(monkeypatch):
    def fail(*_):
        raise RuntimeError("UNAVAILABLE:\n Gloo")

    monkeypatch.setattr(hosts_together, "sweep", fail)
    done = run(monkeypatch, "--links", "--json", JAX_PLATFORMS="cpu")
    assert done.exit_code == 1
    (job,) = errors(done.stdout)
    assert (job["check"], job["found"]) == ("job", "RuntimeError: UNAVAILABLE: Gloo")
    assert "--timeout" in job["remedy"]


def test_what_is_amiss_is_said_while_others_are_awaited(monkeypatch, capsys):
    """JAX aborts a process that waits for one that never comes."""

    def init(timeout_s):
        time.sleep(timeout_s)
        raise PlanError("nobody came")

    monkeypatch.setattr(hosts_together, "init", init)
    mine = [ok("python", "3.11"), warning("clock", "h3's is 2 s late", "Start chrony.")]
    for own, said in (
        (mine, "amiss on h3 so far:\n  warning clock: h3's is 2 s late. Start chrony.\n"),
        (mine[:1], "nothing is amiss on h3 so far\n"),
    ):
        hosts_together.ask(Host({}), "h3", own, Job("srun", 2, True), links=False, timeout_s=0.5)
        assert capsys.readouterr().err == f"collc doctor: waiting for the other processes; {said}"


def test_what_is_amiss_is_written_in_one_call(monkeypatch):
    """Another thread, which waits as well, writes to stderr too: its line must not end up in ours."""
    written = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=written.append, flush=lambda: None))
    hosts_together._aside("h3", (("h3", error("job", "Two differ.", "Start the same.")),))
    assert written == [
        "collc doctor: waiting for the other processes; amiss on h3 so far:\n"
        "  error job: Two differ. Start the same.\n"
    ]


def test_counters_of_a_host_are_told_once(monkeypatch):
    """Its processes read them one after the other, so that the numbers differ."""
    said = [[asdict(ok("TCP", f"{process} sent")), asdict(ok("python", "3"))] for process in (0, 1)]
    both = dict(enumerate(map(json.dumps, said)))
    monkeypatch.setattr(hosts_together, "meet", lambda *_: both)
    found = hosts_together._all_of({0: "a", 1: "a"}, [], 1.0)
    assert [f.found for _, f in found] == ["0 sent", "3", "3"]
    assert len(hosts_together._all_of({0: "a", 1: "b"}, [], 1.0)) == 4


def test_variables_of_collc_launch_by_half(monkeypatch):
    done = run(monkeypatch, "--json", JAX_PLATFORMS="cpu", COLLC_HOST="x")
    assert done.exit_code == 1
    (job,) = errors(done.stdout)
    assert job["check"] == "job"
    assert "COLLC_COORDINATOR is not set" in job["found"]
    assert "unset" in job["remedy"]


def test_a_link_that_hangs(monkeypatch):
    """The process must not wait at its end either: main leaves without what is left behind."""
    release = Event()
    monkeypatch.setattr(sweep, "_mine", lambda between, size: release.wait(60))
    monkeypatch.setattr(common, "left_behind", [])
    monkeypatch.setattr(sweep, "left_behind", [])
    monkeypatch.setattr(hosts_together, "sweep", lambda between, _: sweep.sweep(between, 0.1))
    done = run(monkeypatch, "--links", "--json", JAX_PLATFORMS="cpu")
    (thread,) = common.left_behind
    assert thread.is_alive()
    release.set()
    assert done.exit_code == 1
    (links,) = errors(done.stdout)
    assert "not done in the time of --timeout" in links["found"]


@pytest.mark.parametrize("seconds", ["nan", "0", "-1"])
def test_a_time_that_is_none(monkeypatch, seconds):
    done = run(monkeypatch, "--timeout", seconds)
    assert (done.exit_code, done.stdout) == (2, "")


def together(
    address: str,
    own: list[dict[str, str]],
    prefixes: list[tuple[str, ...]],
    programs: Sequence[tuple[str, ...]] = (),
):
    """Exit codes and outputs of processes that meet at an address, each on a host of its own name."""
    programs = programs or [DOCTOR] * len(own)
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
            [*prefix, sys.executable, *programs[me]],
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
    assert job["links"]["level"] == "note"  # however busy the machine is
    assert "6 links of 3 hosts" in job["links"]["found"]


@pytest.mark.newest_only
def test_a_process_whose_link_fails_and_one_that_waits_for_it():
    """Process 1 fails at once, process 0 waits in vain: it says both, and all that was found before."""
    fails, hangs = (
        ("-c", BROKEN.replace("{name}", name), "--json", "--timeout", "20")
        for name in ("fail", "hang")
    )
    codes, said = together("127.0.0.1", [{}, {}], [(), ()], [hangs, fails])
    assert codes[0] == 1, said
    assert said[1][0] == ""
    (links,) = errors(said[0][0])
    assert (links["host"], links["check"]) == ("all hosts", "links")
    assert "process 0: not done in the time of --timeout" in links["found"]
    assert "process 1: RuntimeError: UNAVAILABLE: Gloo" in links["found"]
    assert {row["host"] for row in json.loads(said[0][0])} == {"h0", "h1", "all hosts"}


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
