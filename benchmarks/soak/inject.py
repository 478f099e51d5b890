"""Faults that befall a training while it runs, each at its moment, from a thread of their own."""

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hosts.network import Network

from soak import disk, faults
from soak.faults import RESTORE, START, Fault
from soak.job import Position, Training, job
from soak.record import Record

HANGS_S = 45.0  # after which a job that a fault has befallen hangs
STARTS_S = 120.0  # after which one hangs that has been started
POLL_S = 0.001
ROOM = 30  # steps that have to be left for a fault to matter
SLOW_ROOM = 300  # for the doctor to look at a slow link meanwhile


@dataclass
class Injection:
    """A fault that was dealt out. ``position``: where its host was, None before it trained. ``at``:
    when, by the monotonic clock; ``gone``: when that attempt's processes were all gone, None where
    they were not. ``said``: what others said who looked.
    """

    fault: Fault
    attempt: int
    position: Position | None
    at: float
    gone: float | None = None
    detail: str = ""
    hung: bool = False
    said: Sequence[tuple[float, str]] = ()


class Injector(threading.Thread):
    """Deals out faults in a row, while the training has steps left for them: ``injections``."""

    def __init__(self, training: Training, small: Path, these: Sequence[Fault]) -> None:
        super().__init__(name="injector", daemon=True)
        self.injections: list[Injection] = []
        self._training, self._disk, self._these = training, small, these

    def run(self) -> None:
        for fault in self._these:
            if not self._await(fault):
                return
            training = self._training
            position = training.position(fault.host)
            injection = Injection(fault, training.attempt, position, time.monotonic())
            self.injections.append(injection)
            where = f"step {position.step} ({position.phase})" if position else "start"
            print(f"{fault.number}: {fault.kind}, {fault.host} at {where}", file=sys.stderr)
            self._strike(fault, injection)
            if fault.kind != faults.SLOW:
                self._until_gone(injection)
            elif training.attempt != injection.attempt:
                injection.gone = time.monotonic()

    def _await(self, fault: Fault) -> bool:
        """Waits for the fault's moment. False where the training will be over before."""
        training, attempt, first = self._training, -1, None
        at_once = fault.phase in (START, RESTORE)
        while not training.over:
            time.sleep(POLL_S)
            position, waited = training.position(fault.host), time.monotonic() - training.began
            if training.attempt != attempt:
                attempt, first = training.attempt, None
            if position is None:
                if attempt >= 0 and fault.phase == START and waited > fault.seconds:
                    return True
                if attempt >= 0 and waited > STARTS_S:
                    training.end()
                continue
            if position.phase != RESTORE:
                first = position.step if first is None else first
                room = SLOW_ROOM if fault.kind == faults.SLOW else ROOM
                if training.steps - position.step < room:
                    return False
            if at_once:  # an attempt that goes on has no start: then any phase will do
                break
            if fault.kind == faults.TRUNCATED and len(disk.checkpoints(training.run)) < 2:
                continue
            if position.phase == fault.phase and position.step >= (first or 0) + fault.after:
                break
        since = training.began if fault.phase == START else time.monotonic()
        time.sleep(max(0.0, since + fault.seconds - time.monotonic()))
        return not training.over

    def _strike(self, fault: Fault, injection: Injection) -> None:
        training, network = self._training, self._training.network
        if fault.kind in faults.KILLING:
            if fault.kind == faults.TRUNCATED:
                training.heal = lambda: self._truncate(fault, injection)
            os.kill(training.pids[fault.host], signal.SIGKILL)
        elif fault.kind == faults.STOP:
            os.kill(training.pids[fault.host], signal.SIGSTOP)
        elif fault.kind == faults.CUT:
            training.heal = lambda: network.mend(fault.host)
            network.cut(fault.host)
        elif fault.kind == faults.FULL:
            training.heal = lambda: disk.free(self._disk)
            disk.fill(self._disk)
        else:
            network.set_rate(fault.host, fault.rate)
            injection.said = examined(network)
            network.set_rate(fault.host, network.rate)

    def _truncate(self, fault: Fault, injection: Injection) -> None:
        """As after a power failure: while no process of the job runs yet."""
        newest = disk.checkpoints(self._training.run)[-1]
        injection.detail = f"{newest.name}/{disk.truncate(newest, fault.part)}"

    def _until_gone(self, injection: Injection) -> None:
        training = self._training
        while training.attempt == injection.attempt and not training.over:
            time.sleep(POLL_S)
            if not injection.hung and time.monotonic() - injection.at > HANGS_S:
                injection.hung = True
                training.end()
        injection.gone = time.monotonic()


def examined(network: Network) -> list[tuple[float, str]]:
    """What ``collc doctor --links`` says of the hosts meanwhile: seconds, and lines."""
    record, began = Record(), time.monotonic()
    job(network, sys.executable, "-m", "collc", "doctor", "--links").run(record.logs())
    return record.between(began, time.monotonic())
