"""Whether a fault was noticed, by whom and when, and what became of the job. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from soak import faults
from soak.faults import Fault

NOTHING = "the job went on"


@dataclass(frozen=True)
class Trial:
    """A fault that befell a job. ``step``, ``phase``: where its host was then, as it said itself.

    ``lines``: seconds after the fault and what was written, until the next fault. ``gone_s``: when no
    process of that attempt was left, None where the job went on. ``resumed``: the step from which the
    next attempt went on. ``detail``: which file was cut off, and the like. ``hung``: the soak had to
    end it.
    """

    fault: Fault
    job: int
    step: int
    phase: str
    lines: Sequence[tuple[float, str]]
    gone_s: float | None
    resumed: int | None = None
    detail: str = ""
    hung: bool = False


@dataclass(frozen=True)
class Limits:
    """Seconds within which a fault has to be named, and all processes have to be gone."""

    named: float
    gone: float


def witnesses(fault: Fault, hosts: Sequence[str]) -> list[tuple[str, str]]:
    """Who has to name a fault, and what it says, as a regular expression."""
    host, process = re.escape(fault.host), hosts.index(fault.host)
    if fault.kind in (faults.STOP, faults.CUT):
        known = (
            rf"process {process} on host {host}\b.*ha(s|ve) (not (been heard of|answered)|been at)"
        )
        unseen = (
            rf"process {process} has not (come|answered)"  # that never said which host it is on
        )
        return [("watchdog", rf"\| collc watchdog: .*({known}|{unseen})")]
    if fault.kind == faults.SLOW:
        return [("doctor", rf"host {host}, all that it (sends|receives)")]
    if fault.kind == faults.FULL:
        # All hosts write to it. The launcher shows the reason among the last lines of one.
        said = r"CheckpointError: .*No space left on device"
        return [("fit", rf"^h\d+ *\| .*{said}"), ("launcher", rf"^    .*{said}")]
    killed = ("launcher", rf"^collc launch: host {host} was killed by SIGKILL")
    if fault.kind == faults.TRUNCATED:
        return [killed, ("fit", r"It is damaged_step_\d+(_\d+)? now, and step \d+ is taken")]
    return [killed]


def named(trial: Trial, hosts: Sequence[str]) -> list[tuple[str, float | None]]:
    """Each witness, and after how many seconds it has named the fault; None where it has not."""
    return [
        (who, next((at for at, line in trial.lines if re.search(says, line)), None))
        for who, says in witnesses(trial.fault, hosts)
    ]


def failing(trial: Trial, hosts: Sequence[str], limits: Limits) -> list[str]:
    """What is not as it has to be; nothing if all is."""
    found = []
    said = named(trial, hosts)
    found += [f"the {who} did not name it" for who, at in said if at is None]
    first = said[0][1]
    slow = trial.fault.kind == faults.SLOW
    if first is not None and at_once(trial) and first > limits.named:
        found.append(f"named after {first:.1f} s, not {limits.named:g}")
    if trial.hung:
        found.append("it hung")
    if slow and trial.gone_s is not None:
        found.append("it ended, and should only be slower")
    if not slow and trial.gone_s is None:
        found.append("it went on, though it could not")
    if trial.gone_s is not None and trial.gone_s > limits.gone:
        found.append(f"ended after {trial.gone_s:.1f} s, not {limits.gone:g}")
    return found


def outcome(trial: Trial) -> str:
    """What became of the job, in words."""
    if trial.gone_s is None:
        return NOTHING
    if trial.resumed is None:
        return "ended"
    return f"restarted from step {trial.resumed}"


def at_once(trial: Trial) -> bool:
    """Whether the fault holds up the job: a slow link is seen when somebody looks, a full disk at the
    next write.
    """
    return trial.fault.kind not in (faults.SLOW, faults.FULL)
