"""collc launch: hosts that write, fail, are killed, and outlive nobody. Here they are shells."""

import io
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from collc.errors import LaunchError
from collc.runtime.launch import attempt, job, process
from collc.runtime.launch.failure import Failure, cause
from collc.runtime.launch.job import Host, Job
from collc.runtime.launch.logs import Logs
from collc.runtime.place import RESTART, Place, place
from collc.runtime.xla_flags import DEVICES, PATIENCE, read, virtual

from .shells import running

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs process groups")
GREETING = (
    "[Gloo] Rank 1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"
)
NOT_COME = "PlanError: process 1 of 2 has not come to compare its plans within 120 s"
NOT_SAID = "PlanError: process 0 has not said how many steps a block has within 120 s"
ABORTED = "JAX distributed service detected fatal errors"
ECHO = "RuntimeError: Gloo all-reduce failed: Connection closed by peer"


class Run:
    """A job of shells, run to its end: its outcome, and what it wrote."""

    def __init__(self, script, hosts=2, restarts=0, started=None, grace_s=5.0, **options):
        out, err = (Console(file=io.StringIO(), width=200) for _ in range(2))
        named = tuple(Host(f"h{i}") for i in range(hosts))
        job = Job(("sh", "-c", script), named, grace_s=grace_s, **options)
        self.outcome = job.run(Logs(out, err), restarts, started)
        self.out, self.err = (console.file.getvalue() for console in (out, err))  # pyright: ignore
        self.code = self.outcome.code


def test_hosts_know_their_place_and_lines_have_their_names():
    script = (
        'echo "$COLLC_PROCESS of $COLLC_PROCESSES on $COLLC_HOST, $COLLC_RESTARTS, $JAX_PLATFORMS"; '
        'echo "$XLA_FLAGS" >&2; echo "$COLLC_COORDINATOR" >&2; cat; printf end'
    )
    run = Run(script, hosts=11, devices=3)
    assert run.code == 0 and run.outcome.failures == ()
    lines = run.out.splitlines()
    expected = [(f"h{i}", f"{i} of 11 on h{i}, 0, cpu") for i in range(11)]
    assert sorted(lines) == sorted(
        f"{host:<3} | {text}" for host, first in expected for text in (first, "end")
    )
    told = {line.split(" | ")[1] for line in run.err.splitlines()}
    assert len(told) == 2
    flags, coordinator = sorted(told)
    assert flags.split().count("--xla_force_host_platform_device_count=3") == 1
    assert flags.count("device_count") == 1
    assert re.fullmatch(r"127\.0\.0\.1:\d+", coordinator)


def test_a_place_comes_back_from_its_variables():
    there = Place("127.0.0.1:1", 4, 3, "h3", restarts=2)
    assert place(there.environment()) == there and place({}) is None


def test_flags_of_xla_are_kept_also_those_in_a_file(tmp_path):
    """As XLA reads them: what begins with no - is the name of a file."""
    mine = f"--xla_a=1 {DEVICES}=9 {PATIENCE}=7"
    kept = tmp_path / "flags"
    kept.write_text(f"{mine}\n--xla_b=2\n")
    assert virtual("", 2).split() == [f"{DEVICES}=2", f"{PATIENCE}=300"]
    assert virtual(mine, 2).split() == [f"{DEVICES}=2", "--xla_a=1", f"{PATIENCE}=7"]
    assert virtual(mine, 2, keep=True) == mine
    assert virtual(str(kept), 2) == f"{virtual(mine, 2)} --xla_b=2"
    assert read("  ") == [] and read(" --xla_a ") == ["--xla_a"]
    with pytest.raises(LaunchError, match=r"XLA_FLAGS is 'xla_a=1', .* No such file"):
        virtual("xla_a=1", 2)


def test_much_and_strange_output_arrives_whole():
    count = 20_000
    code = f"""
import os, sys
for i in range({count}):
    print(i)
os.write(2, bytes(range(256)) * 4 + b"\\n" + b"y" * 1_000_000)
"""
    run = Run(f"exec '{sys.executable}' -c '{code}'")
    assert run.code == 0
    for host in ("h0", "h1"):
        prefix = f"{host} | "
        mine = [
            line.removeprefix(prefix) for line in run.out.split("\n") if line.startswith(prefix)
        ]
        assert mine == [str(i) for i in range(count)]
        told = [
            line.removeprefix(prefix) for line in run.err.split("\n") if line.startswith(prefix)
        ]
        assert sum(line.count("y") for line in told) == 1_000_000 + 4
        assert all(set(line) <= {*map(chr, range(32, 127)), "\t"} for line in told)


def test_the_host_that_failed_is_named_and_the_others_are_ended():
    script = """
        trap 'echo asked to end; exit 0' TERM
        [ $COLLC_HOST = h1 ] && { for i in $(seq 30); do echo line $i; done; echo why >&2; exit 3; }
        sleep 60 & wait"""
    began = time.monotonic()
    run = Run(script, hosts=3)
    assert time.monotonic() - began < 10
    assert run.code == 3 and run.outcome.restarts == 0
    (failure,) = run.outcome.failures
    assert str(failure) == "host h1 exited with 3"
    assert sorted(failure.lines) == sorted(["why", *(f"line {i}" for i in range(12, 31))])
    assert run.out.count("asked to end") == 2
    said = run.err.partition("collc launch: ")[2].splitlines()
    assert said == ["host h1 exited with 3. Its last lines:", *(f"    {x}" for x in failure.lines)]


def test_a_host_that_does_not_end_is_killed_even_stopped():
    script = (
        "trap '' TERM; [ $COLLC_HOST = h0 ] && { sleep 0.3; exit 1; }; while :; do sleep 1; done"
    )

    run = Run(script, hosts=3, started=killer("h2", signal.SIGSTOP, 0.2), grace_s=0.3)
    assert run.code == 1
    assert "hosts h1, h2 did not end within 0.3 s: killed" in run.err


def test_who_failed_is_said_before_others_are_waited_for(monkeypatch):
    monkeypatch.setattr(attempt, "QUIET_S", 0.1)
    script = (
        "trap '' TERM; [ $COLLC_HOST = h0 ] && { sleep 0.3; exit 1; }; while :; do sleep 0.2; done"
    )
    run = Run(script, grace_s=0.5)
    first, *_ = [line for line in run.err.splitlines() if line.startswith("collc launch")]
    assert first == "collc launch: host h0 exited with 1; host h1 may take 0.5 s to end"


def test_what_a_host_has_started_ends_with_it():
    marker = f"{time.time_ns() % 10**9 + 10**6}"  # how long they would sleep
    run = Run(
        f"sleep {marker} & [ $COLLC_HOST = h0 ] && exit 0; sleep {marker}", started=killer("h1")
    )
    assert run.code == 137
    assert not running(marker)


def killer(host, number=signal.SIGKILL, after_s=0.3):
    """A fault of an attempt: the host gets a signal."""

    def started(attempt, pids):
        threading.Timer(after_s, os.kill, (pids[host], number)).start()

    return started


@pytest.mark.parametrize(
    "failures, culprit",
    [
        ([("h0", 1, [ECHO]), ("h1", -9, []), ("h2", 1, [])], "h1"),
        ([("h0", 1, [ECHO]), ("h1", 1, ["ValueError: x"]), ("h2", 2, [])], "h1"),
        ([("h0", RESTART, []), ("h1", 1, [ECHO])], "h1"),
        ([("h0", RESTART, []), ("h1", RESTART, [])], "h0"),
        ([("h0", -6, [ABORTED]), ("h1", -11, [])], "h1"),
        ([("h0", -6, [ABORTED]), ("h1", 1, ["x"])], "h1"),
        ([("h0", 1, [ECHO]), ("h1", 1, [ECHO])], "h0"),
        ([("h1", -6, [ABORTED]), ("h0", RESTART, [])], "h0"),
        ([("h1", -6, [ABORTED]), ("h0", 1, [ECHO])], "h0"),
        (
            [
                ("h0", 1, [NOT_COME]),
                ("h1", 1, ["x"]),
            ],
            "h1",
        ),
        (
            [
                ("h1", 1, [NOT_SAID]),
                ("h0", 1, ["x"]),
            ],
            "h0",
        ),
        ([("h0", 1, [GREETING, ECHO]), ("h1", 1, [GREETING, "ValueError: x"])], "h1"),
    ],
)
def test_of_several_failures_the_cause_is_named(failures, culprit):
    assert cause([Failure(*failure) for failure in failures]).host == culprit


def test_a_victim_that_ends_first_is_not_blamed():
    script = f"""
        [ $COLLC_HOST = h0 ] && {{ sleep 0.4; echo "ValueError: bad batch"; exit 4; }}
        [ $COLLC_HOST = h1 ] && {{ sleep 0.1; echo "{ECHO}"; exit 1; }}
        exit 0"""
    run = Run(script, hosts=3)
    assert run.code == 4 and str(run.outcome.failures[0]) == "host h0 exited with 4"


@pytest.mark.skipif(not shutil.which("setsid"), reason="needs setsid")
def test_a_daemon_that_writes_does_not_keep_the_launcher(monkeypatch):
    monkeypatch.setattr(process, "DRAINS_S", 1.5)
    marker = f"{time.time_ns() % 10**9 + 10**6}"
    daemon = f"i=0; while [ $i -lt 150 ]; do echo {marker}; sleep 0.2; i=$((i + 1)); done"
    began = time.monotonic()
    run = Run(f"setsid sh -c '{daemon}' & sleep 0.3; echo up", hosts=1)
    assert time.monotonic() - began < 15 and run.code == 0
    assert "h0 | up" in run.out and 0 < run.out.count(marker) < 75


def test_restarts():
    seen = []
    script = """
        echo attempt $COLLC_RESTARTS at $COLLC_COORDINATOR
        [ $COLLC_RESTARTS = 2 ] && exit 0
        [ $COLLC_HOST = h$COLLC_RESTARTS ] && kill -9 $$
        sleep 60"""
    run = Run(
        script, restarts=3, started=lambda attempt, pids: seen.append((attempt, sorted(pids)))
    )
    assert run.code == 0 and run.outcome.restarts == 2
    assert [str(f) for f in run.outcome.failures] == [
        "host h0 was killed by SIGKILL",
        "host h1 was killed by SIGKILL",
    ]
    assert seen == [(i, ["h0", "h1"]) for i in range(3)]
    assert "restart 1 of 3" in run.err and "restart 2 of 3" in run.err
    attempts = set(re.findall(r"attempt (\d) at (\S+)", run.out))
    assert len(attempts) == len({endpoint for _, endpoint in attempts}) == 3


def test_no_restart_is_left():
    run = Run("exit $((7 + COLLC_RESTARTS))", hosts=1, restarts=2)
    assert run.code == 9 and run.outcome.restarts == 2 and len(run.outcome.failures) == 3
    assert run.err.splitlines()[-1] == "collc launch: host h0 exited with 9. It wrote nothing."


def test_a_watchdog_that_ended_the_job_is_told_from_an_error():
    run = Run(f"exit {RESTART}", hosts=1, restarts=1)
    assert run.code == RESTART
    assert str(run.outcome.failures[0]) == "host h0 exited with 75: its watchdog ended the job"


def test_a_watchdog_is_quoted():
    end = (
        "collc watchdog: process 0 on host h0 ends with code 75, on which the job can be restarted"
    )
    said = Failure("h0", RESTART, (f"{end}, since process 1 on host h1 has been at x for 9 s.",))
    why = "its watchdog ended the job, since process 1 on host h1 has been at x for 9 s"
    assert str(said) == f"host h0 exited with 75: {why}"


def test_a_fault_in_started_leaves_nobody_behind():
    marker = f"{time.time_ns() % 10**9 + 10**6}"

    def started(attempt, pids):
        raise RuntimeError("no faults today")

    with pytest.raises(RuntimeError, match="no faults"):
        Run(f"sleep {marker}", started=started)
    assert not running(marker)


@pytest.mark.parametrize(
    "command, options, why",
    [
        ((), {}, "there is no command. Say what to start, after --: python train.py"),
        (("no-such-program",), {}, "there is no program 'no-such-program' on the PATH."),
        (("./gone",), {}, "there is no program './gone'."),
        (("train.py",), {}, "train.py is a file, but no program .* Say python train.py."),
        (("./a/data",), {}, r"a/data is a file, .* Say \./a/data, if chmod"),
        (("./a",), {}, r"\./a is a folder"),
        (("sh -c x",), {}, "no program 'sh -c x' on the PATH. Leave out the quotes .* -- sh -c x"),
        (("sh",), {"hosts": tuple(Host(f"h{i}") for i in range(1025))}, "1024 at most"),
        (("sh",), {"hosts": ()}, "at least one is needed"),
        (("sh",), {"hosts": (Host("a"), Host("a"))}, "each by its own name"),
        (("sh",), {"devices": 0}, "0 devices on a host"),
        (("sh",), {"grace_s": float("nan")}, "grace_s is nan"),
        (("sh",), {"coordinator": "no such host"}, "the coordinator's address 'no such host'"),
    ],
)
def test_refusals(command, options, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    Path("a").mkdir()
    Path("a/data").write_text("")
    with pytest.raises(LaunchError, match=why):
        Job(command, **{"hosts": (Host("h0"),), **options}).run(Logs())


def test_a_program_that_the_system_refuses(tmp_path):
    program = tmp_path / "garbage"
    program.write_bytes(b"\x7fELF")
    program.chmod(0o755)
    with pytest.raises(LaunchError, match=r"could not start .*garbage: Exec format error.*#!"):
        Job((str(program),), (Host("h0"),)).run(Logs())


def test_a_port_in_use_is_not_taken(monkeypatch):
    with socket.socket() as used, socket.socket() as free:
        used.bind(("127.0.0.1", 0))
        free.bind(("127.0.0.1", 0))
        ports = [s.getsockname()[1] for s in (used, free)]
        free.close()
        monkeypatch.setattr(job.random, "sample", lambda *_: ports)
        assert job._free_endpoint("127.0.0.1") == f"127.0.0.1:{ports[1]}"
        monkeypatch.setattr(job.random, "sample", lambda *_: ports[:1])
        with pytest.raises(LaunchError, match="all in use"):
            job._free_endpoint("127.0.0.1")
