"""Slices that follow one another through a schedule."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np

from collc.analysis.passes.base import Proved, cells_of, positive
from collc.analysis.rounds import colouring
from collc.language.algebra import MOST_SLICES
from collc.language.ir import Ints, Program, Step, few_enough, joined


@dataclass(frozen=True, repr=False)
class Pipeline(Proved):
    """The buffer in k slices, staggered, so that those who would wait for one work on the next.

    In a leaf a slice follows p steps behind the one before, p being the messages of the busiest rank:
    T + p(k - 1) steps of 1/k of the bytes, where one slice takes T, waits for its turn included. A
    chain over several axes is cut as a whole, and its parts are the stages: while one slice is
    between the hosts, the next is within them.

    >>> from collc.schedules import chain
    >>> program = chain.reduce.program(3)
    >>> print(program)
       0  add c[0]  2 -> 1
       1  add c[0]  1 -> 0
    >>> print(Pipeline(2)(program))
       0  add c[0]  2 -> 1
       1  add c[0]  1 -> 0    add c[1]  2 -> 1
       2  add c[1]  1 -> 0
    """

    k: int

    def __post_init__(self) -> None:
        positive(self, self.k, "k", MOST_SLICES)

    def __repr__(self) -> str:
        return f"Pipeline({self.k})"

    @property
    def slices(self) -> int:
        return self.k

    def rewrite(self, program: Program) -> Program:
        if self.k == 1:
            return program
        if program.kind.scatters:
            raise self.refuse(
                program,
                f"chunk c of its {program.kind} belongs to rank c. Slice a chain over several axes, or "
                "put copies of the schedule side by side with |.",
            )
        dense = list(program.dense_steps())
        few_enough(self.k * sum(step.size for step in dense))
        when, period = self._times(program, dense)
        at: dict[int, list[tuple[int, Step]]] = {}
        for step, times in zip(dense, when, strict=True):
            for time in np.unique(times).tolist():
                now = step.pick(times == time)
                for i in range(self.k):
                    cut = replace(now, chunk=now.chunk * self.k + i)
                    at.setdefault(time + i * period, []).append((i, cut))
        made = replace(program, chunks=program.chunks * self.k, steps=(), loops=())
        by_slice = [sorted(at[t], key=itemgetter(0)) for t in sorted(at)]
        return replace(made, steps=tuple(made.folded(joined([x for _, x in s])) for s in by_slice))

    def _times(self, program: Program, steps: list[Step]) -> tuple[list[Ints], int]:
        """When each send of the first slice leaves, by step, and how far behind the next slice is.

        That is as many steps as the busiest rank has messages: no two of one rank are a multiple of
        it apart, so that slices never meet.
        """
        pairs = [np.unique(s.src * program.n + s.dst, return_inverse=True) for s in steps]
        src, dst = np.divmod(np.concatenate([p for p, _ in pairs] or [np.zeros(0, int)]), program.n)
        most = [np.bincount(ends, minlength=1).max() for ends in (src, dst)]
        period = max(1, *map(int, most))
        slots = _Slots(src, dst, period)
        times = self._placed(program, steps, pairs, slots.first)
        if times is None:  # first come, first served was too greedy; this colouring always exists
            colour = colouring(src, dst)
            times = self._placed(program, steps, pairs, lambda m, t: t + (colour[m] - t) % period)
        assert times is not None
        return times, period

    def _placed(
        self,
        program: Program,
        steps: list[Step],
        pairs: list[tuple[Ints, Ints]],
        place: Callable[[int, int], int | None],
    ) -> list[Ints] | None:
        """Times by step, where ``place(message, ready)`` says when; None where it cannot."""
        size, sent, when = program.n * program.cells, 0, []
        written, read_at = np.full(size, -1), np.zeros(size, np.int64)
        for t, (step, (own, message)) in enumerate(zip(steps, pairs, strict=True)):
            read, write = cells_of(program, step)
            if (both := np.isin(read, write)).any():
                i = int(np.flatnonzero(both)[0])
                raise self.refuse(
                    program,
                    f"in step {t} rank {int(step.src[i])} sends chunk {int(step.chunk[i])} and receives "
                    "into it: ranks that exchange are busy all the time, so nothing can be staggered.",
                )
            ready = np.zeros(len(own), np.int64)
            earliest = np.maximum.reduce([written[read] + 1, written[write] + 1, read_at[write]])
            np.maximum.at(ready, message, earliest)
            at = [place(sent + m, int(ready[m])) for m in range(len(own))]
            if None in at:
                return None
            times = np.array(at, np.int64)[message]
            np.maximum.at(written, write, times)
            np.maximum.at(read_at, read, times)
            when.append(times)
            sent += len(own)
        return when


class _Slots:
    """Which of the times modulo the period each rank still has free, to send and to receive."""

    def __init__(self, src: Ints, dst: Ints, period: int) -> None:
        self.ends = list(zip(src.tolist(), dst.tolist(), strict=True))
        self.period = period
        self.taken: set[tuple[str, int, int]] = set()

    def first(self, message: int, ready: int) -> int | None:
        """The first time from ``ready`` on at which both ends are free, which is then taken."""
        src, dst = self.ends[message]
        for time in range(ready, ready + self.period):
            slot = time % self.period
            keys = {("from", src, slot), ("to", dst, slot)}
            if not keys & self.taken:
                self.taken |= keys
                return time
        return None
