"""A soak: an undisturbed training, and as many with faults as it takes until all have befallen one."""

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hosts.network import Network

from soak import disk, evidence, faults
from soak.evidence import Left
from soak.inject import Injection, Injector
from soak.job import ROWS, Training
from soak.judge import Trial

HOSTS, RATE = 3, "1gbit"
PAUSE_S = 0.03
SPARE = 5  # restarts that no fault explains, before a job is given up


@dataclass(frozen=True)
class Soaked:
    """What a soak came to: the trials, and by job what is wrong with what it has left."""

    trials: Sequence[Trial]
    wrong: Sequence[Sequence[str]]
    steps: int

    @property
    def jobs(self) -> int:
        return len(self.wrong)


def soak(seed: int, count: int, steps: int, kinds: Sequence[str]) -> Soaked:
    """So many faults of a seed and of these kinds, in jobs of so many steps, on a network of its own.

    Raises RuntimeError where a job cannot take any of the faults that are left.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # hosts share this machine's cores
    trials: list[Trial] = []
    wrong: list[Sequence[str]] = []
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as scratch,
        disk.small(Path(scratch, "disk")) as small,
        Network(HOSTS, RATE) as network,
    ):
        rest = faults.draw(seed, count, network.hosts, kinds)
        calm = Training(network, Path(scratch, "calm"), small / "calm", steps, seed)
        if calm.train().code:
            raise RuntimeError("\n".join(line for _, line in calm.record.lines))
        undisturbed = evidence.left(calm.run, calm.notes)
        print("undisturbed: done", file=sys.stderr)
        while rest:
            name = f"job{len(wrong) + 1}"
            training = Training(network, Path(scratch, name), small / name, steps, seed)
            injector = Injector(training, small, rest)
            injector.start()
            ended = training.train(len(rest) + SPARE, PAUSE_S)
            injector.join()
            found = evidence.left(training.run, training.notes)
            said = evidence.trouble(found, undisturbed, steps, ROWS, HOSTS)
            if ended.code:
                said.append(f"it ended with {ended.code}")
            expected = sum(injection.gone is not None for injection in injector.injections)
            if len(ended.failures) != expected:
                said.append(f"{len(ended.failures)} attempts failed, and faults explain {expected}")
            trials += trials_of(injector.injections, training, found, len(wrong) + 1)
            wrong.append(said)
            if said:
                print(*(line for _, line in training.record.lines), sep="\n", file=sys.stderr)
            rest = rest[len(injector.injections) :]
            if not injector.injections or ended.code:
                raise RuntimeError(f"{'; '.join(said)}. {len(rest)} faults are left.")
    return Soaked(trials, wrong, steps)


def trials_of(
    injections: Sequence[Injection], training: Training, found: Left, job: int
) -> list[Trial]:
    """What each fault came to: its lines are those until the next one."""
    forever = float("inf")
    ends = [injection.at for injection in injections[1:]] + [forever]
    trials = []
    for injection, end in zip(injections, ends):
        position = injection.position
        step, phase = (position.step, position.phase) if position else (0, faults.START)
        gone = None if injection.gone is None else injection.gone - injection.at
        if injection.fault.kind == faults.TRUNCATED:  # which is seen by the first that resumes
            end = forever
        lines = [*training.record.between(injection.at, end), *injection.said]
        resumed = None if gone is None else evidence.resumed(found, injection.attempt + 1)
        trials.append(
            Trial(
                injection.fault, job, step, phase, lines, gone, resumed, injection.detail,
                injection.hung,
            )
        )  # fmt: skip
    return trials
