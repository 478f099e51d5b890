"""Programs in which every rank does the same relative to itself, as cells named by their distance.

Cell o of rank r is chunk r + o. Runs of steps in which what was received is what is sent next, to
cells that move by a constant stride, can be one loop.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from collc.analysis.rounds import colours
from collc.language.ir import Program
from collc.language.states import KINDS

Cell = int  # (chunk - rank) mod n; in an all-to-all (source - rank) * n + (destination - rank)


@dataclass(frozen=True)
class Send:
    """One chunk that every rank sends: the cell it reads, and the one that the receiver writes."""

    add: bool
    read: Cell
    write: Cell


@dataclass(frozen=True)
class Message:
    """What every rank sends to the rank at ``distance``, in one round."""

    distance: int
    sends: tuple[Send, ...]


Messages = tuple[Message, ...]


@functools.lru_cache(maxsize=256)
def messages(program: Program) -> list[Messages]:
    """The rounds of each step, in relative cells."""
    steps = []
    for step in program.steps:
        write = program.rotate(step.chunk, -step.dst)
        colour = colours(program, step)
        sends = [
            (int(k), int(d), Send(bool(a), int(r), int(w)))
            for k, d, a, r, w in zip(colour, step.dst, step.add, step.chunk, write, strict=True)
        ]
        steps.append(
            tuple(
                Message(
                    next(d for j, d, _ in sends if j == k),
                    tuple(send for j, _, send in sends if j == k),
                )
                for k in range(int(colour.max(initial=-1)) + 1)
            )
        )
    return steps


@dataclass(frozen=True)
class Run:
    """``count`` steps like the first, where send j's cells move by ``strides[j]`` each time.

    Every send is of what it received in the step before.
    """

    count: int
    first: Messages
    strides: tuple[int, ...]

    def writes(self, n: int) -> list[list[Cell]]:
        """The cells that each send writes, one for each step."""
        sends = [m.sends[0] for m in self.first]
        return [
            [(send.write + s * i) % n for i in range(self.count)]
            for send, s in zip(sends, self.strides, strict=True)
        ]


def run(first: Messages, count: int, n: int) -> Run:
    """The run of ``count`` steps that begins with these messages."""
    # Sent on in the next step: the cell that is read moves as the one that was written.
    return Run(count, first, tuple(-m.distance % n for m in first))


@functools.lru_cache(maxsize=256)
def rolled(program: Program) -> Program:
    """The program with its longest runs marked as loops; as it is where it has none."""
    if not program.orbit or program.kind is KINDS["all_to_all"]:
        return program
    steps = messages(program)
    loops, t = [], 0
    while t < len(steps):
        count = _count(steps[t:], program.n)
        if count > 1:
            loops.append(range(t, t + count))
        t += count
    return replace(program, loops=tuple(loops))


def _count(steps: Sequence[Messages], n: int) -> int:
    """How many steps from the first are one run."""
    first = steps[0]
    if any(len(m.sends) != 1 for m in first):
        return 1
    strides = run(first, 1, n).strides
    count = 1
    while count < len(steps) and _alike(first, steps[count], strides, count, n):
        count += 1
    # Cells of different sends must not meet, nor may a send come back to a cell.
    reads = [m.sends[0].read for m in first]
    while count > 1:
        cells = [c for cs in run(first, count, n).writes(n) for c in cs]
        if len(set(cells + reads)) == len(cells) + len(reads):
            break
        count -= 1
    return count


def _alike(first: Messages, step: Messages, strides: Sequence[int], i: int, n: int) -> bool:
    return len(step) == len(first) and all(
        len(b.sends) == 1
        and a.distance == b.distance
        and a.sends[0].add == b.sends[0].add
        and (a.sends[0].read + s * i) % n == b.sends[0].read
        for a, b, s in zip(first, step, strides, strict=True)
    )
