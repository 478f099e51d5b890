"""A job on emulated hosts, of which one knows at any time where each host is."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hosts.network import Network

from collc.runtime.launch.job import Host, Job, Outcome
from soak.record import Record

WATCHDOG_S = 6.0
GRACE_S = 2.0
ROWS = 480  # samples of an epoch, of 40 steps
TRAIN = Path(__file__).with_name("train.py")


@dataclass(frozen=True)
class Position:
    """Where a host is, as it says itself. ``attempt``: how often the job was started before."""

    attempt: int
    step: int
    phase: str


class Training:
    """A training of ``steps`` steps on the network's hosts, whose run is in ``run``.

    ``notes``: the folder for what else it writes. ``attempt``, ``began``: the attempt that runs, and
    when it was started, by the monotonic clock. ``pids``: its processes, by host. ``over``: it has
    ended. ``heal``: called once, when the next attempt has been started, or the job is over.
    """

    def __init__(self, network: Network, notes: Path, run: Path, steps: int, seed: int) -> None:
        self.network, self.notes, self.run = network, notes, run
        self.steps, self.seed = steps, seed
        self.record = Record()
        self.attempt, self.began, self.over = -1, 0.0, False
        self.pids: dict[str, int] = {}
        self.heal: Callable[[], object] | None = None
        notes.mkdir()

    def train(self, restarts: int = 0, pause: float = 0.0) -> Outcome:
        """To its end, in this thread. ``pause``: seconds that each step waits for its batch."""
        given = (self.run, self.notes, self.steps, ROWS, self.seed, WATCHDOG_S, pause)
        command = (sys.executable, str(TRAIN), *map(str, given))
        with self._healed():
            return job(self.network, *command).run(self.record.logs(), restarts, self._started)

    def position(self, host: str) -> Position | None:
        """Where a host is; None where its process of this attempt has not said it yet."""
        with suppress(OSError, ValueError):
            attempt, step, phase = (self.notes / f"{host}.at").read_text().split()
            if int(attempt) == self.attempt:
                return Position(int(attempt), int(step), phase)
        return None

    def end(self) -> None:
        """Kills all processes of the attempt that runs."""
        for pid in self.pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _started(self, attempt: int, pids: dict[str, int]) -> None:
        self._do_heal()
        self.pids, self.began = pids, time.monotonic()
        self.attempt = attempt

    def _do_heal(self) -> None:
        if self.heal is not None:
            self.heal()
            self.heal = None

    @contextmanager
    def _healed(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.over = True
            self._do_heal()


def job(network: Network, *command: str) -> Job:
    """The command on each host of the network, with a device each."""
    hosts = tuple(Host(host, network.prefix(host)) for host in network.hosts)
    return Job(command, hosts, coordinator=network.address(network.hosts[0]), grace_s=GRACE_S)
