"""Which schedules come into question on a mesh: the library's, in every nesting, and XLA's own.

candidate ::= XLA's own over all axes at once
            | one schedule over all axes at once
            | level*, an axis each, nested in any order of the axes
level     ::= a schedule that scatters and gathers around what is inside it, or one that does all itself
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import chain, permutations, product

import numpy as np

from collc.analysis.certificate import ranks_of
from collc.analysis.passes import Pipeline
from collc.errors import CollcError, PlanError
from collc.language.algebra import Leaf, Schedule, then
from collc.language.expand import expand
from collc.language.ir import Program
from collc.language.library import contents, modules
from collc.language.parse import parse
from collc.language.states import COLLECTIVES, KINDS, SHARD
from collc.planning.compose import native
from collc.planning.registry import Algorithm, algorithm

SLICES = (8, 64)  # of Pipeline, where a schedule can be sliced
MOST_ROUNDS = 512  # on an axis, or on axes taken together
MOST_SENDS = 300_000  # of an expansion, as those on 32 and 64 ranks let expect
NESTED = 3  # axes that are nested in every order; more of them only as the mesh has them
MOST = 5000  # candidates, beyond which only the best levels of each axis are combined

RULE = (
    f"Left out: what takes more than {MOST_ROUNDS} rounds on its ranks or about {MOST_SENDS:,} sends to "
    "write down, slices of a chain over several axes, which in the lowered model only add launches, and "
    "schedules with parameters."
)

Level = tuple[Schedule, ...]  # down and up, or one that does all


@dataclass(frozen=True, eq=False)
class Candidate:
    """Schedules one after another, each with its share of the buffer, and placed on its axes."""

    parts: tuple[tuple[Schedule, Fraction], ...]

    @cached_property
    def schedule(self) -> Schedule:
        return then(*(part for part, _ in self.parts))

    @cached_property
    def text(self) -> str:
        return str(self.schedule)

    @cached_property
    def native(self) -> bool:
        """Whether it is XLA's own alone."""
        return all(leaf.native for part, _ in self.parts for leaf in part.leaves())


Best = Callable[[Mapping[str, int], str, list[Level]], list[Level]]


def candidates(
    sizes: Mapping[str, int], axes: tuple[str, ...], collective: str, best: Best
) -> Iterator[Candidate]:
    """All of them for a collective over some axes of a mesh, XLA's own over all of them first.

    ``best`` chooses levels of one axis, where combining all would be too much.
    """
    yield Candidate(((native(collective) @ axes, Fraction(1)),))
    n = math.prod(sizes[a] for a in axes)
    if n == 1:
        return
    if len(axes) > 1:
        whole = [own for own in _whole(collective) if _feasible(own @ axes, sizes)]
        if collective == "all_reduce":
            whole.append(native("reduce_scatter") >> native("all_gather"))
        yield from (Candidate(((own @ axes, Fraction(1)),)) for own in whole)
        if collective == "all_reduce":
            torus = parse(f"torus({', '.join(map(repr, axes))})")
            if _feasible(torus, sizes):
                yield Candidate(((torus, Fraction(1)),))
    yield from _nested(sizes, axes, collective, best)


def _nested(
    sizes: Mapping[str, int], axes: tuple[str, ...], collective: str, best: Best
) -> Iterator[Candidate]:
    ends = {a: _levels(sizes, a, collective, outermost=True) for a in axes}
    inner = {a: _levels(sizes, a, collective, outermost=False) for a in axes}
    orders = list(permutations(axes)) if len(axes) <= NESTED else [axes]
    if (
        sum(math.prod(len((inner if i else ends)[a]) for i, a in enumerate(o)) for o in orders)
        > MOST
    ):
        ends = {a: best(sizes, a, own) for a, own in ends.items()}
        inner = {a: best(sizes, a, own) for a, own in inner.items()}
    if len(axes) == 1:
        ends[axes[0]].pop(0)  # XLA's own over all axes
    ends, inner = _placed(ends), _placed(inner)
    for order in orders:
        for levels in product(ends[order[0]], *(inner[a] for a in order[1:])):
            parts = tuple(_ordered(list(levels), collective))
            yield Candidate(tuple(_shares(parts, sizes)))


def _placed(levels: Mapping[str, list[Level]]) -> dict[str, list[Level]]:
    return {a: [tuple(s @ a for s in level) for level in own] for a, own in levels.items()}


def _ordered(levels: list[Level], collective: str) -> Iterator[Schedule]:
    """Levels come outermost first; inner axes scatter first and gather last."""
    if collective in ("all_gather", "broadcast"):
        levels.reverse()
    yield from (level[0] for level in reversed(levels))
    yield from (level[1] for level in levels if len(level) == 2)


def _shares(
    parts: tuple[Schedule, ...], sizes: Mapping[str, int]
) -> Iterator[tuple[Schedule, Fraction]]:
    """Where an axis is scattered, what others work on is 1/n of it: as ``strands`` has it."""
    held = {part.axes[0] for part in parts if part.collective is KINDS["all_gather"]}
    held -= {part.axes[0] for part in parts if part.collective is KINDS["reduce_scatter"]}
    for part in parts:
        (axis,) = part.axes
        yield part, Fraction(1, math.prod(sizes[a] for a in held - {axis}))
        kind = part.collective
        assert kind is not None, part
        held = held | {axis} if kind.after == SHARD else held - {axis}


# ---- what the library has -----------------------------------------------------------------------


def _levels(sizes: Mapping[str, int], axis: str, collective: str, outermost: bool) -> list[Level]:
    own: list[Level] = [(native(collective),)]
    if sizes[axis] == 1:
        return own
    halves = native("reduce_scatter"), native("all_gather")
    if collective != "all_reduce":
        own += [(s,) for s in _whole(collective)]
    elif outermost:
        own += [(s,) for s in (halves[0] >> halves[1], *_whole(collective))]
    else:
        own = [halves, *_halves()]
        scattering = {down >> up for down, up in _halves()}
        own += [(s,) for s in _whole(collective) if s not in scattering]
    return [level for level in own if all(_feasible(s @ axis, sizes) for s in level)]


@lru_cache(maxsize=1)
def _algorithms() -> tuple[Algorithm, ...]:
    """Those that need no parameters: of a module as a whole, and of each of its schedules."""
    found: list[Algorithm] = []
    for name, module in modules().items():
        if name == "native":
            continue
        try:
            found.append(algorithm(name))
        except PlanError:
            continue
        for own in contents(module).values():
            if isinstance(own, Schedule) and not own.axes and own.collective is not None:
                found.append(algorithm(own))
    return tuple(found)


@lru_cache(maxsize=1)
def _halves() -> tuple[tuple[Schedule, Schedule], ...]:
    """Scatters, each with the gather that goes with it."""
    each = ((a.get("reduce_scatter"), a.get("all_gather")) for a in _algorithms())
    return tuple(dict.fromkeys((down, up) for down, up in each if down and up))


@lru_cache(maxsize=len(COLLECTIVES))
def _whole(collective: str) -> tuple[Schedule, ...]:
    """Schedules of one collective, also in slices."""
    each = (
        a.all_reduce if collective == "all_reduce" else a.get(collective) for a in _algorithms()
    )
    plain = list(dict.fromkeys(s for s in each if s is not None))
    return tuple(chain(plain, *(_sliced(s) for s in plain)))


def _sliced(schedule: Schedule) -> Iterator[Schedule]:
    for k in SLICES:
        made = schedule.through(Pipeline(k))
        try:
            for leaf in made.leaves():
                expand(leaf, 8)
        except CollcError:  # such as ranks that exchange, or chunks that belong to ranks
            return
        yield made


# ---- what is hopeless ---------------------------------------------------------------------------


def _feasible(schedule: Schedule, sizes: Mapping[str, int]) -> bool:
    """Whether it can be built on its axes, within MOST_ROUNDS and MOST_SENDS."""
    leaves = [leaf for leaf in schedule.leaves() if not leaf.native]
    try:
        return all(_feasible_on(replace(leaf, axes=()), ranks_of(leaf, sizes)) for leaf in leaves)
    except CollcError:
        return False


@lru_cache(maxsize=1024)
def _feasible_on(leaf: Leaf, n: int) -> bool:
    if n > 64:
        few, more = (expand(leaf, ranks) for ranks in (32, 64))
        # What doubles from 32 to 64 ranks grows with n, what quadruples with its square.
        if _grown(_sends(few), _sends(more), n) > MOST_SENDS:
            return False
        if _grown(rounds(few), rounds(more), n) > 1.25 * MOST_ROUNDS:
            return False
    return rounds(expand(leaf, n)) <= MOST_ROUNDS


def _grown(few: int, more: int, n: int) -> float:
    return more * (more / max(few, 1)) ** math.log2(n / 64)


def _sends(program: Program) -> int:
    """Sends as they are yielded; of an orbit only those of one rank are kept."""
    return sum(step.size * (program.n if step.orbit else 1) for step in program.steps)


def rounds(program: Program) -> int:
    """Partial permutations: for each step as many as its busiest rank has partners."""
    count = 0
    for step in program.steps:
        if step.orbit:
            count += len(np.unique(step.dst))
            continue
        src, dst = np.divmod(np.unique(step.src * program.n + step.dst), program.n)
        count += max(int(np.bincount(src).max()), int(np.bincount(dst).max()))
    return count
