"""A schedule as strands: its leaves, what each waits for, and how much of the buffer each moves."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from collc.language import states
from collc.language.algebra import Beside, Leaf, Schedule, Staggered, Then
from collc.language.normal import stages_of, ticks


@dataclass(frozen=True)
class Strand:
    """One leaf. ``share``: its own full buffer, of the whole; ``after``: the strands before it.

    Those that wait for the same ones run side by side.
    """

    leaf: Leaf
    share: Fraction
    after: tuple[int, ...]


def strands(schedule: Schedule, sizes: Mapping[str, int]) -> tuple[Strand, ...]:
    """The strands of a schedule on axes of these sizes, each behind those that it waits for.

    Where an axis is scattered, what other axes work on is 1/n of it; parts of ``|`` have equal
    shares; of staggered slices each stage waits for all that was worked on before.

    >>> import collc.schedules.hierarchical as hierarchical
    >>> found = strands(hierarchical.hierarchical("host", "gpu"), {"host": 4, "gpu": 8})
    >>> [(str(s.share), s.after) for s in found]
    [('1', ()), ('1/8', (0,)), ('1', (1,))]
    """
    walk = _Walk(sizes)
    held = {axis: state == states.SHARD for axis, (state, _) in schedule.type.before.items()}
    walk.visit(schedule.normal, Fraction(1), held, ())
    return tuple(walk.found)


class _Walk:
    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self.found: list[Strand] = []

    def visit(
        self, s: Schedule, share: Fraction, held: dict[str, bool], after: tuple[int, ...]
    ) -> tuple[int, ...]:
        """The strands at its end. ``held`` says which axes are scattered, and is brought up to date."""
        match s:
            case Leaf():
                own = s.axes or ("",)
                others = (a for a, scattered in held.items() if scattered and a not in own)
                weight = share / math.prod(self.sizes[a] for a in others)
                held.update(dict.fromkeys(own, s.facing.after == states.SHARD))
                self.found.append(Strand(s, weight, after))
                return (len(self.found) - 1,)
            case Then(parts=parts):
                for part in parts:
                    after = self.visit(part, share, held, after)
                return after
            case Staggered(parts=parts):
                stages = [stages_of(part) for part in parts]
                slices = [dict(held) for _ in parts]
                for now in ticks(len(parts), len(stages[0])):
                    ends = [
                        self.visit(stages[i][j], share / len(parts), slices[i], after)
                        for i, j in now
                    ]
                    after = tuple(end for each in ends for end in each)
                held.update(slices[-1])
                return after
            case Beside(parts=parts):
                begin, ends = dict(held), []
                for part in parts:
                    own = dict(begin)
                    ends += self.visit(part, share / len(parts), own, after)
                    held.update(own)
                return tuple(ends)
        raise TypeError(s)
