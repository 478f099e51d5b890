"""A schedule on a machine, each rank at its own pace: no step waits for ranks that it does not need.

A rank sends all messages of a step at once, and goes on when they have left, all that it receives in the
step has arrived, and what is to be added has been added. A port or a link serves its messages in the
order in which they were sent (ties: by round, then by rank), each for its bytes; a device's ports and
own links for the latency too, divided by its ports. No link waits for another: a message has arrived
when the slowest on its way is through with it, and its latency is over. In the lowered model a
message has left only when it has arrived: so long NCCL is busy with sending it. Parts side by side
add as if each had the adders of its rank for itself.

How it scales: messages that leave before anybody can go on because of one of them are served in one
batch, in arrays. The order, and so the result, is that of serving them one by one, to the last digit.
"""

from collections.abc import Sequence

import numpy as np

from collc.language.ir import Ints
from collc.machine.flow import Flow
from collc.machine.lowered import ELEMENT
from collc.machine.placement import Placement
from collc.machine.simulation.faults import Fault
from collc.machine.simulation.jobs import Job, Model, jobs
from collc.machine.simulation.outcome import Outcome
from collc.machine.simulation.queues import serve
from collc.machine.simulation.record import Recorder
from collc.machine.simulation.stalls import stalls
from collc.machine.simulation.tables import Desk, Table
from collc.machine.simulation.track import Track
from collc.machine.topology import Floats


def simulate(
    flow: Flow,
    placement: Placement,
    size: float,
    faults: Sequence[Fault] = (),
    *,
    model: Model = "abstract",
    element: int = ELEMENT,
    record: bool = False,
) -> Outcome:
    """When each rank is done with a schedule for ``size`` bytes, the whole buffer of a rank.

    Args:
      model: "abstract", steps on the links; or "lowered", what XLA runs: a launch for each round,
        whole chunks of elements of ``element`` bytes, one collective at a time.
      record: keep when each message was sent and arrived, for timelines and the critical path.

    Without faults it may still take longer than the price in lock-step: where messages of ranks that
    are ahead take a shared link or port before those of ranks that are behind, which then wait for
    what in lock-step would come later. So on four DGX H100 ``halving.all_reduce`` of 512 MiB takes 8 %
    longer, and ``bruck.all_to_all`` 4 %; doubling over three ranks, of latencies alone, a third.

    Raises MachineError where a fault names what is not there, where XLA's own is to be simulated in
    the abstract model or with broken links, or where there is too much to record.
    """
    made = jobs(flow, placement, size, model, element)
    return run(made, Desk(placement, faults, model), str(flow.schedule), size, model, record)


def run(
    made: Sequence[Job], desk: Desk, title: str, size: float, model: Model, record: bool
) -> Outcome:
    """What happens when ranks do these jobs: see ``simulate``."""
    desk.allowed(made)
    recorder = Recorder(tuple(made)) if record else None
    engine = _Engine(tuple(made), desk, recorder)
    engine.run()
    if recorder:
        for j, track in enumerate(engine.tracks):  # steps that are never over
            rank = np.flatnonzero(np.isfinite(track.start))
            recorder.visits(
                j, track.step(rank), rank, track.start[rank], np.full(len(rank), np.inf)
            )
    finish = np.max([desk.damage.late, *(track.done for track in engine.tracks)], axis=0)
    finish[desk.damage.dead] = np.inf
    return Outcome(
        title=title,
        placement=desk.placement,
        size=size,
        model=model,
        faults=desk.faults,
        seconds=float(finish.max()),
        finish=finish,
        stalls=stalls(engine.tracks, desk, finish),
        without_effect=desk.without_effect(track.agenda for track in engine.tracks),
        damage=desk.damage,
        record=recorder.done() if recorder else None,
    )


class _Engine:
    def __init__(self, made: tuple[Job, ...], desk: Desk, recorder: Recorder | None) -> None:
        self.desk, self.recorder = desk, recorder
        self.tracks = [Track(job, desk) for job in made]
        self.behind = [
            [q for q, job in enumerate(made) if j in job.after] for j in range(len(made))
        ]
        n = desk.ranks
        self.missing = [np.full(n, len(job.after)) for job in made]
        self.begin = [desk.damage.late.copy() for _ in made]
        self.todo: list[tuple[int, Ints]] = []  # jobs that begin at ranks
        self.free = np.zeros(desk.servers)

    def run(self) -> None:
        alive = np.flatnonzero(~self.desk.damage.dead)
        self.todo = [(j, alive) for j, track in enumerate(self.tracks) if not track.job.after]
        self._begin()
        while np.isfinite(before := min((t.bound.min() for t in self.tracks), default=np.inf)):
            self._window(float(before))

    def _window(self, before: float) -> None:
        """All messages that leave before anybody can go on because of one of them."""
        batches: list[tuple[int, Ints, Table, Ints]] = []
        for j, track in enumerate(self.tracks):
            rank, step = track.leaving(before)
            which = track.job.order[step]
            for a in np.unique(which).tolist():
                own = which == a
                table = track.table(int(step[own][0]))
                assert table is not None
                batches.append((j, rank[own], table, step[own]))
        senders = [(j, rank) for j, rank, _, _ in batches]
        rows, steps, came = [], [], []
        for j, rank, table, step in batches:
            chosen = np.full(self.desk.ranks, -1)
            chosen[rank] = step
            own = np.flatnonzero(chosen[table.src] >= 0)
            rows.append(own)
            steps.append(chosen[table.src[own]])
            came.append(self.tracks[j].start[table.src[own]])
        leave, arrive = self._serve([(j, t) for j, _, t, _ in batches], rows, steps, came)
        at = 0
        changed: dict[int, list[Ints]] = {}
        for (j, _, table, _), own, step in zip(batches, rows, steps, strict=True):
            track, here = self.tracks[j], slice(at, at + len(own))
            np.maximum.at(track.left, table.src[own], leave[here])
            track.deliver(step, table.dst[own], arrive[here])
            current = track.step(table.dst[own]) == step
            changed.setdefault(j, []).append(table.dst[own[current]])
            at += len(own)
        for j, rank in senders:
            changed[j].append(rank)
        for j, found in changed.items():
            self._settle(j, np.unique(np.concatenate(found)))
        self._begin()

    def _serve(
        self,
        batches: list[tuple[int, Table]],
        rows: list[Ints],
        steps: list[Ints],
        came: list[Floats],
    ) -> tuple[Floats, Floats]:
        """When these messages have left and arrived, in the order of the batches."""

        def of(name: str) -> np.ndarray:
            found = [getattr(t, name)[own] for (_, t), own in zip(batches, rows, strict=True)]
            return found[0] if len(found) == 1 else np.concatenate(found)

        come = came[0] if len(came) == 1 else np.concatenate(came)
        same = len(batches) == 1 and bool((come == come[0]).all())
        job = np.repeat([j for j, _ in batches], [len(own) for own in rows])
        key = of("key")
        order = np.arange(len(come)) if same else np.lexsort((job, key, come))
        servers, service, floor = of("servers")[order], of("service")[order], of("floor")[order]
        begin = serve(servers, service, come[order], self.free)
        on = servers >= 0
        end = np.where(on, begin + service, -np.inf)
        late = np.where(np.isfinite(floor), -np.inf, np.inf)  # a message that is lost never leaves
        left = np.maximum(late, end[:, :-1].max(1))
        through = np.where(on, begin + of("passing")[order], -np.inf).max(1)
        arrived = np.maximum(through, come[order] + floor)
        if self.desk.constants:  # NCCL is through with sending when it has been received
            left = np.maximum(late, arrived)
        if self.recorder:
            step = np.concatenate(steps)[order]
            fixed = [of(name)[order] for name in ("src", "dst", "bytes", "latency", "link")]
            self.recorder.messages(
                job[order], step, *fixed, come[order], left, arrived, servers, begin, service
            )
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return left[back], arrived[back]

    def _settle(self, j: int, rank: Ints) -> None:
        """Ranks that are through with their step go on to the next, as long as that is through too."""
        track = self.tracks[j]
        while len(rank):
            rank, step, start, end = track.settle(rank)
            if self.recorder:
                self.recorder.visits(j, step, rank, start, end)
            more = track.at[rank] < track.agenda.count[rank]
            self._done(j, rank[~more], end[~more])
            rank = track.enter(rank[more], end[more])

    def _done(self, j: int, rank: Ints, end: Floats) -> None:
        self.tracks[j].done[rank] = end
        for q in self.behind[j] if len(rank) else ():
            self.begin[q][rank] = np.maximum(self.begin[q][rank], end)
            self.missing[q][rank] -= 1
            self.todo.append((q, rank[self.missing[q][rank] == 0]))

    def _begin(self) -> None:
        """Jobs begin where all that they are behind are done."""
        while self.todo:
            j, rank = self.todo.pop()
            busy = self.tracks[j].agenda.count[rank] > 0
            self._done(j, rank[~busy], self.begin[j][rank[~busy]])
            rank = rank[busy]
            if len(rank):
                self._settle(j, self.tracks[j].enter(rank, self.begin[j][rank]))
