"""Faults of a seed: what befalls which host, and when. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

KILL, COORDINATOR, TRUNCATED = "killed host", "killed coordinator", "truncated checkpoint"
STOP, CUT, SLOW, FULL = "stopped host", "cut link", "slow link", "full disk"
KINDS = (KILL, COORDINATOR, TRUNCATED, STOP, CUT, SLOW, FULL)
KILLING = (KILL, COORDINATOR, TRUNCATED)  # a host is killed by SIGKILL

START, RESTORE = "start", "restore"
# Of collc.fit, as its watchdog calls them; those that last long enough to be hit.
PHASES = (RESTORE, "checkpoint", "input", "step", "wait", "callbacks")
LATEST = 40  # steps after the start of an attempt
# Seconds from the beginning of a phase in which a fault comes; shorter than it lasts, mostly.
WITHIN = {START: 6.0, RESTORE: 0.2, "checkpoint": 0.3, "input": 0.01, "callbacks": 0.01}
WITHIN |= {"step": 0.002, "wait": 0.001}
RATES = ("50mbit", "100mbit")  # of a slow link


@dataclass(frozen=True)
class Fault:
    """What befalls a host.

    When: so many steps ``after`` an attempt began, once the host is in ``phase``, and ``seconds``
    later; in the phase "start", so many seconds after its process was started. ``part``: of a file,
    what is left of it, and which of the files, each 0 to 1. ``rate``: of a slow link.
    """

    number: int
    kind: str
    host: str
    after: int
    phase: str
    seconds: float
    part: float = 0.0
    rate: str = ""


def draw(seed: int, count: int, hosts: Sequence[str], kinds: Sequence[str] = KINDS) -> list[Fault]:
    """So many faults in a row, every kind as often as any other, or once more.

    The first of the hosts is the coordinator's. It writes the metrics too, so the moment at which the
    disk is full is one of its.
    """
    chance, turn, drawn = random.Random(seed), list[str](), list[Fault]()
    while len(drawn) < count:
        turn = turn or chance.sample(kinds, len(kinds))
        drawn.append(_one(chance, len(drawn) + 1, turn.pop(), hosts))
    return drawn


def _one(chance: random.Random, number: int, kind: str, hosts: Sequence[str]) -> Fault:
    host = chance.choice(hosts)
    if kind in (COORDINATOR, FULL):
        host = hosts[0]
    elif kind in (KILL, TRUNCATED):
        host = chance.choice(hosts[1:])
    # Where there is nothing yet to be truncated, or no step to be slow, there is no such fault.
    phases = {TRUNCATED: PHASES[1:], SLOW: PHASES[2:], KILL: (START, *PHASES)}.get(kind, PHASES)
    phase = chance.choice((START, *PHASES) if kind == COORDINATOR else phases)
    seconds = chance.uniform(0, WITHIN[phase])
    after = chance.randint(2, LATEST) if phase not in (START, RESTORE) else 0
    rate = chance.choice(RATES) if kind == SLOW else ""
    part = chance.random() if kind == TRUNCATED else 0.0
    return Fault(number, kind, host, after, phase, seconds, part, rate)
