"""One start of a job: its processes from the first one's beginning to the last one's end."""

import select
import signal
import time
from collections.abc import Callable

from collc.errors import LaunchError
from collc.runtime.ending import AFTER_S
from collc.runtime.launch.failure import Failure, cause, name_of
from collc.runtime.launch.logs import Logs
from collc.runtime.launch.process import Process
from collc.runtime.launch.signals import Signals

TICK_S = 0.05  # how often processes are looked after where nobody writes
# In which others may fail for the same reason, before they are ended. The coordinator, which may be
# the cause, stays after the others on purpose: its own error has to come before the SIGTERM.
MOMENT_S = 2 * AFTER_S
QUIET_S = 2.0  # for which the others may take to end without a word
KILLED_S = 30.0  # after which a process that was killed is taken to be stuck in the kernel


class Attempt:
    """Hosts that run together and end together; while entered. None is left on exit."""

    def __init__(self, logs: Logs, signals: Signals) -> None:
        self.processes: list[Process] = []
        self._logs, self._signals = logs, signals
        self._told = False

    def __enter__(self) -> "Attempt":
        self._signals.send = self._send
        return self

    def __exit__(self, *error: object) -> None:
        self._send(signal.SIGKILL)
        self._pump(self._over, KILLED_S)
        self._signals.send = None
        if stuck := self._running():
            raise LaunchError(
                f"{_names(stuck)} did not end though killed by SIGKILL, {KILLED_S:g} s ago: stuck in a "
                "system call, of a file system that does not answer perhaps. Look at pid "
                f"{', '.join(str(process.pid) for process in stuck)}."
            )

    def add(self, process: Process) -> None:
        """A host that has just been started."""
        self.processes.append(process)
        if self._signals.asked:  # it may have come just before
            process.send(signal.SIGKILL if self._signals.twice else self._signals.asked)

    def wait(self, grace_s: float) -> Failure | None:
        """Until all hosts are over; the failure that is the cause, where one has failed.

        The others are ended then: by SIGTERM, and by SIGKILL after ``grace_s`` seconds. Where the
        logs can no longer be written, the hosts are asked to end as by Ctrl-C.
        """
        self._pump(lambda: self._failed() or self._over() or self._logs.broken)
        if self._logs.broken and not self._failed() and not self._signals.asked:
            # In the background of a script Ctrl-C is ignored, by the hosts too.
            ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            self._signals.pass_on(signal.SIGTERM if ignored else signal.SIGINT)
        self._pump(lambda: self._failed() or self._over())
        if not self._failed():
            return None
        if not self._signals.asked and not any(p.failure().certain for p in self._failed()):
            self._pump(self._over, MOMENT_S)
        failed = self._failed()
        self._end(grace_s, cause([process.failure() for process in failed]))
        return cause([process.failure() for process in failed])  # with all that it wrote

    def _end(self, grace_s: float, failure: Failure) -> None:
        """Ends all that still run, and says why if that takes long."""
        if not self._signals.asked:  # else they know
            self._send(signal.SIGTERM)
        began = time.monotonic()
        self._pump(self._over, min(grace_s, QUIET_S))
        if (late := self._running()) and not self._signals.asked and grace_s > QUIET_S:
            self._logs.say(f"{failure}; {_names(late)} may take {grace_s:g} s to end", "bold red")
        self._pump(self._over, grace_s - (time.monotonic() - began))
        if late := self._running():
            self._send(signal.SIGKILL)
            self._logs.say(f"{_names(late)} did not end within {grace_s:g} s: killed", "yellow")
        self._pump(self._over, KILLED_S)

    def _pump(self, until: Callable[[], object], limit_s: float = float("inf")) -> None:
        """Looks after the hosts until something is the case, or for so long."""
        end = time.monotonic() + limit_s
        while not until() and time.monotonic() < end:
            self._read()
            for process in self.processes:
                process.poll()
            if self._signals.asked and not self._told:
                self._told = True
                name = name_of(self._signals.asked)
                self._logs.say(f"{name} was passed on to all hosts; a second one kills them")
            self._logs.flush()

    def _read(self) -> None:
        """What the hosts have written; waits a little for it."""
        streams = {s.fileno(): (process, s) for process in self.processes for s in process.streams}
        poll = select.poll()
        for number in streams:
            poll.register(number, select.POLLIN)
        for number, _ in poll.poll(TICK_S * 1000):
            process, stream = streams[number]
            process.read(stream)

    def _send(self, number: int) -> None:
        for process in self.processes:
            process.send(number)

    def _running(self) -> list[Process]:
        return [process for process in self.processes if process.code is None]

    def _failed(self) -> list[Process]:
        """In the order in which they ended."""
        return sorted((p for p in self.processes if p.code), key=lambda process: process.ended)

    def _over(self) -> bool:
        return all(process.over for process in self.processes)


def _names(processes: list[Process]) -> str:
    noun = "host" if len(processes) == 1 else "hosts"
    return f"{noun} {', '.join(process.name for process in processes)}"
