"""The critical path: the chain of messages and waits that ends last, and where its seconds go."""

from bisect import bisect_left
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import fsum

from collc.errors import MachineError
from collc.language.ir import Ints
from collc.machine.simulation.jobs import Together
from collc.machine.simulation.outcome import Outcome
from collc.machine.simulation.record import Record
from collc.machine.units import seconds

# Where seconds go. "waiting": for a link or port that serves another message first; "fault": what slow
# and late ranks and slow links add; "native": XLA's own collective; "computing": of a whole step.
CAUSES = ("latency", "bytes", "waiting", "adding", "fault", "native", "computing")

_DUST = 1e-12


@dataclass(frozen=True)
class Leg:
    """A stretch of the critical path. Seconds.

    Attributes:
      rank: where it begins; ``to``: the rank that its message goes to, else None.
      title, step: the act that it is part of; track: where it is drawn beside others of its rank.
      link: the link or port that is busy or waited for; "" where there is none.
      behind: the message, (from, to), that is served first while this one waits; else None.
      message: its number in the record; -1 where it is none.
      parts: the seconds of this leg by cause.
    """

    start: float
    end: float
    rank: int
    to: int | None
    title: str
    step: int
    track: int = 0
    link: str = ""
    behind: tuple[int, int] | None = None
    message: int = -1
    parts: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, eq=False)
class Critical:
    """The legs of the critical path, first to last: each begins when the one before it ends."""

    legs: tuple[Leg, ...]

    @cached_property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by cause, those that occur; together they are the time of the whole."""
        each = [part for leg in self.legs for part in leg.parts]
        sums = {cause: fsum(t for own, t in each if own == cause) for cause in CAUSES}
        dust = _DUST * sum(sums.values())  # what rounding leaves of two equal times
        return {cause: t for cause, t in sums.items() if t > dust}

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks on it, in the order in which it passes them."""
        ends = [leg.to for leg in self.legs[-1:] if leg.to is not None]
        passed = [leg.rank for leg in self.legs] + ends
        return tuple(r for i, r in enumerate(passed) if not i or passed[i - 1] != r)

    @property
    def links(self) -> tuple[str, ...]:
        """The links on it, each once."""
        return tuple(dict.fromkeys(leg.link for leg in self.legs if leg.link))

    def __str__(self) -> str:
        total = self.legs[-1].end if self.legs else 0.0
        each = ", ".join(f"{cause} {seconds(t)}" for cause, t in self.seconds.items())
        ranks = [str(r) for r in self.ranks]
        way = " ".join(ranks if len(ranks) <= 12 else [*ranks[:6], "...", *ranks[-5:]])
        busiest = max(self.links, key=self._on, default="")
        return f"critical path: {seconds(total)} = {each or 'nothing'}\n  ranks {way}" + (
            f"\n  longest on {busiest}: {seconds(self._on(busiest))}" if busiest else ""
        )

    def _on(self, link: str) -> float:
        return fsum(leg.end - leg.start for leg in self.legs if leg.link == link)


def critical(outcome: Outcome) -> Critical:
    """The critical path of what was simulated with ``record=True``. Raises MachineError.

    From the rank that is done last back to the beginning: a step ended when its last message had
    arrived and been added, or its own had left; a message came through when the slowest on its way
    was free and through with it. Of equal causes the rank's own is taken.
    """
    if outcome.record is None:
        raise MachineError("nothing was recorded. Simulate with record=True.")
    if len(outcome.stalls):
        raise MachineError(
            f"{len(outcome.stalls):,} ranks never finish, so nothing ends last: see outcome.stalls."
        )
    return Critical(tuple(_Walk(outcome, outcome.record).legs())[::-1])


class _Walk:
    """Backwards through a record."""

    def __init__(self, outcome: Outcome, record: Record) -> None:
        self.outcome, self.record = outcome, record
        self.machine, self.damage = outcome.placement.machine, outcome.damage
        self.tracks = record.tracks
        self.steps: dict[tuple[int, int], list[int]] = {}  # the visits of a job by a rank
        visits = record.visits
        self.at: dict[tuple[int, int, int], int] = {}
        for v, (job, step, rank) in enumerate(
            zip(visits.job.tolist(), visits.step.tolist(), visits.rank.tolist(), strict=True)
        ):
            self.at[job, step, rank] = v
            self.steps.setdefault((job, rank), []).append(v)
        self.sent = _by(record.messages.job, record.messages.step, record.messages.src)
        self.come = _by(record.messages.job, record.messages.step, record.messages.dst)

    def legs(self) -> Iterator[Leg]:
        finish = self.record.visits.finish
        if not len(finish):
            return
        rank = int(self.outcome.finish.argmax())
        own = [vs[-1] for (_, r), vs in self.steps.items() if r == rank]
        at: int | None = max(own, key=lambda v: (finish[v], -v))
        while at is not None:
            rank = yield from self._visit(at)
            job, step = int(self.record.visits.job[at]), int(self.record.visits.step[at])
            here = self.at[job, step, rank]
            start = float(self.record.visits.start[here])
            at = self._earlier(job, rank, here)
            if at is None and start > 0:
                yield Leg(0.0, start, rank, None, "late", 0, parts=(("fault", start),))

    def _earlier(self, job: int, rank: int, visit: int) -> int | None:
        """The visit that a rank ended when this one began; None where it is the first."""
        own = self.steps[job, rank]
        if k := bisect_left(own, visit):
            return own[k - 1]
        found, todo = [], list(self.record.jobs[job].after)
        while todo:  # a job in which the rank does nothing is done when those before it are
            before = self.steps.get((j := todo.pop(), rank))
            if before:
                found.append(before[-1])
            else:
                todo += self.record.jobs[j].after
        return max(found, key=lambda v: (self.record.visits.finish[v], -v), default=None)

    def _visit(self, at: int) -> Generator[Leg, None, int]:
        """The legs of one step, last first. Returns the rank at which they begin."""
        visits, sends = self.record.visits, self.record.messages
        job, step, rank = (int(x[at]) for x in (visits.job, visits.step, visits.rank))
        start, end = float(visits.start[at]), float(visits.finish[at])
        act = self.record.jobs[job].act(step)
        said = act.title, int(self.record.jobs[job].steps[step]), self.tracks[job]
        if isinstance(act, Together):
            rank, start = self._last(job, step, act, rank)
            own = min(act.seconds, end - start)
            cause = "native" if act.sends else "computing"
            parts = _some((cause, own), ("fault", end - start - own))
            yield Leg(start, end, rank, None, *said, parts=parts)
            return rank
        sent, come = self.sent.get((job, step, rank), []), self.come.get((job, step, rank), [])
        slow = max(sent, key=lambda m: (sends.left[m], -m), default=None)
        last = max(come, key=lambda m: (sends.arrive[m], -m), default=None)
        if slow is not None and sends.left[slow] == end:
            yield from self._message(slow, said, through=self.outcome.model == "lowered")
            return rank
        least = max((float(sends.latency[m]) for m in (*sent, *come)), default=0.0)
        if last is None or (self.outcome.model == "lowered" and start + least == end):
            extra = least * (1 - 1 / float(self.damage.slow[rank]))
            parts = _some(("latency", end - start - extra), ("fault", extra))
            yield Leg(start, end, rank, None, *said, parts=parts)
            return rank
        arrive = float(sends.arrive[last])
        here = max(arrive, start)
        if here < end:
            extra = (end - here) * (1 - 1 / float(self.damage.slow[rank]))
            parts = _some(("adding", end - here - extra), ("fault", extra))
            yield Leg(here, end, rank, None, *said, parts=parts)
        if arrive <= start:  # it was there before the rank was
            return rank
        yield from self._message(last, said, through=True)
        return int(sends.src[last])

    def _last(self, job: int, step: int, act: Together, rank: int) -> tuple[int, float]:
        """Who came last to what a group does together, and when."""
        group = act.groups[:, (act.groups == rank).any(0)][:, 0].tolist()
        came = {r: float(self.record.visits.start[self.at[job, step, r]]) for r in group}
        latest = max(came.values())
        return (
            rank if came[rank] == latest else min(r for r in group if came[r] == latest)
        ), latest

    def _message(self, m: int, said: tuple[str, int, int], through: bool) -> Iterator[Leg]:
        """A message on what held it longest, until it was ``through`` or had left; then its wait."""
        sends, links = self.record.messages, len(self.machine.beta)
        src, dst = int(sends.src[m]), int(sends.dst[m])
        depart, late = float(sends.depart[m]), float(sends.latency[m])
        servers, begin = sends.servers[m].tolist(), sends.begin[m].tolist()
        service = sends.service[m].tolist()
        ways = [k for k, server in enumerate(servers) if 0 <= server < links]
        middle = ways[1:-1]
        own = [
            k
            for k, server in enumerate(servers)
            if server >= 0 and (through or k < len(servers) - 1)
        ]
        rest = {k: service[k] + (late if through and k in middle else 0.0) for k in own}
        at = max(own, key=lambda k: (begin[k] + rest[k], -k))
        end = float(sends.arrive[m] if through else sends.left[m])
        if begin[at] + rest[at] < end or begin[at] == depart:  # nobody was in the way
            at = next(k for k in ways if servers[k] == sends.link[m])
            start, latency = depart, late if through else late / self.machine.ports
        else:
            start = begin[at]
            latency = (late if through else 0.0) if at in middle else late / self.machine.ports
        latency = min(latency, end - start)
        link = servers[at]
        parts = self._parts(src, link if link < links else None, latency, end - start - latency)
        name = self._name(link)
        to = dst if through else None
        yield Leg(start, end, src, to, *said, name, message=m, parts=parts)
        if start > depart:
            first = int(sends.before[m, at])
            behind = int(sends.src[first]), int(sends.dst[first])
            wait = (("waiting", start - depart),)
            yield Leg(depart, start, src, None, *said, name, behind, m, wait)

    def _parts(
        self, src: int, link: int | None, latency: float, bytes: float
    ) -> tuple[tuple[str, float], ...]:
        slow = float(self.damage.slow[src])
        worse = slow
        if link is not None:
            worse *= float(self.damage.beta[link] / self.machine.beta[link])
        healthy, own = latency / slow, bytes / worse
        fault = latency - healthy + (bytes - own)
        return _some(("latency", healthy), ("bytes", own), ("fault", fault))

    def _name(self, server: int) -> str:
        links = len(self.machine.beta)
        if server < links:
            return self.machine.name(server)
        device, into = divmod(server - links, 2)
        return f"device{device} port {'in' if into else 'out'}"


def _some(*parts: tuple[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(part for part in parts if part[1])


def _by(job: Ints, step: Ints, rank: Ints) -> dict[tuple[int, int, int], list[int]]:
    """The messages of each act of each rank."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for m, key in enumerate(zip(job.tolist(), step.tolist(), rank.tolist(), strict=True)):
        found.setdefault(key, []).append(m)
    return found
