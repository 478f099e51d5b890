"""The launcher as a process of its own: the signals that it gets, and its end."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from collc.runtime.launch.attempt import Attempt
from collc.runtime.launch.logs import Logs
from collc.runtime.launch.signals import PASSED_ON, Signals

from .shells import running, wait_for

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs process groups")

LAUNCHER = """
import signal, sys
for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # whatever whoever runs the tests has it ignore
    signal.signal(getattr(signal, name), signal.SIG_IGN if name in sys.argv else signal.SIG_DFL)
from collc.runtime.launch.job import Host, Job
from collc.runtime.launch.logs import Logs
job = Job(("sh", "-c", sys.argv[1]), (Host("h0"), Host("h1")), grace_s=5)
code = job.run(Logs(), max_restarts=3).code
assert "jax" not in sys.modules
sys.exit(code)
"""


class Launcher:
    """A launcher with two shells, in a process of its own."""

    def __init__(self, script, *ignored, **options):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        command = [sys.executable, "-c", LAUNCHER, script, *ignored]
        self.process = subprocess.Popen(command, text=True, **pipes)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.communicate()

    def ready(self):
        """Waits until both hosts have said so."""
        assert sorted(self.process.stdout.readline() for _ in "12") == [
            "h0 | ready\n",
            "h1 | ready\n",
        ]

    def end(self):
        """(exit code, stdout, stderr)"""
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err


SAVES = "trap 'echo saved; exit {code}' {name}; echo ready; while :; do sleep 0.05; done"


@pytest.mark.parametrize("name, code", [("INT", 0), ("TERM", 5), ("HUP", 0)])
def test_signals_are_passed_on_once_and_nothing_is_restarted(name, code):
    with Launcher(SAVES.format(name=name, code=code)) as launcher:
        launcher.ready()
        launcher.process.send_signal(getattr(signal, f"SIG{name}"))
        found, out, err = launcher.end()
    assert found == code and sorted(out.splitlines()) == ["h0 | saved", "h1 | saved"]
    said = [f"SIG{name} was passed on to all hosts; a second one kills them"]
    said += [f"host HOST exited with {code}"] * bool(code)  # either may be the first
    own = [line for line in err.splitlines() if " | " not in line]  # a shell may say "Hangup"
    own = [re.sub(r"host h\d", "host HOST", line) for line in own]
    assert own == [f"collc launch: {line}" for line in said]


def test_hosts_that_the_signal_kills():
    with Launcher("echo ready; sleep 60") as launcher:
        launcher.ready()
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.end()[0] == 128 + signal.SIGTERM


def test_a_second_signal_kills():
    with Launcher("trap 'echo no' INT; echo ready; while :; do sleep 0.05; done") as launcher:
        launcher.ready()
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.process.stdout.readline().endswith("| no\n")
        assert launcher.process.poll() is None
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.end()[0] == 128 + signal.SIGINT


def test_nohup_is_respected():
    with Launcher(SAVES.format(name="TERM", code=0), "SIGHUP") as launcher:
        launcher.ready()
        launcher.process.send_signal(signal.SIGHUP)
        launcher.process.send_signal(signal.SIGTERM)
        code, _, err = launcher.end()
    assert code == 0 and "SIGHUP" not in err


def test_a_launcher_that_is_killed_leaves_nobody_behind():
    marker = f"{time.time_ns() % 10**9 + 10**6}"
    with Launcher(f"trap '' TERM HUP; sleep {marker} & echo ready; sleep {marker}") as launcher:
        launcher.ready()
        assert len(running(f"sleep {marker}")) >= 4
        launcher.process.kill()
        launcher.process.wait()
        wait_for(lambda: not running(f"sleep {marker}"))


def test_a_reader_that_leaves_ends_the_job_as_ctrl_c_does(tmp_path):
    trap = f"trap 'echo saved >> {tmp_path}/saved; exit 0' INT"
    script = f"{trap}; while :; do echo ready; sleep 0.05; done"
    with Launcher(script) as launcher:
        launcher.process.stdout.readline()
        launcher.process.stdout.close()
        err = launcher.process.stderr.read()
        assert launcher.process.wait(20) == 1 and err.splitlines()[-1].startswith("BrokenPipeError")
    assert (tmp_path / "saved").read_text() == "saved\nsaved\n"


def test_signals_are_the_launchers_only_while_it_runs():
    numbers = [getattr(signal, name) for name in PASSED_ON]
    before = [signal.getsignal(number) for number in numbers]
    with Signals() as signals:
        mine = [signal.getsignal(number) for number in numbers]
        assert set(mine) <= {signals._came, signal.SIG_IGN} and signals._came in mine
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_signal_that_comes_while_hosts_start_reaches_the_last_too():
    class Host:
        def __init__(self):
            self.sent = []

        def send(self, number):
            self.sent.append(number)

    signals, hosts = Signals(), [Host() for _ in range(3)]
    attempt = Attempt(Logs(), signals)
    for host in hosts:
        attempt.add(host)  # pyright: ignore[reportArgumentType]
        signals.pass_on(signal.SIGTERM)
    assert [host.sent for host in hosts] == [[], [signal.SIGTERM], [signal.SIGKILL]]
