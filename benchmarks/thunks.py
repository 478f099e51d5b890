"""Which collectives XLA:GPU would have in flight together, from thunk sequences of --xla_dump_to.

A thunk is what a process launches, in this order. An asynchronous one is started on a stream of its
own and ended by a later thunk; all others are launched on the main stream, one after the other.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from collc.receipts.hlo import KINDS, parse_hlo

_THUNK = re.compile(r" *\d+: k(\w+) +\[[^\]]*\] *(.*)")
_START = re.compile(r"stream=(\S+), async_id=(\d+)")
_DONE = re.compile(r"async_id=(\d+)")


@dataclass(frozen=True)
class Event:
    """A collective starts, is done, or runs from start to end while the main stream waits."""

    what: str  # "start", "done", "run"
    number: int  # in the order of launches
    kind: str
    axis: str
    stream: str
    executions: int


def events(sequence: str, hlo: str, gpus: int) -> Iterator[Event]:
    """The collectives in the order of the thunks, which is that in which a process launches them.

    A thunk does not say among whom: it is the collective that has its place in the scheduled HLO.
    """
    kinds = {"".join(word.capitalize() for word in kind.split("-")): kind for kind in KINDS}
    left = list(parse_hlo(hlo))[::-1]
    running: dict[str, Event] = {}
    start: tuple[str, str] | None = None  # the stream and the number of an asynchronous thunk
    number = 0
    for kind, rest in _THUNK.findall(sequence):
        if kind == "AsyncStart" and (found := _START.match(rest)):
            start = found[1], found[2]
        elif kind == "AsyncDone" and (found := _DONE.match(rest)):
            if (started := running.pop(found[1], None)) is not None:
                yield replace(started, what="done")
        elif kind in kinds:
            if not left or left[-1].kind != kinds[kind]:
                raise ValueError(f"thunk {number} is a {kind}, but the HLO has {left[-1:]} there")
            c, number = left.pop(), number + 1
            what, stream = ("start", start[0]) if start else ("run", "main")
            axis = axis_of(c.partners, gpus)
            made = Event(what, number, c.kind, axis, stream, c.count)
            if start:
                running[start[1]] = made
            start = None
            yield made
        else:
            start = None  # what the asynchronous thunk runs is no collective
    if left or running:
        raise ValueError(f"no thunk for {left[::-1]}, or no end of {running}")


def axis_of(groups: tuple[tuple[int, ...], ...], gpus: int) -> str:
    """Along which axis of (host, gpu) these devices talk."""
    crosses = any(len({d // gpus for d in g}) > 1 for g in groups)
    within = any(len({d % gpus for d in g}) > 1 for g in groups)
    return "host and gpu" if crosses and within else "host" if crosses else "gpu"


def judge(found: list[Event]) -> dict[str, Any]:
    """How many are in flight together at most, and how many between hosts have company within."""
    flying: dict[int, Event] = {}
    begun: list[Event] = []
    most, joined = 0, set[int]()
    for event in found:
        if event.what == "done":
            del flying[event.number]
            continue
        begun.append(event)
        others = [e for e in flying.values() if e.stream != event.stream]
        most = max(most, 1 + len({e.stream for e in others}))
        for other in others:
            if {event.axis, other.axis} == {"host", "gpu"}:
                joined |= {e.number for e in (event, other) if e.axis == "host"}
        if event.what == "start":
            flying[event.number] = event
    return {
        "collectives": sum(e.executions for e in begun),
        "most": most,
        "host": sum(e.executions for e in begun if e.axis == "host"),
        "joined": sum(e.executions for e in begun if e.number in joined),
    }


def shown(found: list[Event]) -> list[str]:
    """The launches, indented by what is in flight."""
    lines, depth = [], 0
    for event in found:
        depth -= event.what == "done"
        lines.append(f"{'    ' * depth}{event.what} {event.kind} {event.number} over {event.axis}")
        if event.what != "done":
            lines[-1] += f", {event.stream}" + (" stream" if event.what == "run" else "")
        depth += event.what == "start"
    return lines
