"""A whole train step: forward, backward, and the gradients reduced bucket by bucket meanwhile."""

import math
from collections.abc import Sequence

import numpy as np

from collc.errors import MachineError
from collc.language.algebra import Schedule
from collc.machine.flow import flow
from collc.machine.lowered import ELEMENT
from collc.machine.placement import Placement
from collc.machine.simulation.faults import Fault
from collc.machine.simulation.jobs import Job, Model, Together, behind, ends, jobs
from collc.machine.simulation.outcome import Outcome
from collc.machine.simulation.simulate import run
from collc.machine.simulation.tables import Desk

FORWARD = 1 / 3  # of the computing: the backward multiplies twice where the forward does once
MOST_BUCKETS = 1024


def step_timeline(
    schedules: Schedule | Sequence[Schedule],
    placement: Placement,
    compute_seconds: float,
    parameter_bytes: float,
    buckets: int = 1,
    overlap: bool = True,
    faults: Sequence[Fault] = (),
    *,
    model: Model = "lowered",
    element: int = ELEMENT,
    record: bool = True,
) -> Outcome:
    """A train step of ``compute_seconds`` on every rank, a third forward and two thirds backward.

    Args:
      schedules: one for all buckets, or one for each, in the order in which they are reduced.
      parameter_bytes: of all gradients; a bucket is an equal share of them.
      buckets: each is reduced when its share of the backward is done, and the bucket before it is.
      overlap: otherwise the first is reduced when the whole backward is done.
      faults: a slow rank computes as much slower.

    Raises MachineError for what cannot be, else what ``simulate`` does.
    """
    if not (math.isfinite(compute_seconds) and compute_seconds >= 0):
        raise MachineError(f"{compute_seconds} s of computing cannot be. Give 0 s or more.")
    if not 1 <= buckets <= MOST_BUCKETS:
        raise MachineError(f"{buckets} buckets cannot be. Give 1 to {MOST_BUCKETS:,}.")
    each = [schedules] * buckets if isinstance(schedules, Schedule) else list(schedules)
    if len(each) != buckets:
        raise MachineError(
            f"{len(each)} schedules for {buckets} buckets. Give one, or one for each."
        )
    flows = {schedule: flow(schedule, placement.sizes) for schedule in each}
    own = {
        schedule: jobs(what, placement, parameter_bytes / buckets, model, element)
        for schedule, what in flows.items()
    }
    made = [_computing("forward", compute_seconds * FORWARD, placement, ())]
    backward = compute_seconds * (1 - FORWARD) / buckets
    for i in range(buckets):
        made.append(_computing("backward", backward, placement, (i,)))
    last: tuple[int, ...] = ()
    for i, schedule in enumerate(each):
        ready = i + 1 if overlap else buckets
        more = own[schedule]
        at = len(made)
        made += behind(more, at, (ready, *last))
        last = tuple(k + at for k in ends(more))
    names = list(dict.fromkeys(str(schedule) for schedule in each))
    plural = "s" if buckets > 1 else ""
    title = (
        f"a step of {buckets} bucket{plural}{' overlapped' if overlap else ''}: {', '.join(names)}"
    )
    return run(made, Desk(placement, faults, model), title, parameter_bytes, model, record)


def _computing(title: str, seconds: float, placement: Placement, after: tuple[int, ...]) -> Job:
    alone = Together(title, np.arange(len(placement.order))[None, :], seconds)
    return Job((alone,), np.zeros(1, np.int64), after, np.zeros(1, np.int64))
