"""Passes that cut, join and roll up steps."""

from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter

import numpy as np

from collc.analysis.passes.base import Proved, cells_of, positive
from collc.analysis.relative import rolled
from collc.analysis.rounds import colours
from collc.language.ir import MOST_SENDS, Ints, Program, Step, joined


@dataclass(frozen=True, repr=False)
class Rounds(Proved):
    """A step's messages one after another, ``ports`` at a time: fewer at once, more steps.

    >>> from collc.schedules import server
    >>> program = server.gather.program(3)
    >>> print(program)
       0  copy c[1]  1 -> 0    copy c[2]  2 -> 0
    >>> print(Rounds()(program))
       0  copy c[1]  1 -> 0
       1  copy c[2]  2 -> 0
    """

    ports: int = 1

    def __post_init__(self) -> None:
        positive(self, self.ports, "ports", MOST_SENDS)

    def __repr__(self) -> str:
        return f"Rounds({'' if self.ports == 1 else f'ports={self.ports}'})"

    def rewrite(self, program: Program) -> Program:
        steps: list[Step] = []
        for t, step in enumerate(program.steps):
            dense = program.dense(step)
            colour = colours(program, step)
            if step.orbit:
                colour = np.repeat(colour, program.n)
            if int(colour.max(initial=-1)) < self.ports:
                steps.append(step)  # also where ranks exchange: nothing is to be cut
                continue
            place = self._order(program, t, dense, colour)[colour] // self.ports
            for k in range(int(place.max(initial=-1)) + 1):
                steps.append(program.folded(dense.pick(place == k)))
        return replace(program, steps=tuple(steps), loops=())

    def _order(self, program: Program, t: int, step: Step, colour: Ints) -> Ints:
        """The place of each colour in an order that reads every cell before it is written."""
        before: TopologicalSorter[int] = TopologicalSorter()
        read, write = cells_of(program, step)
        order = np.argsort(write, kind="stable")
        low = np.searchsorted(write[order], read)
        high = np.searchsorted(write[order], read, side="right")
        for k in range(int(colour.max(initial=-1)) + 1):
            before.add(k)
        for i in np.flatnonzero(high > low):
            for j in order[low[i] : high[i]]:
                if colour[i] != colour[j]:
                    before.add(int(colour[j]), int(colour[i]))
        try:
            found = list(before.static_order())
        except CycleError:
            i = int(np.flatnonzero(high > low)[0])
            raise self.refuse(
                program,
                f"in step {t} rank {int(step.src[i])} sends chunk {int(step.chunk[i])} in several "
                "rounds and receives into it in others. Only one step can read all before it writes "
                "any.",
            ) from None
        place = np.zeros(len(found), np.int64)
        place[found] = np.arange(len(found))
        return place


@dataclass(frozen=True, repr=False)
class Coalesce(Proved):
    """Steps that need nothing of one another become one, so that equal pairs share a message.

    >>> from collc.analysis.passes import Pipeline
    >>> from collc.schedules import chain
    >>> program = chain.reduce.through(Pipeline(2)).normal.program(2)
    >>> print(program)
       0  add c[0]  1 -> 0
       1  add c[1]  1 -> 0
    >>> print(Coalesce()(program))
       0  add c[0]  1 -> 0    add c[1]  1 -> 0
    """

    def __repr__(self) -> str:
        return "Coalesce()"

    def rewrite(self, program: Program) -> Program:
        merged: list[Step] = []
        for step in program.dense_steps():
            if merged and self._apart(program, merged[-1], step):
                merged[-1] = joined([merged[-1], step])
            else:
                merged.append(step)
        if program.steps and len(merged) == len(program.steps):
            raise self.refuse(program, "every step reads or writes what the one before it writes.")
        return replace(program, steps=tuple(map(program.folded, merged)), loops=())

    @staticmethod
    def _apart(program: Program, first: Step, then: Step) -> bool:
        """Whether the second neither reads nor writes what the first writes."""
        written = cells_of(program, first)[1]
        return not any(np.isin(cells, written).any() for cells in cells_of(program, then))


@dataclass(frozen=True, repr=False)
class Roll(Proved):
    """Steps that differ by a constant stride become one loop, whose code does not grow with n.

    >>> from collc.schedules import ring
    >>> program = ring.reduce_scatter.program(4)
    >>> print(program)
       0  add c[g-1]  g -> g+1
       1  add c[g+2]  g -> g+1
       2  add c[g+1]  g -> g+1
    >>> print(Roll()(program))
       0  add c[g-1-t]  g -> g+1    t = 0 to 2
    """

    def __repr__(self) -> str:
        return "Roll()"

    def rewrite(self, program: Program) -> Program:
        made = rolled(program)
        if not made.loops and len(program.steps) > 1:
            raise self.refuse(
                program,
                "no two steps in a row send on to the same distance what has just arrived."
                if program.orbit
                else "its ranks do different things: a loop has one body for all.",
            )
        return made
