"""``collc.Watchdog``: a job in which nobody gets further ends, and says who held it up."""

import faulthandler
import itertools
import os
import threading
import time
import traceback
from dataclasses import replace
from typing import Any, NoReturn, Self

from collc.errors import DataError
from collc.planning.agree import distributed, host_name, state
from collc.runtime import ending
from collc.runtime.patience import seconds
from collc.runtime.place import RESTART
from collc.runtime.watchdog import words
from collc.runtime.watchdog.beats import DONE, ENDING, FAILED, RUNNING, Beat, Store
from collc.runtime.watchdog.clock import Clock
from collc.runtime.watchdog.judge import Limits, Seen, Verdict, View, judge
from collc.runtime.watchdog.messenger import HURRY_S, Messenger

TIMEOUT_S = 600.0
# JAX's own heartbeats go out every 50 s, and one that is missed aborts all processes without saying
# where they were: this has to come before.
SILENT_S = 45.0
GRACE_S = 3.0
PARTS = 8  # pauses in the shortest limit
EACH = 32  # processes that beat in a second: the traffic is their square
LONGEST = 300  # characters of an error

_watches = itertools.count()


class Watchdog:
    """While entered, ends the job when nobody has moved for ``timeout_s`` seconds.

    Each process says by ``beat`` that it gets further. When all have stopped, the watchdog says who is
    at which step and phase and who is behind, each process writes the stacks of its threads to its
    log, and all exit with code 75, on which a supervisor can restart the job. The same happens when a
    process (or the coordinator) has not been heard of for ``silent_s``, by default 45 or 0.8 of the
    timeout if that is less, and soon after one leaves by an exception while the others go on.

    All processes have to enter it, in the same order if there are several one after another. It uses
    JAX's own key-value service; on one process it works without. A process in which a thread keeps
    Python's lock writes its stacks by faulthandler's timer, of which a process has one, so the program
    cannot use it meanwhile; the others end, and a process alone is ended with code 1, 3 s after the
    timeout. A process that has failed while others go on runs no exit handlers that were registered
    before, and leaves with code 1 or that of its SystemExit, or 75 if another may be the cause.

    Raises DataError for limits that cannot be, and where one object is entered twice.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S, *, silent_s: float | None = None) -> None:
        timeout = seconds("timeout_s", timeout_s, DataError)
        silent = (
            min(SILENT_S, 0.8 * timeout)
            if silent_s is None
            else seconds("silent_s", silent_s, DataError)
        )
        self._limits = Limits(timeout, silent, min(GRACE_S, timeout / 4))
        self._at = (0, 0, "start")
        self._state: tuple[str, str, tuple[int, ...]] = (RUNNING, "", ())
        self._sent = itertools.count(1)
        self._over = threading.Event()
        self._busy = threading.Lock()  # of the judge, for ever while it ends the process
        self._judge: threading.Thread | None = None

    def beat(self, step: int, phase: str) -> None:
        """This process gets further: it is at this step, in this phase, any short word.

        In the phases "step", "wait" and "checkpoint" it may wait for others, and is not blamed for that
        as long as another is elsewhere.
        """
        self._at = (self._at[0] + 1, step, phase)

    def __enter__(self) -> Self:
        if self._judge is not None:
            raise DataError("a Watchdog watches once. Make another one for another loop.")
        self._host, job = host_name(), state()
        self._me, n = (job.process_id, job.num_processes) if distributed() else (0, 1)
        shortest = min(self._limits.timeout, self._limits.silent) / PARTS
        self._pause = min(1.0, shortest)
        self._turn = min(shortest, max(self._pause, n / EACH))
        self._clock = Clock(self._pause)
        began = self._clock.now()
        self._mine = Seen(self._beat(), began, began, began)
        self._alone = View(self._me, n, began, began, {})
        self._mail: Messenger | None = None
        if n > 1:
            store = Store(job.client, next(_watches))
            self._mail = Messenger(store, self._alone, self._beat, self._clock.now, self._turn)
            self._mail.start()
        self._set_alarm()
        self._judge = threading.Thread(target=self._watch, name="collc-watchdog", daemon=True)
        self._judge.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        with self._busy:  # while the job is ending, this waits for the end of the process
            self._over.set()
            faulthandler.cancel_dump_traceback_later()
        if error is not None:
            self._fail(error)
        else:
            self._state = (DONE, "", ())
        if self._mail is not None:
            self._mail.stop(self._turn + 1.0)

    def _beat(self) -> Beat:
        moved, step, phase = self._at
        return Beat(self._host, os.getpid(), next(self._sent), moved, step, phase, *self._state)

    def _view(self) -> View:
        """What was read of the others, and where this process is now."""
        self._mine = self._mine.then(self._beat(), self._clock.now())
        read = self._mail.view if self._mail is not None else self._alone
        return replace(read, seen=dict(sorted({**read.seen, self._me: self._mine}.items())))

    def _watch(self) -> None:
        """The judge's thread, which never touches the network."""
        while not self._over.wait(self._pause):
            with self._busy:
                if self._over.is_set():
                    return
                self._set_alarm()
                if verdict := judge(self._view(), self._clock.now(), self._limits):
                    self._end(verdict)

    def _set_alarm(self) -> None:
        """Where a thread does not give Python's lock back, nothing here can run or end the process:
        the alarm, which needs no lock, writes the stacks. A process alone it ends too.
        """
        alone = self._mail is None
        limit = self._limits.timeout + GRACE_S if alone else self._limits.silent + 2 * self._turn
        faulthandler.dump_traceback_later(limit, exit=alone, file=ending.STDERR)

    def _end(self, verdict: Verdict) -> NoReturn:
        """End this process, once the others know why, or cannot be told."""
        patience = 2 * self._turn + 1.0
        ending.within(patience + ending.AFTER_S + 5.0, RESTART)
        faulthandler.cancel_dump_traceback_later()
        view, now = self._view(), self._clock.now()
        if self._mail is not None:
            if self._me in verdict.culprits:
                self._mail.stack = next(iter(ending.stacks().values()), "")
            self._state = (ENDING, verdict.text, verdict.culprits)
            self._mail.hurry()
        reports = self._me == reporter(view, verdict)
        trouble = f" ({self._mail.error})" if self._mail is not None and self._mail.error else ""
        lines = [f"collc watchdog: {verdict.text}{trouble}."]
        if reports and view.n > 1:
            lines += [f"  {line}" for line in words.table(view, now)]
        who = words.name(self._me, self._mine.beat)
        for thread, stack in ending.stacks().items():
            lines.append(f"{thread} of {who} is at\n{stack.rstrip()}")
        ending.say("\n".join(lines) + "\n")
        if self._mail is not None:
            self._tell(self._mail, patience)
            for process, stack in self._mail.stacks.items():
                if reports and process != self._me:
                    other = words.name(process, self._mail.view.seen[process].beat)
                    ending.say(f"MainThread of {other} is at\n{stack}")
        # Once more, since a launcher may show the last lines only.
        ending.say(
            f"collc watchdog: {who} ends with code {RESTART}, on which the job can be restarted, since "
            f"{verdict.text}.\n"
        )
        if self._me == 0 and self._mail is not None:
            time.sleep(ending.AFTER_S)
        ending.leave(RESTART)

    def _tell(self, mail: Messenger, patience: float) -> None:
        """Wait until all others know that the job is ending, at most this many seconds."""
        until = time.monotonic() + patience
        while time.monotonic() < until:
            if mail.published == ENDING and not mail.view.others(RUNNING):
                return
            time.sleep(HURRY_S / 2)

    def _fail(self, error: BaseException) -> None:
        """Tell the others of the error, and stay until they have ended or failed too: the network
        between processes breaks where one is gone, and their errors would hide this one.
        """
        said = str(error).strip().splitlines()
        self._state = (FAILED, ": ".join([type(error).__name__, *said[:1]])[:LONGEST], ())
        if (mail := self._mail) is None:
            return
        mail.hurry()
        until = time.monotonic() + self._limits.grace + 2 * self._turn + ending.AFTER_S
        while time.monotonic() < until and not (mail.published == FAILED and told(mail.view)):
            for other in mail.view.others(ENDING).values():
                if self._me not in other.beat.culprits:  # this error came of what they end for
                    ending.say("".join(traceback.format_exception(error)))
                    self._end(Verdict(other.beat.why, other.beat.culprits))
            time.sleep(HURRY_S / 2)
        view = mail.view
        quiet = {
            process: seen.beat
            for process, seen in view.others(RUNNING).items()
            if view.answered - seen.heard > 2 * self._turn + 1.0
        }
        if quiet:
            ending.say(
                f"collc watchdog: {words.names(quiet)} {words.has(quiet)} not been heard of since "
                f"{words.name(self._me, self._mine.beat)} failed, last at "
                f"{words.places(quiet.values())}, and may be the cause.\n"
            )
        if len(view.others(DONE, FAILED)) < view.n - 1:
            own = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
            ending.leave_at_exit(RESTART if quiet else own or 1)
            if self._me == 0:
                time.sleep(ending.AFTER_S)


def told(view: View) -> bool:
    """Whether all others have ended, or are about to."""
    return len(view.others(DONE, FAILED, ENDING)) == view.n - 1


def reporter(view: View, verdict: Verdict) -> int:
    """The process whose log gets the table: the first one that is there and not to blame."""
    there = [
        process
        for process, seen in view.seen.items()
        if seen.beat.state in (RUNNING, ENDING) and process not in verdict.culprits
    ]
    return there[0] if there else view.me
