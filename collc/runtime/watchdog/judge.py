"""The judge: from what a process knows of all, whether the job has to end, and who is to blame.

Pure: times are seconds of the clock of the process that judges, since clocks of hosts differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from collc.runtime.watchdog import words
from collc.runtime.watchdog.beats import DONE, ENDING, FAILED, RUNNING, Beat

# A process in these phases may only wait for another: the more surely, the higher.
VICTIMS = {"checkpoint": 1, "step": 2, "wait": 3}


@dataclass(frozen=True)
class Limits:
    """Seconds after which the job is ended.

    timeout: in which nobody moved. silent: in which a process, or the store, was not heard of. grace:
    that the others have to fail too after one has failed.
    """

    timeout: float
    silent: float
    grace: float


@dataclass(frozen=True)
class Seen:
    """The last beat of a process; when one last came, when it last told of progress, and when its
    state last changed.
    """

    beat: Beat
    heard: float
    moved: float
    changed: float

    def then(self, beat: Beat, now: float) -> "Seen":
        """With the beat that was read at this time, which may be the same."""
        old = self.beat
        return Seen(
            beat,
            now if beat.sent != old.sent else self.heard,
            now if beat.moved != old.moved else self.moved,
            now if beat.state != old.state else self.changed,
        )


@dataclass(frozen=True)
class View:
    """What process ``me`` of ``n`` knows. began: its watch. answered: when the store last did."""

    me: int
    n: int
    began: float
    answered: float
    seen: Mapping[int, Seen]

    def after(self, beats: Mapping[int, Beat], now: float) -> "View":
        """With beats that were read at this time."""
        seen = {**self.seen}
        for process, beat in beats.items():
            before = seen.get(process)
            seen[process] = before.then(beat, now) if before else Seen(beat, now, now, now)
        return replace(self, seen=dict(sorted(seen.items())))

    def others(self, *states: str) -> dict[int, Seen]:
        """The other processes in one of these states."""
        return {p: s for p, s in self.seen.items() if p != self.me and s.beat.state in states}


@dataclass(frozen=True)
class Verdict:
    """Why the job has to end, and the processes to blame, none where all are alike."""

    text: str
    culprits: tuple[int, ...] = ()


def judge(view: View, now: float, limits: Limits) -> Verdict | None:
    """The verdict on a job, None while it may go on. The surest cause comes first."""
    return (
        _told(view)
        or _failed(view, now, limits)
        or _unanswered(view, now, limits)
        or _silent(view, limits.silent)
        or _missing(view, limits)
        or _stuck(view, now, limits)
    )


def _told(view: View) -> Verdict | None:
    """Another process is ending the job: for the same reason."""
    for seen in view.others(ENDING).values():
        return Verdict(seen.beat.why, seen.beat.culprits)
    return None


def _failed(view: View, now: float, limits: Limits) -> Verdict | None:
    """The first of those that failed. Not at once: what fails alike everywhere needs no blame."""
    failed = view.others(FAILED)
    if not failed:
        return None
    first = min(failed, key=lambda process: (failed[process].changed, process))
    if now - failed[first].changed < limits.grace:
        return None
    beat = failed[first].beat
    return Verdict(f"{words.name(first, beat)} failed at {beat}: {beat.why}", (first,))


def _unanswered(view: View, now: float, limits: Limits) -> Verdict | None:
    """Without the store nothing is known of the others, so it comes before them."""
    if view.n == 1 or now - view.answered < limits.silent:
        return None
    found = f"{now - view.answered:.0f} s"
    if view.me == 0:
        return Verdict(f"the key-value service of this process has not answered for {found}", (0,))
    last = view.seen.get(0)
    host = f" on host {last.beat.host}, last at {last.beat}," if last else ""
    return Verdict(
        f"the coordinator, process 0{host} has not answered for {found}: it is stopped, or the "
        "network to it is cut",
        (0,),
    )


def _silent(view: View, limit: float) -> Verdict | None:
    """Those of whom no beat came for so long, while the store was read."""
    silent = {p: s for p, s in view.others(RUNNING).items() if view.answered - s.heard >= limit}
    if not silent:
        return None
    last = words.places(s.beat for s in silent.values())
    since = view.answered - max(s.heard for s in silent.values())
    return Verdict(
        f"{words.names({p: s.beat for p, s in silent.items()})} {words.has(silent)} not been heard "
        f"of for {since:.0f} s, last at {last}: stopped, cut off, or holding Python's lock",
        tuple(silent),
    )


def _missing(view: View, limits: Limits) -> Verdict | None:
    """Those that have never come: before the watch there is no limit but that of progress."""
    missing = [p for p in range(view.n) if p not in view.seen]
    if not missing or view.answered - view.began < limits.timeout:
        return None
    return Verdict(
        f"{words.numbers(missing)} {words.has(missing)} not come to the watch within "
        f"{limits.timeout:g} s",
        tuple(missing),
    )


def _stuck(view: View, now: float, limits: Limits) -> Verdict | None:
    """Nobody of those that run has moved, and all have come. Who is silent by then is to blame."""
    running = {p: s for p, s in view.seen.items() if s.beat.state == RUNNING}
    known = {p: now if p == view.me else view.answered for p in running}
    idle = min((known[p] - s.moved for p, s in running.items()), default=0.0)
    if len(view.seen) < view.n or idle < limits.timeout:
        return None
    if verdict := _silent(view, limits.silent / 2):
        return verdict
    beats = {p: s.beat for p, s in running.items()}
    if gone := _gone(view, beats):
        return Verdict(
            f"{words.names(gone)} {words.has(gone)} ended at {words.places(gone.values())}, while "
            f"{words.names(beats)} {words.has(beats)} been at {words.places(beats.values())} for "
            f"{idle:.0f} s",
            tuple(gone),
        )
    culprits = behind(beats)
    return Verdict(f"{words.positions(beats, culprits)} for {idle:.0f} s", culprits)


def _gone(view: View, running: Mapping[int, Beat]) -> dict[int, Beat]:
    """Those done at an earlier step than all that still run, where these only wait."""
    if not all(beat.phase in VICTIMS for beat in running.values()):
        return {}
    first = min((beat.step for beat in running.values()), default=0)
    done = {p: s.beat for p, s in view.seen.items() if s.beat.state == DONE}
    return {p: beat for p, beat in done.items() if beat.step < first}


def behind(beats: Mapping[int, Beat]) -> tuple[int, ...]:
    """The processes that hold up the others, none where several are and all are alike.

    Those at the earliest step; of these, the ones that do not only wait for others.

    >>> where = {0: (42, "wait"), 1: (41, "input"), 2: (41, "wait")}
    >>> behind({p: Beat("h", 1, step=step, phase=phase) for p, (step, phase) in where.items()})
    (1,)
    """
    order = {p: (beat.step, VICTIMS.get(beat.phase, 0)) for p, beat in beats.items()}
    found = tuple(p for p in order if order[p] == min(order.values()))
    return () if len(found) == len(beats) > 1 else found
