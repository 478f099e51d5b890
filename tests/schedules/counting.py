"""What the tests of theorems share: sizes, and counting over a program's sends, one by one.

Loaded with ``library.load``, by path: tests are no package.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

import collc
from collc.analysis import reference
from collc.analysis.rounds import rounds
from collc.language.algebra import Schedule
from collc.language.expand import expand
from collc.language.ir import Program

SIZES = [*range(1, 18), 31, 32, 33, 64]
Hop = tuple[int, int]  # source, destination


def lg(n: int) -> int:
    """ceil(log2 n)."""
    return (n - 1).bit_length()


def power(n: int) -> bool:
    """Whether n is a power of two."""
    return n & (n - 1) == 0


def part(a: int, b: int = 1) -> Fraction:
    """2(a - 1)/(a b): what a ring's all-reduce over a ranks sends of a b-th of the buffer."""
    return Fraction(2 * (a - 1), a * b)


@dataclass
class Counts:
    """Of a program: bytes as fractions of S, by rank and by directed link; the hops of each step."""

    steps: int
    rounds: int
    sent: list[Fraction]
    received: list[Fraction]
    links: dict[Hop, Fraction] = field(default_factory=dict)
    by_step: list[dict[Hop, Fraction]] = field(default_factory=list)

    def __iter__(self) -> Iterator[object]:
        """(steps, rounds, sent, received)."""
        return iter((self.steps, self.rounds, self.sent, self.received))


def counted(program: Program) -> Counts:
    """By brute force: every send of every step."""
    share = Fraction(1, program.chunks)
    steps = [
        Counter(zip(step.src.tolist(), step.dst.tolist(), strict=True))
        for step in program.dense_steps()
    ]
    links = sum(steps, Counter())
    sent, received = np.zeros(program.n, np.int64), np.zeros(program.n, np.int64)
    for (s, d), count in links.items():
        sent[s] += count
        received[d] += count
    return Counts(
        len(steps),
        len(rounds(program)),
        [int(x) * share for x in sent],
        [int(x) * share for x in received],
        {hop: count * share for hop, count in links.items()},
        [{hop: count * share for hop, count in step.items()} for step in steps],
    )


def counts(leaf: Schedule, n: int) -> Counts:
    """Of a schedule that is one leaf."""
    (only,) = leaf.leaves()
    return counted(expand(only, n))


def flat(schedule: Schedule, **sizes: int) -> Counts:
    """Of a composite, spelled out over the whole mesh; ranks are linear in the order of ``sizes``.

    An unplaced one takes ``n``. Rounds are those of the joined steps, not the certificate's.
    """
    return counted(reference.flatten(schedule, sizes if schedule.axes else {"": sizes["n"]}))


def along(counts: Counts, sizes: Mapping[str, int]) -> list[dict[str, Fraction]]:
    """For each step the bytes that travel along each axis; every send has to follow one axis."""
    shape, found = tuple(sizes.values()), []
    for step in counts.by_step:
        by_axis = dict.fromkeys(sizes, Fraction(0))
        for (s, d), share in step.items():
            at = zip(sizes, np.unravel_index(s, shape), np.unravel_index(d, shape), strict=True)
            (axis,) = [axis for axis, a, b in at if a != b]
            by_axis[axis] += share
        found.append(by_axis)
    return found


def optimal(schedule: Schedule, n: int, steps: int, depth: int) -> None:
    """The certificate of a schedule that takes these steps and sends the least there is."""
    c = collc.verify(schedule, n=n)
    assert c.steps == steps
    assert c.bound is not None and c.sent == c.received == c.bound.sent
    assert c.depth == depth
    assert c.consistent and c.narrow
