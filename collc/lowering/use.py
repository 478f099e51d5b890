"""What a collective is called with, as a proved schedule: names, texts and plans resolved."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from collc.analysis.certificate import Certificate, certify
from collc.errors import DataError, MeshError, PlanError, ScheduleError, nearest
from collc.language.algebra import Leaf, Relabel, Schedule
from collc.language.expand import permutation
from collc.language.library import contents, find, modules
from collc.language.normal import map_leaves
from collc.language.states import KINDS
from collc.lowering import context
from collc.lowering.lower import frame, linear
from collc.lowering.primitive import bind
from collc.lowering.shards import is_shard
from collc.lowering.wire import Cast, Plain, Widened, Wire

On = Any  # None, an axis name, a tuple of them, a schedule or its text, or a plan


class Use:
    """A proved schedule, with everything that the primitive wants to know."""

    def __init__(self, certificate: Certificate, op: str, accumulate: Any, wire: Any, drop: bool):
        self.certificate, self.op, self.accumulate = certificate, op, accumulate
        self.wire, self.drop = wire, drop
        self.axes = tuple(axis for axis, _ in certificate.sizes)
        self.n = math.prod(size for _, size in certificate.sizes)
        self.native = all(leaf.native for leaf in certificate.schedule.leaves())
        self.slots = frame(certificate.schedule, dict(certificate.sizes))

    def sum(self) -> "Use":
        """The same, but that it sums."""
        return Use(self.certificate, "sum", self.accumulate, self.wire, self.drop)

    def widened(self, dtype: str) -> "Use":
        """The same, whose transpose keeps and sends sums of narrower values in ``dtype``."""
        return Use(self.certificate, self.op, self.accumulate, Widened(dtype=dtype), self.drop)

    def run(self, xs: list[jax.Array], shards: Sequence[int | None] = ()) -> list[jax.Array]:
        """Binds the primitive; ``shards`` as it takes them."""
        return bind(
            [varying(x, self.axes) for x in xs],
            self.certificate,
            op=self.op,
            wire=self.wire,
            accumulate=self.accumulate,
            drop=self.drop,
            shards=shards,
        )


def varying(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The value, typed as one that may differ along these axes."""
    missing = tuple(a for a in axes if a not in jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def no_shards(name: str, x: Any) -> Any:
    """The pytree. Raises DataError for one with shards: of these each rank has another part."""
    if any(map(is_shard, jax.tree.leaves(x, is_leaf=is_shard))):
        raise DataError(
            f"collc.{name}: there is a collc.Shard here, of which each rank has another part, so that "
            "values of different places would meet. Gradients of collc.all_gather are means over the "
            "ranks already; others go whole into state.push."
        )
    return x


def arrays(name: str, leaves: Sequence[Any]) -> list[jax.Array]:
    """The leaves as arrays of numbers."""
    found = []
    for leaf in leaves:
        try:
            value = jnp.asarray(leaf)
        except (TypeError, ValueError):
            raise DataError(f"collc.{name}: {leaf!r} is no array, nor a number") from None
        if jnp.issubdtype(value.dtype, jax.dtypes.extended):
            raise DataError(
                f"collc.{name}: a value of dtype {value.dtype} cannot travel. Of a random key send "
                "jax.random.key_data(key), and wrap it again."
            )
        found.append(value)
    return found


def bytes_of(values: Sequence[jax.Array]) -> int:
    """The bytes of some values together."""
    return sum(v.size * v.dtype.itemsize for v in values)


def use_of(
    name: str,
    kind: str,
    on: On,
    accumulate: Any = None,
    wire: Any = None,
    *,
    op: str = "sum",
    drop: bool = True,
    source: int | None = None,
    inconsistent: bool = False,
    size: int | None = None,
) -> Use:
    """What the public function ``name`` is called with, as a proved schedule. Raises as it does.

    ``size``: the operands' bytes on a rank, by which a plan may choose.
    """
    mesh = jax.sharding.get_abstract_mesh()
    schedule = _resolve(name, kind, on, size)
    if kind == "all_gather" and size is not None:  # what a rank holds is one of n chunks
        n = math.prod(mesh.shape[a] for a in schedule.axes if a in mesh.axis_names)
        schedule = _resolve(name, kind, on, size * n)
    for axis in schedule.axes:
        if axis not in mesh.axis_names:
            raise MeshError(
                f"collc.{name}: {schedule} is placed on {axis!r}, which the mesh here does not have. "
                f"{nearest(axis, mesh.axis_names)}"
                + ("" if mesh.axis_names else " It runs inside jax.shard_map.")
            )
        if axis not in mesh.manual_axes:
            raise MeshError(
                f"collc.{name}: {axis!r} is an automatic axis here. Name it in axis_names= of "
                "jax.shard_map, or leave it to XLA."
            )
    if schedule.collective is not KINDS[kind]:
        raise ScheduleError(
            f"collc.{name} needs {KINDS[kind].before} -> {KINDS[kind].after} on every axis, but "
            f"{schedule} is {schedule.type}."
        )
    sizes = {a: mesh.shape[a] for a in mesh.axis_names if a in schedule.axes}
    if source is not None:
        schedule = _from(schedule, source, sizes)
    certificate = certify(schedule, sizes)
    if not inconsistent and op in ("sum", "mean"):  # the largest is the same in any order
        _consistent(name, certificate, narrow=wire is not None or accumulate is not None)
    if wire is not None and certificate.trusted:
        raise ScheduleError(
            f"collc.{name}: wire= has no effect on {', '.join(certificate.trusted)}: XLA's own "
            "collectives send values as they are. Drop it, or take a schedule of collc's."
        )
    dtype = None if accumulate is None else floating(name, "accumulate", accumulate)
    return Use(certificate, op, dtype, wire_format(name, wire), drop and not inconsistent)


def floating(name: str, what: str, dtype: Any) -> str:
    """The dtype's name. Raises DataError for what is no floating-point dtype."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise DataError(
            f"collc.{name}: {what}= takes a floating-point dtype or None, not {dtype!r}"
        )
    return found.name


def wire_format(name: str, wire: Any) -> Wire:
    """What travels: a format, a dtype, or the value itself, whatever the sums are kept in.

    Raises DataError for what is none of these.
    """
    if wire is None:
        return Plain()
    if hasattr(wire, "pack") and hasattr(wire, "unpack"):
        return wire
    return Cast(floating(name, "wire", wire))


def _resolve(name: str, kind: str, on: On, size: int | None) -> Schedule:
    if isinstance(on, str) and not on.isidentifier():
        on = find(on)
    if isinstance(on, Schedule):
        if not on.axes:
            raise ScheduleError(f'collc.{name}: place the schedule on an axis: {on} @ "axis"')
        return on
    if isinstance(on, context.Chooses):
        return on.schedule(kind, size=size)
    axes = (on,) if isinstance(on, str) else on
    if axes is not None and not (
        isinstance(axes, list | tuple) and axes and all(isinstance(a, str) for a in axes)
    ):
        raise ScheduleError(
            f"collc.{name} takes an axis name or several, a schedule or its text, or a plan, not {on!r}."
        )
    if axes is not None and len(set(axes)) != len(axes):
        raise ScheduleError(f"collc.{name}: {on!r} names an axis twice. Drop one.")
    plan = context.current()
    if plan is None:
        raise PlanError(
            f"collc.{name}: no plan here. "
            + (
                taken_as_axis(kind, on)
                or "Decorate the step with @collc.schedule(plan, ...), or pass a schedule or a plan."
            )
        )
    try:
        return plan.schedule(kind, None if axes is None else tuple(axes), size=size)
    except PlanError as e:
        taken = taken_as_axis(kind, on)
        if not taken or on in jax.sharding.get_abstract_mesh().axis_names:
            raise
        raise PlanError(f"collc.{name}: {e} {taken}") from None


def taken_as_axis(kind: str, on: On) -> str:
    """What to say where the name of a schedule module stands for an axis; "" for other names."""
    if not isinstance(on, str) or on not in modules():
        return ""
    here = contents(modules()[on])
    one = on if on in here else f"{on}.{kind if kind in here else next(iter(here), kind)}"
    axes = jax.sharding.get_abstract_mesh().manual_axes
    axis = axes[-1] if axes else "gpu"
    return f"{on!r} is taken as an axis name here; for a schedule write '{one} @ {axis}'."


def _from(schedule: Schedule, source: int, sizes: dict[str, int]) -> Schedule:
    """The broadcast from that rank: each leaf's ranks shifted, so that its root is the source."""
    n = math.prod(sizes.values())
    if schedule.type.roots > 1:
        raise ScheduleError(
            f"collc.pbroadcast: {schedule} begins at {schedule.type.roots} roots, none of which has "
            "the whole. Take a broadcast from one."
        )
    if not isinstance(source, int) or not 0 <= source < n:
        raise DataError(
            f"collc.pbroadcast: source is one of the ranks 0 to {n - 1}, not {source!r}"
        )
    order = linear(schedule, sizes)
    at = dict(zip(order, np.unravel_index(source, [sizes[a] for a in order]), strict=True))

    def shifted(leaf: Leaf) -> Leaf:
        rank = 0
        for axis in leaf.axes:
            rank = rank * sizes[axis] + int(at[axis])
        n = math.prod(sizes[axis] for axis in leaf.axes)
        by = (rank - int(permutation(leaf.relabels, n)[0])) % n
        return replace(leaf, relabels=(*leaf.relabels, Relabel(shift=by))) if by else leaf

    return map_leaves(schedule, shifted)


def _consistent(name: str, certificate: Certificate, narrow: bool) -> None:
    """Replicas that may differ in the last bit are refused: they would drift apart for ever."""
    found = certificate.narrow if narrow else certificate.consistent
    if found is False:
        how = "with sums kept wider than what travels, " if narrow else ""
        raise ScheduleError(
            f"collc.{name}: {certificate.schedule}: {how}the ranks add in different orders, so "
            "replicas may differ in the last bit and drift apart. Take a schedule whose certificate "
            "says consistent: yes, or say inconsistent=True for a value that is not kept."
        )
