"""What was simulated as bars in lanes, one for each rank or link; and as a trace for Perfetto."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from collc.errors import MachineError
from collc.machine.simulation.jobs import Together
from collc.machine.simulation.outcome import Outcome
from collc.machine.simulation.record import Record

Lanes = Literal["rank", "link"]
LANES = get_args(Lanes)
_NAMED = 4  # partners that an event names


@dataclass(frozen=True)
class Bar:
    """A stretch of a lane. Seconds.

    Attributes:
      lane: ``rank * width + track``, of as many tracks as are needed; or the link.
      phase: the index of its leaf in ``record.phases``; ``step`` of it.
      start, end: of a step of a rank, from its beginning until it is over; of a link, while it is busy.
      waits: the stretches of it in which the rank neither sends, receives nor adds.
      args: what a viewer shows of it.
    """

    lane: int
    phase: int
    step: int
    start: float
    end: float
    waits: tuple[tuple[float, float], ...]
    args: dict[str, Any]


@dataclass(frozen=True)
class Noted:
    """What a profiler noted on a device. Seconds from the first that it noted on.

    ``title``: of a schedule's leaf, as predicted ones have it; ``round``: as "r3", "" where it is none.
    """

    device: int
    title: str
    round: str
    start: float
    end: float


def recorded(outcome: Outcome) -> Record:
    """What was recorded. Raises MachineError where nothing was."""
    if outcome.record is None:
        raise MachineError("nothing was recorded. Simulate with record=True.")
    return outcome.record


def horizon(outcome: Outcome) -> float:
    """When the last thing happens that ever does."""
    record = recorded(outcome)
    times = (
        record.visits.start,
        record.visits.finish,
        record.messages.arrive,
        record.messages.left,
    )
    return max((float(t[np.isfinite(t)].max(initial=0.0)) for t in times), default=0.0)


def bars(outcome: Outcome, lanes: Lanes) -> list[Bar]:
    """All bars. Raises MachineError where nothing was recorded, there are no such lanes, or no bars."""
    if lanes not in LANES:
        raise MachineError(f"there are no lanes by {lanes!r}. Say {' or '.join(LANES)}.")
    record = recorded(outcome)
    made = _of_ranks if lanes == "rank" else _of_links
    if not (found := list(made(outcome, record))):
        raise MachineError(f"nothing happens on any {lanes} that could be drawn: {outcome.title}.")
    return found


def _of_ranks(outcome: Outcome, record: Record) -> Iterator[Bar]:
    sends, visits, last = record.messages, record.visits, horizon(outcome)
    phase = {title: i for i, title in enumerate(record.phases)}
    track = record.tracks
    to, come = defaultdict(list), defaultdict(list)
    for m, key in enumerate(zip(sends.job.tolist(), sends.step.tolist(), strict=True)):
        to[*key, int(sends.src[m])].append(m)
        come[*key, int(sends.dst[m])].append(m)
    columns = (visits.job, visits.step, visits.rank, visits.start, visits.finish)
    for job, step, rank, start, finish in zip(*(c.tolist() for c in columns), strict=True):
        act, end = record.jobs[job].act(step), min(finish, last)
        own, got = to.get((job, step, rank), []), come.get((job, step, rank), [])
        if isinstance(act, Together):
            slow = float(outcome.damage.slow[act.groups[:, (act.groups == rank).any(0)]].max())
            busy = [(max(start, end - act.seconds * slow), end)] if finish <= last else []
        else:
            busy = [(float(sends.start[m]), float(sends.left[m])) for m in own]
            busy += [(float(sends.start[m]), float(sends.arrive[m])) for m in got]
            busy = [(max(s, start), e) for s, e in busy if np.isfinite(e)]
            if finish <= last and busy:
                busy.append((max(start, max(e for _, e in busy)), end))
        yield Bar(
            lane=rank * record.width + track[job],
            phase=phase[act.title],
            step=int(record.jobs[job].steps[step]),
            start=start,
            end=end,
            waits=tuple(_gaps(busy, start, end)),
            args={
                "bytes sent": float(sends.bytes[own].sum()),
                "to": _ranks(sends.dst[own].tolist()),
                "bytes received": float(sends.bytes[got].sum()),
                "from": _ranks(sends.src[got].tolist()),
                "share of the buffer sent": float(sends.bytes[own].sum()) / outcome.size,
            }
            | ({"never over": True} if finish > last else {}),
        )


def _of_links(outcome: Outcome, record: Record) -> Iterator[Bar]:
    sends, links = record.messages, len(outcome.placement.machine.beta)
    phase = {title: i for i, title in enumerate(record.phases)}
    rows, columns = np.nonzero((sends.servers >= 0) & (sends.servers < links))
    for m, k in zip(rows.tolist(), columns.tolist(), strict=True):
        job, step = int(sends.job[m]), int(sends.step[m])
        begin = float(sends.begin[m, k])
        yield Bar(
            lane=int(sends.servers[m, k]),
            phase=phase[record.title(job, step)],
            step=int(record.jobs[job].steps[step]),
            start=begin,
            end=begin + float(sends.service[m, k]),
            waits=(),
            args={
                "bytes": float(sends.bytes[m]),
                "share of the buffer": float(sends.bytes[m]) / outcome.size,
                "from": int(sends.src[m]),
                "to": int(sends.dst[m]),
                "waited in us": (begin - float(sends.depart[m])) * 1e6,
            },
        )


def _gaps(
    busy: list[tuple[float, float]], start: float, end: float
) -> Iterator[tuple[float, float]]:
    here = start
    for s, e in sorted(busy):
        if s > here:
            yield here, min(s, end)
        here = max(here, e)
        if here >= end:
            return
    if here < end:
        yield here, end


def _ranks(own: list[int]) -> str:
    more = [f"and {len(own) - _NAMED} more"] if len(own) > _NAMED else []
    return ", ".join([*map(str, own[:_NAMED]), *more])


def lane_name(outcome: Outcome, lanes: Lanes, lane: int) -> tuple[int, str]:
    """The node of a lane, and what the lane is called; racks come after the nodes."""
    machine = outcome.placement.machine
    if lanes == "link":
        own = len(machine.node.links)
        node = lane // own if lane < own * machine.nodes else machine.nodes
        return node, machine.name(lane)
    rank, track = divmod(lane, recorded(outcome).width)
    device = int(outcome.placement.order[rank])
    other = "" if device == rank else f" (device {device})"
    return int(machine.node_of(device)), f"rank {rank}{other}" + (
        "" if not track else f" ({track + 1})"
    )


def chrome(
    outcome: Outcome, lanes: Lanes = "rank", measured: Sequence[Noted] = ()
) -> dict[str, Any]:
    """The trace event format, as ui.perfetto.dev and chrome://tracing open it: ``json.dump`` it.

    A process for each node, a thread for each rank or link; times in microseconds. A step of a rank is
    one event with an event "waiting" inside for each stretch in which nothing of its own is under way.
    What was ``measured`` is a further process, a thread for each device. Raises MachineError where
    nothing was recorded, or there are no such lanes.
    """
    record = recorded(outcome)
    events = list(bars(outcome, lanes))
    names = {lane: lane_name(outcome, lanes, lane) for lane in sorted({bar.lane for bar in events})}
    machine = outcome.placement.machine
    head: list[dict[str, Any]] = []
    for node in sorted({node for node, _ in names.values()}):
        name = f"node {node}" if node < machine.nodes else "between racks"
        head.append(_meta("process_name", node, 0, name=name))
        head.append(_meta("process_sort_index", node, 0, sort_index=node))
    for lane, (node, name) in names.items():
        head.append(_meta("thread_name", node, lane, name=name))
        head.append(_meta("thread_sort_index", node, lane, sort_index=lane))
    body: list[dict[str, Any]] = []
    for bar in events:
        place = _place(names[bar.lane][0], bar.lane)
        title = record.phases[bar.phase]
        named = {"step": bar.step, "schedule": title} | bar.args
        body.append(_span(f"{title} step {bar.step}", title, bar.start, bar.end, place, named))
        body += [_span("waiting", "waiting", s, e, place, {}) for s, e in bar.waits]
    real = machine.nodes + 1
    if measured:
        head.append(_meta("process_name", real, 0, name="measured"))
        head.append(_meta("process_sort_index", real, 0, sort_index=real))
    for device in sorted({noted.device for noted in measured}):
        head.append(_meta("thread_name", real, device, name=f"device {device}"))
    for noted in measured:
        place = _place(real, noted.device)
        name = f"{noted.title} {noted.round}".strip() or "XLA's own"
        body.append(_span(name, noted.title, noted.start, noted.end, place, {}))
    return {
        "traceEvents": head + body,
        "displayTimeUnit": "ns",
        "otherData": {
            "schedule": outcome.title,
            "machine": str(machine),
            "bytes": outcome.size,
            "model": outcome.model,
            "faults": [str(fault) for fault in outcome.faults],
            "seconds": outcome.seconds if np.isfinite(outcome.seconds) else "never",
        },
    }


def _place(process: int, thread: int) -> dict[str, int]:
    """Perfetto takes 0 for none."""
    return {"pid": process + 1, "tid": thread + 1}


def _meta(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "args": args} | _place(pid, tid)


def _span(
    name: str, category: str, start: float, end: float, place: dict[str, int], args: dict[str, Any]
) -> dict[str, Any]:
    own = {"ph": "X", "name": name, "cat": category, "ts": start * 1e6, "dur": (end - start) * 1e6}
    return own | place | ({"args": args} if args else {})
