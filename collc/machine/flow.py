"""What a schedule sends on a mesh, moment by moment, between ranks of the whole mesh.

    flow    ::= part*        each behind those that it waits for
    part    ::= moment*      one after another: the steps of a leaf on all groups of ranks at once
    moment  ::= message*     at once

Nothing but the programs' sends is read, and nothing has to be proved: what is wrong has a price too.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collc.analysis.certificate import ranks_of
from collc.analysis.rounds import colours
from collc.analysis.strands import Strand, strands
from collc.language.algebra import Leaf, Schedule
from collc.language.expand import expand, permutation
from collc.language.ir import Ints, Program, Step, ranks


@dataclass(frozen=True, eq=False)
class Messages:
    """Messages that leave at once, [m] each: from, to, chunks, those of them that are added, round.

    A round is a partial permutation; ``rounds``: how many there are.
    """

    src: Ints
    dst: Ints
    chunks: Ints
    added: Ints
    round: Ints

    def pick(self, chosen: NDArray[Any]) -> "Messages":
        """Some of them."""
        return Messages(*(getattr(self, f.name)[chosen] for f in fields(self)))

    def by_round(self) -> Iterator["Messages"]:
        """The messages of each round, in order."""
        order = np.argsort(self.round, kind="stable")
        for chosen in np.split(order, np.cumsum(np.bincount(self.round))[:-1]):
            yield self.pick(chosen)

    @property
    def rounds(self) -> int:
        return int(self.round.max(initial=-1)) + 1


@dataclass(frozen=True, eq=False)
class Moment:
    """A step of a leaf's program, done by all groups of ranks. Steps that are alike share one."""

    program: Program
    step: Step
    table: Ints

    def messages(self) -> Messages:
        """Its messages between ranks of the mesh; made anew each time, since they may be many."""
        step, n = self.step, self.program.n
        colour = colours(self.program, step)
        pair = step.dst if step.orbit else step.src * n + step.dst
        own, first, index = np.unique(pair, return_index=True, return_inverse=True)
        chunks = np.bincount(index)
        added = np.bincount(index, weights=step.add).astype(np.int64)
        round = colour[first]
        if step.orbit:
            src = np.broadcast_to(ranks(n), (len(own), n))
            dst = (src + own[:, None]) % n
            chunks, added, round = (np.repeat(x, n) for x in (chunks, added, round))
        else:
            src, dst = np.divmod(own, n)
        groups = self.table.shape[1]
        return Messages(
            self.table[src.reshape(-1)].reshape(-1),
            self.table[dst.reshape(-1)].reshape(-1),
            *(np.repeat(x, groups) for x in (chunks, added, round)),
        )


@dataclass(frozen=True, eq=False)
class Part:
    """A leaf on the mesh.

    Attributes:
      strand: the leaf, its share of the buffer, and the parts that it waits for.
      chunk: the share of the whole buffer that one of its chunks is.
      table: the ranks of the mesh that are its rank r, [n, groups].
      moments: its steps; None where it is XLA's own, whose steps nobody knows.
    """

    strand: Strand
    chunk: Fraction
    table: Ints
    moments: tuple[Moment, ...] | None

    @property
    def leaf(self) -> Leaf:
        return self.strand.leaf


@dataclass(frozen=True, eq=False)
class Flow:
    """A schedule on a mesh, whose ranks are linear in the order of ``sizes``."""

    schedule: Schedule
    sizes: Mapping[str, int]
    parts: tuple[Part, ...]

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes.values())

    @cached_property
    def native(self) -> bool:
        """Whether XLA's own collectives take part."""
        return any(part.moments is None for part in self.parts)

    def ticks(self) -> Iterator[tuple[tuple[int, Moment | None], ...]]:
        """What happens at once, in lock-step: parts with their moments; XLA's own has None."""
        steps = [1 if p.moments is None else len(p.moments) for p in self.parts]
        at, waiting = [0] * len(self.parts), set(range(len(self.parts)))
        while waiting:
            open = [i for i in sorted(waiting) if waiting.isdisjoint(self.parts[i].strand.after)]
            now = [i for i in open if at[i] < steps[i]]
            if now:
                yield tuple((i, self._at(i, at[i])) for i in now)
            for i in now:
                at[i] += 1
            waiting -= {i for i in open if at[i] >= steps[i]}

    def _at(self, part: int, step: int) -> Moment | None:
        moments = self.parts[part].moments
        return None if moments is None else moments[step]


def flow(schedule: Schedule, sizes: Mapping[str, int]) -> Flow:
    """The flow of a schedule on the axes of a mesh; those that it does not name make groups.

    The one axis of an unplaced schedule is "". Raises ScheduleError where its steps are not well
    formed, and ProofError where a rank or chunk is out of range.
    """
    own = {axis: sizes[axis] for axis in sizes}
    parts = tuple(_part(strand, own) for strand in strands(schedule, own))
    return Flow(schedule, own, parts)


def _part(strand: Strand, sizes: Mapping[str, int]) -> Part:
    leaf, n = strand.leaf, ranks_of(strand.leaf, sizes)
    table = _table(leaf, sizes)[permutation(leaf.relabels, n)]
    if leaf.native:
        return Part(strand, strand.share, table, None)
    program = expand(leaf, n)
    alike: dict[bytes, Moment] = {}
    moments = []
    for step in program.steps:
        found = alike.setdefault(_key(program, step), Moment(program, step, table))
        moments.append(found)
    return Part(strand, strand.share / program.chunks, table, tuple(moments))


def _key(program: Program, step: Step) -> bytes:
    """The same for steps whose messages are the same: which chunks they carry does not count."""
    pair = step.dst if step.orbit else step.src * program.n + step.dst
    return b"%d" % step.orbit + pair.tobytes() + step.add.tobytes()


def _table(leaf: Leaf, sizes: Mapping[str, int]) -> Ints:
    """The ranks of the mesh by the leaf's own rank and by group, [n, groups]."""
    axes = list(sizes)
    own = [axes.index(a) for a in leaf.axes or ("",)]
    rest = [i for i in range(len(axes)) if i not in own]
    grid = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
    return grid.transpose(own + rest).reshape(ranks_of(leaf, sizes), -1)
