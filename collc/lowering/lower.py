"""From a proved schedule to values on a device.

The buffer is viewed as [axes in mesh order..., m, rest...]: a dimension for each axis that the
schedule scatters somewhere. Each leaf slices its own axes' dimensions, the parts of ``|`` slice m,
so every order of scatters ends where its lax namesake does. Only dimension 0 of an operand is cut;
the rest is carried along, so that what automatic axes shard is never touched.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from collc.analysis.certificate import Certificate
from collc.analysis.relative import rolled
from collc.errors import ScheduleError
from collc.language.algebra import Beside, Leaf, Schedule, Staggered, Then
from collc.language.expand import expand, relabelled
from collc.language.normal import stages_of, ticks
from collc.lowering import native, orbits, tables
from collc.lowering.loops import Lowering, run, scoped, together
from collc.lowering.ranks import Place
from collc.lowering.wire import Wire

Values = list[jax.Array]


@dataclass(frozen=True)
class Frame:
    """How a buffer is cut: the scattered axes in mesh order with their sizes, and what m divides by.

    ``roots``: where it begins or ends at several roots, how many; m is then that of all their parts.
    """

    axes: tuple[str, ...]
    sizes: Mapping[str, int]
    grain: int
    roots: int = 1

    @property
    def slots(self) -> int:
        return math.prod(self.sizes[a] for a in self.axes)


def frame(schedule: Schedule, sizes: Mapping[str, int]) -> Frame:
    """The frame of a placed schedule on a mesh whose axes, in mesh order, have these sizes.

    Raises ScheduleError where scattered axes would cut across the parts of several roots.
    """
    leaves = list(schedule.leaves())
    cut = {a for leaf in leaves if leaf.facing.scatters for a in leaf.axes}
    order = tuple(a for a in linear(schedule, sizes) if a in cut)
    chunks = {_chunks(leaf, sizes) for leaf in leaves if not leaf.facing.scatters}
    roots = schedule.type.roots
    if roots > 1 and order:
        raise ScheduleError(
            f"{schedule} begins or ends at {roots} roots and scatters over {', '.join(order)}, which "
            "cuts the buffer in another way. Take schedules without scatters there, or one root."
        )
    return Frame(order, sizes, _shares(schedule.normal) * math.lcm(1, *chunks), roots)


def linear(schedule: Schedule, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The schedule's axes in the order in which its ranks are numbered.

    Tuple order, as in lax, where all is placed on one tuple; else mesh order, that of ``sizes``.
    """
    alike = {leaf.axes for leaf in schedule.leaves()}
    return next(iter(alike)) if len(alike) == 1 else tuple(a for a in sizes if a in schedule.axes)


def _chunks(leaf: Leaf, sizes: Mapping[str, int]) -> int:
    return 1 if leaf.native else expand(leaf, math.prod(sizes[a] for a in leaf.axes)).chunks


def _shares(s: Schedule) -> int:
    """Into how many parts nested ``|`` cut m."""
    match s:
        case Then(parts=parts):
            return math.lcm(*(_shares(p) for p in parts))
        case Beside(parts=parts):
            return len(parts) * math.lcm(*(_shares(p) for p in parts))
    return 1


@dataclass
class _Part:
    """What one part of ``|`` is worked on with."""

    frame: Frame
    op: str
    wire: Wire
    roll: bool = True
    # By axes: what a scatter took in, dead by now, which the gather may write into.
    spare: dict[tuple[str, ...], Values] = field(default_factory=dict)


def lower(certificate: Certificate, op: str, wire: Wire, xs: Values) -> Values:
    """Runs a proved schedule on operands whose dimension 0 is what it cuts.

    [s, ...] -> [s, ...] for an all_reduce, reduce or broadcast, [N * k, ...] -> [k, ...] for a
    reduce_scatter or scatter, [k, ...] -> [N * k, ...] for an all_gather or gather, and
    [N * k, ...] -> [N * k, ...] for an all_to_all, by its N = product of the axes' sizes ranks.
    """
    schedule = certificate.schedule
    cut = frame(schedule, dict(certificate.sizes))
    before = {a: s for a, (s, _) in schedule.type.before.items()}
    after = {a: s for a, (s, _) in schedule.type.after.items()}
    scattered = {a for a in cut.axes if before.get(a) == "shard"}
    ends = {a for a in cut.axes if after.get(a) == "shard"}
    opened = [_open(cut, x, scattered) for x in xs]
    part = _Part(cut, op, wire)
    done = run(_lower(schedule.normal, part, [x for x, _ in opened]))
    grown = math.prod(cut.sizes[a] for a in scattered), math.prod(cut.sizes[a] for a in ends)
    return [
        _close(cut, y, x.shape[0] * grown[0] // grown[1], m)
        for y, x, (_, m) in zip(done, xs, opened, strict=True)
    ]


def _open(cut: Frame, x: jax.Array, scattered: set[str]) -> tuple[jax.Array, int]:
    """The operand as [axes..., m, rest...], padded so that m divides, and m before that.

    Of several roots every one's part is padded by itself, and m is that of one.
    """
    dims = [1 if a in scattered else cut.sizes[a] for a in cut.axes]
    if cut.roots > 1:
        dims = [cut.roots]
    slots = math.prod(dims)
    m = -(-x.shape[0] // slots)
    if x.shape[0] != slots * m:
        x = _pad(x, 0, slots * m)
    x = x.reshape(*dims, m, *x.shape[1:])
    grain = cut.grain // cut.roots
    x = _pad(x, len(dims), -(-m // grain) * grain)
    return (x.reshape(-1, *x.shape[2:]) if cut.roots > 1 else x), m


def _close(cut: Frame, y: jax.Array, size: int, m: int) -> jax.Array:
    k = len(cut.axes)
    if cut.roots > 1:
        y, k = y.reshape(cut.roots, -1, *y.shape[1:]), 1
    if y.shape[k] != m:
        y = jax.lax.slice_in_dim(y, 0, m, axis=k)
    y = y.reshape(math.prod(y.shape[: k + 1]), *y.shape[k + 1 :])
    return y if y.shape[0] == size else y[:size]


def _pad(x: jax.Array, axis: int, size: int) -> jax.Array:
    missing = size - x.shape[axis]
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])


def _lower(s: Schedule, part: _Part, xs: Values) -> Lowering:
    match s:
        case Leaf():
            return (yield from _leaf(s, part, xs))
        case Then(parts=parts):
            for p in parts:
                xs = yield from _lower(p, part, xs)
            return xs
        case Staggered(parts=parts):
            stages = stages_of(parts[0])
            # To XLA a loop is one operation: next to it no other axis's rounds can be in flight.
            own = [replace(part, spare={}, roll=False) for _ in parts]
            slices = _cut(xs, part.frame, len(parts))
            for t, now in enumerate(ticks(len(parts), len(stages))):
                if t:
                    # Or XLA would do a stage of all slices before the next one of any. Unused
                    # outputs would be dropped, and the tie with them, so all slices take part.
                    slices = jax.lax.optimization_barrier(slices)
                done = yield from together([_lower(stages[j], own[i], slices[i]) for i, j in now])
                for (i, _), ys in zip(now, done, strict=True):
                    slices[i] = ys
            return _joined(slices, part.frame)
        case Beside(parts=parts):
            own = [replace(part, spare={}) for _ in parts]
            shares = _cut(xs, part.frame, len(parts))
            each = zip(parts, own, shares, strict=True)
            done = yield from together([_lower(p, mine, share) for p, mine, share in each])
            return _joined(done, part.frame)
    raise TypeError(f"not a normal form: {s!r}")


def _cut(xs: Values, frame: Frame, parts: int) -> list[Values]:
    """The operands' equal shares of m, by part."""
    axis = len(frame.axes)
    each = [jnp.split(x, parts, axis=axis) for x in xs]
    return [list(share) for share in zip(*each, strict=True)]


def _joined(shares: list[Values], frame: Frame) -> Values:
    axis = len(frame.axes)
    return [jnp.concatenate(ys, axis=axis) for ys in zip(*shares, strict=True)]


def _leaf(leaf: Leaf, part: _Part, xs: Values) -> Lowering:
    cut, kind = part.frame, leaf.facing
    place = Place(leaf, cut.sizes, part.op, part.wire)
    if leaf.native and not kind.scatters:
        with jax.named_scope(scope_of(leaf)):
            return native.lower(place, xs)
    if not kind.scatters:
        rows = [x.reshape(-1, *x.shape[len(cut.axes) + 1 :]) for x in xs]
        chunks = _chunks(leaf, cut.sizes)
        buffers = [r.reshape(chunks, -1, *r.shape[1:]) for r in rows]
        done = yield from scoped(scope_of(leaf), _engine(leaf, place, buffers, None, part.roll))
        return [y.reshape(x.shape) for x, y in zip(xs, done, strict=True)]
    dims = [cut.axes.index(a) for a in leaf.axes]
    shards = kind.before == "shard"
    fronts = [jnp.moveaxis(x, dims, range(len(dims))) for x in xs]
    rests = [f.shape[len(dims) :] for f in fronts]
    buffers = [
        f.reshape(*(() if shards else (place.n,)), *rest)
        for f, rest in zip(fronts, rests, strict=True)
    ]
    spare = part.spare.pop(leaf.axes, None) if shards else None
    if kind.after == "shard" and kind.before == "partial":
        part.spare[leaf.axes] = buffers
    done = yield from scoped(scope_of(leaf), _engine(leaf, place, buffers, spare, part.roll))
    ends = kind.after == "shard"
    whole = [1 if ends else cut.sizes[a] for a in leaf.axes]
    return [
        jnp.moveaxis(y.reshape(*whole, *rest), range(len(dims)), dims)
        for y, rest in zip(done, rests, strict=True)
    ]


def scope_of(leaf: Leaf) -> str:
    """What profilers show: ``collc/ring.all_gather/gpu``. XLA cuts names at an @."""
    return f"collc/{replace(leaf, axes=())}/{','.join(leaf.axes)}"


def _engine(
    leaf: Leaf, place: Place, buffers: Values, spare: Values | None, roll: bool
) -> Lowering:
    if leaf.native:
        return native.lower(place, buffers)
    if place.n == 1:
        # One rank is a shard and a whole at once.
        if leaf.facing.after == "shard" and leaf.facing.before != "shard":
            return [b[0] for b in buffers]
        return [b[None] for b in buffers] if leaf.facing.before == "shard" else buffers
    program = expand(leaf, place.n)
    if spare and any(
        s.shape[1:] != b.shape or s.dtype != b.dtype for s, b in zip(spare, buffers, strict=True)
    ):
        spare = None
    if program.orbit:
        program = rolled(program) if roll else program
        return (yield from orbits.lower(program, place, buffers, spare))
    return (yield from tables.lower(relabelled(program, place.names), place, buffers, spare))
