"""A job under way: at which of its acts every rank is, and what it waits for there."""

import numpy as np

from collc.language.ir import Ints
from collc.machine.simulation.jobs import Job, Sends, Together
from collc.machine.simulation.tables import Desk, Table, agenda
from collc.machine.topology import Floats


class Track:
    """A job under way, in arrays over ranks.

    Attributes:
      at: how many of its steps a rank has done; ``agenda.count`` is how many there are for it.
      start: when its step began; inf where it has not.
      ready: the same, until its messages have left; then inf.
      bound: the earliest time at which anybody can go on because of them.
      left: when its messages have left and what the act takes at least is over.
      gone: whether they have.
      done: when the job was done at a rank; inf until then.
    """

    def __init__(self, job: Job, desk: Desk) -> None:
        n = desk.ranks
        self.job, self.desk, self.agenda = job, desk, agenda(job, desk)
        self.at = np.zeros(n, np.int64)
        self.start, self.ready, self.bound = (np.full(n, np.inf) for _ in range(3))
        self.left, self.done = np.full(n, np.inf), np.full(n, np.inf)
        self.gone = np.zeros(n, bool)
        self.need, self.adding = np.zeros(n, np.int64), np.zeros(n)
        # What has come for the steps that are next, in turn: how many messages, and the latest.
        self.got, self.latest = np.zeros((1, n), np.int64), np.full((1, n), -np.inf)
        self.meetings: dict[int, tuple[Ints, Ints, Floats]] = {}

    def step(self, rank: Ints) -> Ints:
        return self.agenda.step(rank, self.at[rank])

    def enter(self, rank: Ints, time: Floats) -> Ints:
        """Ranks begin their next step. Returns those that may be through with it at once."""
        self.start[rank] = time
        which = self.job.order[self.step(rank)]
        again = []
        for a in np.unique(which).tolist():
            own, act = rank[which == a], self.job.acts[a]
            if isinstance(act, Together):
                again.append(self._meet(a, act, own))
                continue
            table = self.desk.table(act)
            self.need[own], self.adding[own] = table.need[own], table.adding[own]
            self.left[own] = self.start[own] + table.least[own]
            sends = table.sends[own]
            self.gone[own] = ~sends
            send = own[sends]
            self.ready[send] = self.start[send]
            self.bound[send] = self.start[send] + table.look[send]
            again.append(own[~sends])
        return np.concatenate(again) if again else rank[:0]

    def _meet(self, a: int, act: Together, rank: Ints) -> Ints:
        """Ranks come to what their groups do together. Returns the members of those now complete."""
        if a not in self.meetings:
            size, groups = act.groups.shape
            group = np.full(self.desk.ranks, -1)
            group[act.groups] = np.arange(groups)
            self.meetings[a] = group, np.full(groups, size), np.full(groups, -np.inf)
        group, missing, last = self.meetings[a]
        self.need[rank], self.adding[rank] = 1, 0.0
        self.left[rank], self.gone[rank] = self.start[rank], True
        own = group[rank]
        np.subtract.at(missing, own, 1)
        np.maximum.at(last, own, self.start[rank])
        full = np.unique(own[missing[own] == 0])
        members = act.groups[:, full]
        end = last[full] + self.desk.seconds(act)[full]
        self.deliver(
            self.step(members.reshape(-1)), members.reshape(-1), np.tile(end, len(members))
        )
        return members.reshape(-1)

    def leaving(self, before: float) -> tuple[Ints, Ints]:
        """The ranks whose messages leave now, and their steps: earlier than that, or bound by it."""
        rank = np.flatnonzero((self.ready < before) | (self.bound <= before))
        step = self.step(rank)
        self.ready[rank] = self.bound[rank] = np.inf
        self.gone[rank] = True
        return rank, step

    def deliver(self, step: Ints, dst: Ints, arrive: Floats) -> None:
        """Messages arrive, each for a step of its receiver that is the present one or later."""
        depth = len(self.got)
        ahead = int((step - self.step(dst)).max(initial=0))
        if ahead >= depth:
            self._deepen(1 << ahead.bit_length())
            depth = len(self.got)
        np.add.at(self.got, (step % depth, dst), 1)
        np.maximum.at(self.latest, (step % depth, dst), arrive)

    def _deepen(self, depth: int) -> None:
        n, old = self.desk.ranks, len(self.got)
        rank = np.arange(n)
        now = self.step(rank)
        got, latest = np.zeros((depth, n), np.int64), np.full((depth, n), -np.inf)
        for k in range(old):
            got[(now + k) % depth, rank] = self.got[(now + k) % old, rank]
            latest[(now + k) % depth, rank] = self.latest[(now + k) % old, rank]
        self.got, self.latest = got, latest

    def settle(self, rank: Ints) -> tuple[Ints, Ints, Floats, Floats]:
        """Of some ranks those that are through with their step: they, the steps, from when to when."""
        rank = rank[self.gone[rank]]
        step = self.step(rank)
        slot = step % len(self.got)
        through = self.got[slot, rank] == self.need[rank]
        rank, step, slot = rank[through], step[through], slot[through]
        come = np.maximum(self.start[rank], self.latest[slot, rank])
        end = np.maximum(self.left[rank], come + self.adding[rank])
        ever = np.isfinite(end)  # else a message was lost: it waits for good
        rank, step, slot, end = rank[ever], step[ever], slot[ever], end[ever]
        self.got[slot, rank], self.latest[slot, rank] = 0, -np.inf
        start = self.start[rank]
        self.gone[rank] = False
        self.start[rank] = np.inf
        self.at[rank] += 1
        return rank, step, start, end

    def table(self, step: int) -> Table | None:
        """The messages of a step; None where a group does something together."""
        act = self.job.act(step)
        return self.desk.table(act) if isinstance(act, Sends) else None
