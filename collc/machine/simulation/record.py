"""What was simulated, message by message: arrays, never one object per message."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from collc.errors import MachineError
from collc.language.ir import Ints
from collc.machine.simulation.jobs import Job
from collc.machine.topology import Floats

MOST_RECORDED = 1 << 20  # messages: a few hundred bytes each
MOST_VISITED = 2 * MOST_RECORDED


@dataclass(frozen=True, eq=False)
class Sent:
    """Messages in the order in which they were sent, [m]. Seconds and bytes.

    Attributes:
      job, step: the act; src, dst: ranks.
      latency: the part of its time that is latency.
      link: the link of its way on which its bytes take longest, the first of equal ones.
      depart, left, arrive: when it was sent, had left its rank, and was there; inf is never.
      servers: what it needed: the port out, the links of its way, the port in; -1 is none. [m, k]
      begin, service: when each of them began to serve it, and for how long. [m, k]
    """

    job: Ints
    step: Ints
    src: Ints
    dst: Ints
    bytes: Floats
    latency: Floats
    link: Ints
    depart: Floats
    left: Floats
    arrive: Floats
    servers: Ints
    begin: Floats
    service: Floats

    def __len__(self) -> int:
        return len(self.src)

    @cached_property
    def start(self) -> Floats:
        """When its link began to serve it; where it gets lost, when it was sent."""
        on = self.servers == self.link[:, None]
        return self.begin[np.arange(len(self)), on.argmax(1)]

    @cached_property
    def before(self) -> Ints:
        """The message that each server served before this one, [m, k]; -1 where there was none."""
        flat = self.servers.reshape(-1)
        order = np.argsort(flat, kind="stable")
        found = np.full(len(flat), -1)
        same = flat[order[1:]] == flat[order[:-1]]
        found[order[1:][same]] = order[:-1][same] // self.servers.shape[1]
        found[flat < 0] = -1
        return found.reshape(self.servers.shape)


@dataclass(frozen=True, eq=False)
class Visits:
    """Steps of ranks, [v]: of which job, which, by which rank, from when to when; inf is never."""

    job: Ints
    step: Ints
    rank: Ints
    start: Floats
    finish: Floats

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(frozen=True, eq=False)
class Record:
    """What was simulated: the jobs, their messages, and when each rank did its steps."""

    jobs: tuple[Job, ...]
    messages: Sent
    visits: Visits

    def title(self, job: int, step: int) -> str:
        """What an act is called, as ``ring.all_reduce @ gpu``."""
        return self.jobs[job].act(step).title

    @cached_property
    def phases(self) -> tuple[str, ...]:
        """The titles of all acts, each once, in their order."""
        return tuple(dict.fromkeys(act.title for job in self.jobs for act in job.acts))

    @cached_property
    def tracks(self) -> tuple[int, ...]:
        """For each job a track: those that may be under way at once at a rank have different ones."""
        before: list[set[int]] = []
        found: list[int] = []
        for job in self.jobs:
            before.append(set(job.after).union(*(before[k] for k in job.after)))
            taken = {found[k] for k in range(len(found)) if k not in before[-1]}
            wish = [found[k] for k in job.after[::-1]]  # best where what it is behind was
            found.append(next(t for t in (*wish, *range(len(found) + 1)) if t not in taken))
        return tuple(found)

    @cached_property
    def width(self) -> int:
        """How many tracks a rank has."""
        return max(self.tracks, default=0) + 1


class Recorder:
    """Collects batches. Raises MachineError where they are too many."""

    def __init__(self, jobs: tuple[Job, ...]) -> None:
        self.jobs = jobs
        self.sent: list[tuple[Any, ...]] = []
        self.seen: list[tuple[Any, ...]] = []
        self.count = self.visited = 0

    def messages(self, *columns: Any) -> None:
        self.count += len(columns[0])
        self._few_enough(self.count, MOST_RECORDED, "messages")
        self.sent.append(columns)

    def visits(self, job: int, step: Ints, rank: Ints, start: Floats, finish: Floats) -> None:
        self.visited += len(rank)
        self._few_enough(self.visited, MOST_VISITED, "steps of ranks")
        self.seen.append((np.full(len(rank), job), step, rank, start, finish))

    def _few_enough(self, count: int, most: int, what: str) -> None:
        if count > most:
            raise MachineError(
                f"more than the {most:,} {what} that can be recorded. "
                "Simulate without record, or on fewer ranks."
            )

    def done(self) -> Record:
        return Record(self.jobs, _joined(Sent, self.sent), _joined(Visits, self.seen))


def _joined(kind: Any, batches: list[tuple[Any, ...]]) -> Any:
    names = [f.name for f in fields(kind)]
    if not batches:
        wide = {"servers", "begin", "service"}
        return kind(*(np.zeros((0, 3) if name in wide else 0) for name in names))
    return kind(*(np.concatenate([batch[i] for batch in batches]) for i in range(len(names))))
