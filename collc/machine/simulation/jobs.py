"""What the simulation runs: jobs, each a row of acts that every rank does one after another.

    job ::= act*      begins at a rank when those that it is behind are done there
    act ::= Sends     messages that leave a rank at once
          | Together  all ranks of a group take so long from when the last of them is there

A schedule becomes jobs in two ways: *abstract*, a job for each leaf and an act for each step; or
*lowered*, one job whose acts are the rounds, since one collective is in flight at a time.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, get_args

import numpy as np

from collc.errors import MachineError
from collc.language.ir import Ints
from collc.machine.flow import Flow, Moment, Part
from collc.machine.lowered import ELEMENT, native, whole
from collc.machine.placement import Placement
from collc.machine.topology import Floats

Model = Literal["abstract", "lowered"]
MODELS = get_args(Model)


@dataclass(frozen=True, eq=False)
class Sends:
    """The messages of a step, or of one round of it.

    Attributes:
      title: the leaf.
      moment: where they come from.
      chunk: bytes of one chunk.
      round: which of its rounds; None is all of them, the abstract model.
      whole: bytes of every message of a lowered round, which moves equal arrays.
    """

    title: str
    moment: Moment
    chunk: float
    round: int | None = None
    whole: float = 0.0

    def messages(self) -> "Load":
        """They, by round, then rank that sends, then rank that receives."""
        sent = self.moment.messages()
        if self.round is not None:
            sent = sent.pick(sent.round == self.round)
        order = np.lexsort((sent.dst, sent.src, sent.round))
        src, dst, chunks = sent.src[order], sent.dst[order], sent.chunks[order]
        added, round = sent.added[order], sent.round[order]
        if self.round is None:
            return Load(
                src, dst, round, *(x.astype(np.float64) * self.chunk for x in (chunks, added))
            )
        whole = np.full(len(src), self.whole)
        return Load(src, dst, round, whole, whole if added.any() else np.zeros(len(src)))


@dataclass(frozen=True, eq=False)
class Load:
    """Messages between ranks of the mesh, [m]: from, to, round, bytes, bytes that are added."""

    src: Ints
    dst: Ints
    round: Ints
    bytes: Floats
    added: Floats


@dataclass(frozen=True, eq=False)
class Together:
    """What all ranks of a group do at once; ``groups``: their ranks, [n, groups]. One rank computes.

    ``bytes``: the seconds of it that links are busy, where it is one of XLA's own collectives.
    """

    title: str
    groups: Ints
    seconds: float
    bytes: float | None = None

    @property
    def sends(self) -> bool:
        return self.bytes is not None


Act = Sends | Together


@dataclass(frozen=True, eq=False)
class Job:
    """Acts one after another: ``acts``, each once, and ``order``, which of them when.

    ``after``: the jobs that have to be done at a rank before this one begins there. ``steps``: the
    number of each act within what its title names, for people.
    """

    acts: tuple[Act, ...]
    order: Ints
    after: tuple[int, ...]
    steps: Ints

    def act(self, step: int) -> Act:
        return self.acts[int(self.order[step])]


def jobs(
    what: Flow, placement: Placement, size: float, model: Model = "abstract", element: int = ELEMENT
) -> tuple[Job, ...]:
    """The jobs of a schedule for ``size`` bytes, the whole buffer of a rank, of such elements.

    Raises MachineError where the size is not positive, the model unknown, the mesh another one, or
    XLA's own collective is to be simulated in the abstract model.
    """
    if not (math.isfinite(size) and size > 0):
        raise MachineError(f"a size of {size} bytes takes no time. Give 1 byte or more.")
    if model not in MODELS:
        raise MachineError(f"there is no model {model!r}. Say {' or '.join(MODELS)}.")
    if dict(what.sizes) != dict(placement.sizes):
        raise MachineError(
            f"the schedule is on a mesh of {dict(what.sizes)}, the placement on one of "
            f"{dict(placement.sizes)}. Make both with the same sizes."
        )
    if model == "lowered":
        return (_lowered(what, placement, size, element),)
    if what.native:
        raise MachineError(
            "XLA's own collectives have no sends of ours to simulate in the abstract model. "
            "Take model='lowered', where they take the time that NCCL's model says."
        )
    return tuple(_abstract(part, size) for part in what.parts)


def _abstract(part: Part, size: float) -> Job:
    moments = part.moments or ()
    each = {moment: k for k, moment in enumerate(dict.fromkeys(moments))}
    chunk = float(Fraction(size) * part.chunk)
    acts = tuple(Sends(str(part.leaf), moment, chunk) for moment in each)
    order = np.array([each[moment] for moment in moments], np.int64)
    return Job(acts, order, part.strand.after, np.arange(len(order)))


def _lowered(what: Flow, placement: Placement, size: float, element: int) -> Job:
    """Rounds in the order of lock-step: parts side by side take turns, step by step."""
    made: dict[tuple[int, Moment | None], tuple[int, ...]] = {}
    acts: list[Act] = []
    order, steps = [], []
    done = [0] * len(what.parts)
    for now in what.ticks():
        for i, moment in now:
            if (i, moment) not in made:
                new = list(_rounds(what.parts[i], moment, placement, size, element))
                made[i, moment] = tuple(range(len(acts), len(acts) + len(new)))
                acts += new
            order += made[i, moment]
            steps += [done[i]] * len(made[i, moment])
            done[i] += 1
    return Job(tuple(acts), np.array(order, np.int64), (), np.array(steps, np.int64))


def _rounds(
    part: Part, moment: Moment | None, placement: Placement, size: float, element: int
) -> Iterator[Act]:
    title = str(part.leaf)
    if moment is None:
        found = native(part, placement, size)
        yield Together(title, part.table, found.seconds, found.bandwidth)
        return
    share = Fraction(size) * part.chunk
    each = whole(share, element)
    for k, sent in enumerate(moment.messages().by_round()):
        yield Sends(title, moment, float(share), k, float(each * int(sent.chunks.max())))


def behind(more: tuple[Job, ...], at: int, after: tuple[int, ...]) -> tuple[Job, ...]:
    """Jobs as they are when there are ``at`` others before them; the first ones wait for ``after``."""
    return tuple(replace(job, after=tuple(k + at for k in job.after) or after) for job in more)


def ends(own: tuple[Job, ...]) -> tuple[int, ...]:
    """The jobs that no other is behind."""
    held = {k for job in own for k in job.after}
    return tuple(k for k in range(len(own)) if k not in held)
