"""A job: one command on several hosts of this machine, started anew when a host fails.

Each host is a process with virtual CPU devices, told its place by the environment (see ``place``).
The processes talk over gloo; the first one's coordinator listens at a port that is new each time.
"""

import errno
import math
import os
import random
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count

from collc.errors import LaunchError
from collc.runtime.addresses import Endpoint, family
from collc.runtime.launch.attempt import Attempt
from collc.runtime.launch.failure import Failure
from collc.runtime.launch.logs import Logs
from collc.runtime.launch.process import Process
from collc.runtime.launch.signals import Signals
from collc.runtime.launch.warden import Warden
from collc.runtime.place import Place
from collc.runtime.xla_flags import virtual

MOST = 1024  # hosts of one machine: each is a process, with two pipes
PORTS = range(20_000, 32_000)  # below those that systems give to outgoing connections
Started = Callable[[int, dict[str, int]], object]


@dataclass(frozen=True)
class Host:
    """Where a process runs. ``prefix`` stands before the command (``ip netns exec h2``), and
    ``environment`` is added to that of the launcher.
    """

    name: str
    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a job ended. ``code``: the exit code for the shell; ``failures``: one for each attempt that
    failed, also those that a restart made good.
    """

    code: int
    restarts: int
    failures: tuple[Failure, ...]


@dataclass(frozen=True)
class Job:
    """A command for each of the hosts, with so many ``devices`` each.

    ``coordinator``: the address at which the first host's coordinator listens, loopback unless told
    otherwise. ``grace_s``: seconds from SIGTERM to SIGKILL for hosts that outlive a failure.

    Raises LaunchError for what cannot be.
    """

    command: tuple[str, ...]
    hosts: tuple[Host, ...]
    devices: int = 1
    coordinator: str = "127.0.0.1"
    grace_s: float = 10.0

    def __post_init__(self) -> None:
        names = [host.name for host in self.hosts]
        if not self.command:
            raise LaunchError("there is no command. Say what to start, after --: python train.py")
        if not names or len(set(names)) < len(names) or not all(names):
            raise LaunchError(
                f"hosts are named {names[:9]}: at least one is needed, each by its own name."
            )
        if len(names) > MOST:
            raise LaunchError(f"{len(names)} hosts are too many for a machine: {MOST} at most.")
        if self.devices < 1:
            raise LaunchError(f"{self.devices} devices on a host: 1 or more are needed.")
        if not 0 <= self.grace_s < math.inf:
            raise LaunchError(
                f"grace_s is {self.grace_s}: a number of seconds from 0 on is needed."
            )

    def run(self, logs: Logs, max_restarts: int = 0, started: Started | None = None) -> Outcome:
        """Runs the command on all hosts until it is done, or has failed and no restart is left.

        Started anew are all hosts, with the same command. After a signal from the user they are not.
        ``started`` is called after each start with the number of restarts before it and the pid of
        each host, its process group too. No process is left when this returns or raises.

        Raises LaunchError where the command cannot be started, OSError where logs can no longer be
        written.
        """
        if os.name != "posix":
            raise LaunchError("this system has no process groups. Launch on Linux or macOS.")
        if max_restarts < 0:
            raise LaunchError(f"max_restarts is {max_restarts}: 0 or more are needed.")
        for host in self.hosts:
            check_program((host.prefix or self.command)[0], self._environment(host, {}))
        logs.name([host.name for host in self.hosts])
        failures: list[Failure] = []
        with Signals() as signals, Warden() as warden:
            for restarts in count():
                with Attempt(logs, signals) as attempt:
                    self._start(attempt, restarts, logs, warden)
                    if started is not None:
                        started(restarts, {p.name: p.pid for p in attempt.processes})
                    failure = attempt.wait(self.grace_s)
                if logs.broken is not None:
                    raise logs.broken
                if failure is None:
                    return Outcome(0, restarts, tuple(failures))
                failures.append(failure)
                if signals.asked:
                    code = 128 + signals.asked
                    if not signals.twice and failure.status != code:
                        code = failure.status
                        logs.say(f"{failure}", "bold red")
                    return Outcome(code, restarts, tuple(failures))
                lines = "Its last lines:" if failure.lines else "It wrote nothing."
                logs.say(f"{failure}. {lines}", "bold red", failure.lines)
                if restarts == max_restarts:
                    return Outcome(failure.status, restarts, tuple(failures))
                logs.say(f"restart {restarts + 1} of {max_restarts}")
        raise AssertionError("count never ends")

    def _start(self, attempt: Attempt, restarts: int, logs: Logs, warden: Warden) -> None:
        coordinator = _free_endpoint(self.coordinator)
        for process, host in enumerate(self.hosts):
            place = Place(coordinator, len(self.hosts), process, host.name, restarts)
            command = (*host.prefix, *self.command)
            environment = self._environment(host, place.environment())
            try:
                attempt.add(Process(host.name, command, environment, logs, warden))
            except (OSError, ValueError) as error:
                odd = getattr(error, "errno", None) in (errno.ENOENT, errno.ENOEXEC)
                hint = " Look at its first line: #! and a program that is there." if odd else ""
                raise LaunchError(
                    f"host {host.name} could not start {command[0]}: "
                    f"{getattr(error, 'strerror', None) or error}.{hint}"
                ) from error

    def _environment(self, host: Host, place: Mapping[str, str]) -> dict[str, str]:
        return {
            "PYTHONUNBUFFERED": "1",  # what a host says before it is killed must not stay in a buffer
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": virtual(os.environ.get("XLA_FLAGS", ""), self.devices),
            **place,
            **host.environment,
        }


def check_program(program: str, environment: Mapping[str, str]) -> None:
    """Raises LaunchError where there is no such program, or it cannot be executed."""
    path = environment.get("PATH", os.defpath)
    if shutil.which(program, path=path):
        return
    if os.path.isdir(program):
        raise LaunchError(f"{program} is a folder. Say what to start, after --: python train.py")
    if os.path.isfile(program):
        script = program.endswith(".py")
        path = program if os.path.dirname(program) else f"./{program}"
        remedy = f"python {program}" if script else f"{path}, if chmod +x has made it one"
        raise LaunchError(
            f"{program} is a file, but no program that can be executed. Say {remedy}."
        )
    where = "" if os.path.dirname(program) else " on the PATH"
    also = f" Did you mean {program}3?" if shutil.which(f"{program}3", path=path) else ""
    if len(words := program.split()) > 1 and shutil.which(words[0], path=path):
        also = f" Leave out the quotes around it: -- {program}"
    raise LaunchError(f"there is no program {program!r}{where}.{also}")


def _free_endpoint(address: str) -> str:
    """The address with a port at which nobody listens.

    >>> _free_endpoint("::1").rpartition(":")[0]
    '[::1]'
    """
    for port in random.sample(PORTS, 100):
        try:
            with socket.socket(family(address)) as probe:
                probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            if error.errno != errno.EADDRNOTAVAIL:  # that of an emulated host is not ours to try
                raise LaunchError(f"the coordinator's address {address!r}: {error}.") from error
        return str(Endpoint(address, port))
    raise LaunchError(f"100 ports of {address} between {PORTS[0]} and {PORTS[-1]} are all in use.")
