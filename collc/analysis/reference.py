"""The oracle, in NumPy: what programs do to data, what collectives mean, and composites spelled out.

    run         a program on data, send by send
    collective  what the ``jax.lax`` namesake returns
    flatten     a placed composite as one program over the whole mesh, cell by cell

The geometry of ``flatten`` is the one that lowering uses. The buffer of a rank is viewed as
[n_a for each frame axis a in mesh order..., m]; an axis is in the frame if some leaf scatters over
it. Such a leaf slices its own axes' dimensions, the parts of ``|`` slice m, and a leaf that does not
scatter cuts what is left on the rank, flattened row-major, in as many pieces as it has chunks.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collc.analysis.rounds import colours
from collc.errors import DataError, MeshError, ScheduleError, nearest
from collc.language import states
from collc.language.algebra import Beside, Leaf, Schedule, Staggered, Then
from collc.language.expand import expand, permutation, relabelled
from collc.language.ir import Ints, Program, Step, joined
from collc.language.normal import stages_of, ticks
from collc.language.states import KINDS, Kind
from collc.language.types import State

MOST_CELLS = 1 << 22
OPS = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def run(program: Program, data: NDArray[Any], op: str = "sum") -> NDArray[Any]:
    """What each rank's cells hold after the program, [n, cells, ...], from ``data`` of that shape.

    ``op``: sum, max or min. What a rank does not hold at first is replaced by ``poison`` in the
    beginning; what it does not have to hold in the end (``~program.ends``) is whatever was left
    there. Adds that meet in one cell: own value first, then in the order of the rounds. Raises
    DataError where the shape or the operation does not fit.
    """
    data = np.asarray(data)
    if data.shape[:2] != (program.n, program.cells):
        raise DataError(
            f"{program.name} (n = {program.n}): data has shape {data.shape}, needed is "
            f"[{program.n}, {program.cells}, ...]: ranks, then cells."
        )
    combine = _op(op)
    held = data.copy()
    held[~program.starts] = poison(data.dtype)
    for step in program.dense_steps():
        value = held[step.src, step.chunk]
        colour = colours(program, step)
        for k in range(int(colour.max(initial=-1)) + 1):
            now = (colour == k) & step.add
            combine.at(held, (step.dst[now], step.chunk[now]), value[now])
        out = ~step.add
        held[step.dst[out], step.chunk[out]] = value[out]
    return held


def poison(dtype: Any) -> NDArray[Any]:
    """A value that no sum hides: NaN, or about a third of the largest integer; a scalar array."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return np.asarray(np.iinfo(dtype).max // 3, dtype)
    return np.asarray(np.nan).astype(dtype)


def collective(
    kind: Kind | str, x: NDArray[Any], op: str = "sum", root: int | Sequence[int] = 0
) -> NDArray[Any]:
    """What every rank gets from a collective over N ranks, whose inputs are ``x`` [N, ...].

    As the namesake in ``jax.lax`` with ``tiled=True`` over dimension 0 of a rank's input: psum,
    psum_scatter, all_gather, all_to_all, pbroadcast. reduce, gather and scatter have none; there
    ``root`` gives or gets the whole, and what the others get is ``poison``. Of several roots of a
    reduce or broadcast each has a part of dimension 0, as ``rooted`` says. ``op``: sum, mean, max or
    min. Raises DataError where the shape does not divide.
    """
    x = np.asarray(x)
    n = x.shape[0]
    roots = (root,) if isinstance(root, int) else tuple(root)
    name = str(kind)
    if name not in KINDS:
        raise DataError(f"there is no collective {name!r}. {nearest(name, KINDS)}")
    if name in ("reduce_scatter", "scatter", "all_to_all") and (x.ndim < 2 or x.shape[1] % n):
        raise DataError(f"{name}: dimension 0 of {x.shape[1:]} does not divide over {n} ranks.")
    if name in ("all_reduce", "reduce_scatter", "reduce"):
        total = _op("sum" if op == "mean" else op).reduce(x, axis=0, dtype=x.dtype)
        x = np.broadcast_to(total / n if op == "mean" else total, x.shape)
    match name:
        case "all_reduce":
            return x.copy()
        case "reduce_scatter":
            return np.stack([np.split(x[r], n)[r] for r in range(n)])
        case "scatter":
            return np.stack(np.split(x[roots[0]], n))
        case "broadcast":
            return np.stack([x[rooted(roots, x.shape[1]), np.arange(x.shape[1])]] * n)
        case "all_gather":
            return np.stack([np.concatenate(list(x))] * n)
        case "all_to_all":
            parts = [np.split(row, n) for row in x]
            return np.stack([np.concatenate([p[r] for p in parts]) for r in range(n)])
    whole = x[0] if name == "reduce" else np.concatenate(list(x))
    out = np.empty((n, *whole.shape), x.dtype)
    out[...] = poison(x.dtype)
    out[rooted(roots, len(whole)), np.arange(len(whole))] = whole
    return out


def rooted(roots: Sequence[int], size: int) -> Ints:
    """The root of each place of dimension 0, [size]: equal parts, of which the last may be short."""
    return np.asarray(roots)[np.arange(size) // max(1, -(-size // len(roots)))]


def _op(name: str) -> np.ufunc:
    if name not in OPS:
        raise DataError(f"there is no operation {name!r}. {nearest(name, OPS)}")
    return OPS[name]


# ---- composites ---------------------------------------------------------------------------------


def flatten(schedule: Schedule, sizes: Mapping[str, int]) -> Program:
    """The composite as one program: ranks are linear in the order of ``sizes``, cells are [frame, m].

    m is the least that every leaf and every ``|`` divides. Axes that the schedule does not name
    are left out; an unplaced schedule takes the one size there is. Exhaustive, so for small meshes.
    Raises ScheduleError for native leaves, where the axes do not all see one collective, and beyond
    MOST_CELLS; MeshError where an axis has no size.
    """
    mesh = _mesh(schedule, sizes)
    kind, view = _view(schedule, mesh)
    n, chunks = math.prod(mesh.values()), math.prod(mesh[a] for a in view.frame) * view.m
    steps = view.steps(schedule.normal, dict(schedule.type.before), 0, view.m)
    roots = schedule.type.before if kind.before == states.ROOT else schedule.type.after
    at = np.broadcast_arrays(*(_roots(roots[a], a, mesh) for a in mesh))
    root = np.ravel_multi_index(at, tuple(mesh.values()))
    return Program(str(schedule), kind, n, chunks, tuple(steps), roots=tuple(root.tolist()))


def flat_cells(schedule: Schedule, sizes: Mapping[str, int]) -> int:
    """How many (rank, cell) ``flatten`` would spell out. Raises as it does."""
    return _view(schedule, _mesh(schedule, sizes), most=None)[1].count


def _view(
    schedule: Schedule, mesh: dict[str, int], most: int | None = MOST_CELLS
) -> tuple[Kind, "_View"]:
    kind = schedule.collective
    if kind is None:
        raise ScheduleError(
            f"{schedule} is {schedule.type}: a flat program does one collective on the whole mesh. "
            "Flatten schedules that do the same on every axis."
        )
    scattering = {
        a for leaf in schedule.leaves() if leaf.facing.scatters for a in leaf.axes or ("",)
    }
    frame = tuple(a for a in mesh if a in scattering)
    held = dict(schedule.type.before)
    m = math.lcm(*(q.denominator for q in _needs(schedule.normal, mesh, frame, held, Fraction(1))))
    view = _View(mesh, frame, m, kind is KINDS["all_to_all"])
    if most is not None and view.count > most:
        raise ScheduleError(
            f"{schedule} on {mesh} has {view.count} (rank, cell) when spelled out, more than {most}. "
            "Flatten it on a smaller mesh."
        )
    return kind, view


def _mesh(schedule: Schedule, sizes: Mapping[str, int]) -> dict[str, int]:
    if not schedule.axes:
        if len(sizes) != 1:
            raise MeshError(f"{schedule} is not placed: give one size, not {dict(sizes)}")
        return {"": next(iter(sizes.values()))}
    for axis in schedule.axes:
        if axis not in sizes:
            raise MeshError(f"{schedule}: axis {axis!r} has no size here. {nearest(axis, sizes)}")
    return {axis: size for axis, size in sizes.items() if axis in schedule.axes}


def _program(leaf: Leaf, mesh: Mapping[str, int]) -> Program:
    n = math.prod(mesh[a] for a in leaf.axes or ("",))
    return relabelled(expand(leaf, n), permutation(leaf.relabels, n))


def _needs(
    s: Schedule, mesh: dict[str, int], frame: tuple[str, ...], held: dict[str, State], w: Fraction
) -> Iterable[Fraction]:
    """What has to be whole when multiplied by m. Brings ``held`` up to date."""
    match s:
        case Leaf():
            yield w
            if not s.facing.scatters:
                left = math.prod(mesh[a] for a in frame if held[a][0] != states.SHARD)
                yield w * left / _program(s, mesh).chunks
            held.update(s.type.after)
        case Then(parts=parts):
            for part in parts:
                yield from _needs(part, mesh, frame, held, w)
        case Beside(parts=parts):
            after = held
            for part in parts:
                after = dict(held)
                yield from _needs(part, mesh, frame, after, w / len(parts))
            held.update(after)


def _roots(state: State, axis: str, mesh: Mapping[str, int]) -> Ints:
    """The coordinates, on this axis, of the roots that the state means; 0 where it means none."""
    if state[0] != states.ROOT or not state[1]:
        return np.zeros(1, np.int64)
    axes, relabels, count = state[1]
    shape = tuple(mesh[a] for a in axes or ("",))
    names = permutation(relabels, math.prod(shape))
    return np.unravel_index(names[:count], shape)[(axes or ("",)).index(axis)]


@dataclass(frozen=True)
class _View:
    """The buffer of a rank as [frame..., m], all of them by source rank first in an all-to-all."""

    mesh: dict[str, int]
    frame: tuple[str, ...]
    m: int
    pairs: bool

    @property
    def count(self) -> int:
        """All (rank, cell) of the mesh."""
        n = math.prod(self.mesh.values())
        return n * (n if self.pairs else 1) * math.prod(self.mesh[a] for a in self.frame) * self.m

    def steps(self, s: Schedule, held: dict[str, State], start: int, m: int) -> list[Step]:
        """The steps of a normal form on the cells start to start + m of every frame slot.

        Brings ``held``, the state of each axis, up to date.
        """
        match s:
            case Leaf():
                done = self.leaf(s, held, start, m)
                held.update(s.type.after)
                return done
            case Then(parts=parts):
                return [step for part in parts for step in self.steps(part, held, start, m)]
            case Beside(parts=parts):
                m, after = m // len(parts), held
                # Of each part, the steps of each of its stages: one, where parts are not staggered.
                staged: list[list[list[Step]]] = []
                for i, part in enumerate(parts):
                    after = dict(held)
                    stages = stages_of(part) if isinstance(s, Staggered) else (part,)
                    staged.append([self.steps(x, after, start + i * m, m) for x in stages])
                held.update(after)
                at_once: Iterable[list[tuple[int, int]]] = [[(i, 0) for i in range(len(parts))]]
                if isinstance(s, Staggered):
                    at_once = ticks(len(parts), len(staged[0]))
                return [
                    joined([x for x in steps if x])
                    for now in at_once
                    for steps in zip_longest(*(staged[i][stage] for i, stage in now))
                ]
        raise TypeError(s)

    def leaf(self, leaf: Leaf, held: dict[str, State], start: int, m: int) -> list[Step]:
        program = _program(leaf, self.mesh)
        own = leaf.axes or ("",)
        others = [a for a in self.mesh if a not in own]
        # A lane is a choice of coordinates on the other axes: only the root's has anything to send.
        # That is one: of several roots nothing but their own axes is worked on.
        lanes = [
            _roots(held[a], a, self.mesh) if held[a][0] == states.ROOT else range(self.mesh[a])
            for a in others
        ]
        grid = np.meshgrid(*lanes, indexing="ij")
        lane = {a: g.reshape(-1)[None, :, None] for a, g in zip(others, grid, strict=True)}
        count = math.prod(len(x) for x in lanes)
        return [
            self.step(program, step, own, lane, count, held, start, m)
            for step in program.dense_steps()
        ]

    def step(
        self, program: Program, step: Step, own: tuple[str, ...], lane: dict[str, Ints],
        count: int, held: dict[str, State], start: int, m: int,
    ) -> Step:  # fmt: skip
        at_src, at_dst = ({**lane, **self.on(own, r)} for r in (step.src, step.dst))
        cell = (
            self.pair_cells(program, step, own, lane, held, start, m)
            if self.pairs
            else self.cells(program, step, own, lane, held, start, m)
        )
        whole = (step.size, count, cell.shape[-1])
        add = np.broadcast_to(step.add[:, None, None], whole).reshape(-1)
        cell, src, dst = (
            np.broadcast_to(x, whole).reshape(-1)
            for x in (cell, self.linear(at_src), self.linear(at_dst))
        )
        return Step(add, cell, src, dst, line=step.line)

    def cells(
        self, program: Program, step: Step, own: tuple[str, ...], lane: dict[str, Ints],
        held: dict[str, State], start: int, m: int,
    ) -> Ints:  # fmt: skip
        """The cells that the sends mean, [sends, lanes, cells of one chunk]."""
        scattered = [a for a in self.frame if a not in own and held[a][0] == states.SHARD]
        at = {a: lane[a] for a in scattered}
        if program.kind.scatters:
            at |= self.on(own, step.chunk)
            left = self.slots([a for a in self.frame if a not in (*own, *scattered)], start, m)
        else:
            left = self.slots([a for a in self.frame if a not in scattered], start, m)
            # [chunks, cells of one chunk], then those of each send's chunk.
            left = {
                a: np.broadcast_to(x, (1, 1, self.size(left)))
                .reshape(program.chunks, -1)[step.chunk][:, None, :]
                for a, x in left.items()
            }  # fmt: skip
        return self.linear({**at, **left}, (*self.frame, "m"))

    def pair_cells(
        self, program: Program, step: Step, own: tuple[str, ...], lane: dict[str, Ints],
        held: dict[str, State], start: int, m: int,
    ) -> Ints:  # fmt: skip
        """As ``cells``, in an all-to-all: (S, D, k), of which other axes fix the S or the D."""
        s, d = np.divmod(step.chunk, program.n)
        n = math.prod(self.mesh.values())
        others = [a for a in self.mesh if a not in own]
        free = self.slots(others, start, m)
        source = self.on(own, s)
        target = self.on(own, d)
        for a in others:
            inbox = held[a][0] == states.INBOX
            source[a], target[a] = (free[a], lane[a]) if inbox else (lane[a], free[a])
        return (self.linear(source) * n + self.linear(target)) * self.m + free["m"]

    def on(self, axes: tuple[str, ...], index: Ints) -> dict[str, Ints]:
        """The coordinates, on these axes, of linear indices [sends], as [sends, 1, 1]."""
        shape = tuple(self.mesh[a] for a in axes)
        coordinates = np.unravel_index(index, shape)
        return {a: x[:, None, None] for a, x in zip(axes, coordinates, strict=True)}

    def slots(self, axes: list[str], start: int, m: int) -> dict[str, Ints]:
        """All coordinates on these axes and in "m", row-major, each as [1, 1, cells]."""
        grid = np.meshgrid(
            *(np.arange(self.mesh[a]) for a in axes), start + np.arange(m), indexing="ij"
        )
        return {a: g.reshape(1, 1, -1) for a, g in zip((*axes, "m"), grid, strict=True)}

    @staticmethod
    def size(slots: dict[str, Ints]) -> int:
        return slots["m"].shape[-1]

    def linear(self, at: dict[str, Ints], axes: tuple[str, ...] | None = None) -> Ints:
        """The linear index of coordinates, over the mesh or over these axes, row-major."""
        index: Any = np.zeros((1, 1, 1), np.int64)
        for a in axes or tuple(self.mesh):
            index = index * (self.m if a == "m" else self.mesh[a]) + at[a]
        return index
