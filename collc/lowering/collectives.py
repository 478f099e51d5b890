"""The per-device functions, under their names in ``jax.lax``, with a schedule for the axis name.

They run inside ``jax.shard_map``, on any pytree. The schedule may be

- left out: the plan of the step that is being traced;
- an axis name or a tuple of them: that plan, on these axes only;
- a plan, a schedule placed on mesh axes, or the text of one.

Shapes, dtypes and the order of chunks are those of the lax namesake, and so are derivatives.
``accumulate``: the floating-point dtype in which sums of narrower leaves are kept; they still travel
as they are. ``wire``: the dtype in which wider floating-point leaves travel. Other leaves, integers
too, are summed and sent in their own dtype; XLA's own collectives send what they sum. What is both
is narrow on the way alone: each rank rounds a sum when it sends it on.

Raises MeshError for axes that are not manual here, DataError for shapes and dtypes that cannot
work, ScheduleError or ProofError for the schedule.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import PartitionSpec

from collc.errors import DataError
from collc.lowering import operands
from collc.lowering.shards import is_shard
from collc.lowering.use import On, Use, arrays, bytes_of, no_shards, use_of


def psum(
    x: Any,
    schedule: On = None,
    *,
    accumulate: Any = None,
    wire: Any = None,
    specs: Any = None,
    inconsistent: bool = False,
) -> Any:
    """Sum over the ranks, as ``lax.psum``.

    ``specs``: the leaves' sharding over automatic axes, a pytree like x. ``inconsistent=True`` takes
    a schedule whose replicas may differ in the last bit, for values that are not kept.
    """
    return _reduce(x, schedule, "sum", accumulate, wire, specs, inconsistent)


def pmean(
    x: Any,
    schedule: On = None,
    *,
    accumulate: Any = None,
    wire: Any = None,
    specs: Any = None,
    inconsistent: bool = False,
) -> Any:
    """Mean over the ranks, as ``lax.pmean``.

    ``specs``: the leaves' sharding over automatic axes, a pytree like x. ``inconsistent=True`` takes
    a schedule whose replicas may differ in the last bit, for values that are not kept.
    """
    return _reduce(x, schedule, "mean", accumulate, wire, specs, inconsistent)


def pmax(x: Any, schedule: On = None, *, specs: Any = None) -> Any:
    """Maximum over the ranks, as ``lax.pmax``; it has no derivative."""
    return _reduce(x, schedule, "max", None, None, specs)


def pmin(x: Any, schedule: On = None, *, specs: Any = None) -> Any:
    """Minimum over the ranks, as ``lax.pmin``; it has no derivative."""
    return _reduce(x, schedule, "min", None, None, specs)


def psum_scatter(
    x: Any,
    schedule: On = None,
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
    accumulate: Any = None,
    wire: Any = None,
) -> Any:
    """The sum over the ranks, of which rank r keeps chunk r, as ``lax.psum_scatter``.

    tiled: [..., n * k, ...] -> [..., k, ...] at ``scatter_dimension``; else [..., n, ...] -> [..., ...].
    """
    return scattered(
        x,
        schedule,
        scatter_dimension=scatter_dimension,
        tiled=tiled,
        accumulate=accumulate,
        wire=wire,
    )


def scattered(
    x: Any,
    schedule: On = None,
    *,
    op: str = "sum",
    scatter_dimension: int = 0,
    tiled: bool = False,
    accumulate: Any = None,
    wire: Any = None,
) -> Any:
    """``psum_scatter``, or with ``op="mean"`` the same of the mean."""
    leaves, tree = jax.tree.flatten(no_shards("psum_scatter", x))
    values = arrays("psum_scatter", leaves)
    size = bytes_of(values)
    use = use_of("psum_scatter", "reduce_scatter", schedule, accumulate, wire, op=op, size=size)
    if any(v.dtype == jnp.bool_ for v in values):
        raise DataError("collc.psum_scatter: booleans have no sum. Cast them, as to int32.")
    fronts = [_split("psum_scatter", use.n, v, scatter_dimension, tiled) for v in values]
    done = _exchange(use, fronts, use.n, 1)

    def back(front: jax.Array, y: jax.Array) -> jax.Array:
        y = y.reshape(front.shape[1:])
        # [k, rest]: the n * k dimension's own part is in front still.
        return jnp.moveaxis(y, 0, scatter_dimension) if tiled else y[0]

    return jax.tree.unflatten(tree, [back(f, y) for f, y in zip(fronts, done, strict=True)])


def all_gather(
    x: Any, schedule: On = None, *, axis: int = 0, tiled: bool = False, to: str = "varying"
) -> Any:
    """Every rank's value, as ``lax.all_gather``: stacked in a new dimension, or tiled along one.

    ``to="invarying"`` types the result as the same on all ranks, which the certificate has proved.

    Of ``collc.Shard`` nodes the leaves that they are parts of, whole; their gradients come back as
    means over the ranks, reduce-scattered by the same plan, in at least float32. All leaves have to be
    shards then, and the other options have no meaning.
    """
    if any(map(is_shard, jax.tree.leaves(x, is_leaf=is_shard))):
        if axis or tiled or to != "varying":
            raise DataError(
                "collc.all_gather: axis=, tiled= and to= have no effect on a collc.Shard, whose leaf "
                "is put together as it was. Drop them."
            )
        from collc.lowering import parts  # built on this module

        return parts.gather_tree(x, schedule)
    if to not in ("varying", "invarying"):
        raise DataError(f"all_gather: to is 'varying' or 'invarying', not {to!r}")
    leaves, tree = jax.tree.flatten(x)
    values = arrays("all_gather", leaves)
    drop, size = to == "invarying", bytes_of(values)
    use = use_of("all_gather", "all_gather", schedule, drop=drop, size=size)
    at = [_dimension("all_gather", v.shape if tiled else (use.n, *v.shape), axis) for v in values]
    done = _exchange(use, [v[None] for v in values], 1, use.n)

    def back(v: jax.Array, y: jax.Array, at: int) -> jax.Array:
        y = y.reshape(use.n, *v.shape)
        if not tiled:
            return jnp.moveaxis(y, 0, at)
        return jnp.moveaxis(y, 0, at).reshape(
            *v.shape[:at], use.n * v.shape[at], *v.shape[at + 1 :]
        )

    return jax.tree.unflatten(tree, [back(*each) for each in zip(values, done, at, strict=True)])


def stacked(xs: Sequence[jax.Array], schedule: On, sums: str) -> list[jax.Array]:
    """Every rank's values in a new dimension 0, as ``all_gather``.

    ``sums``: the dtype in which cotangents of narrower values are summed, and travel.
    """
    use = use_of("all_gather", "all_gather", schedule, drop=False, size=bytes_of(xs))
    done = _exchange(use.widened(sums), [x[None] for x in xs], 1, use.n)
    return [y.reshape(use.n, *x.shape) for x, y in zip(xs, done, strict=True)]


def all_to_all(
    x: Any, schedule: On = None, split_axis: int = 0, concat_axis: int = 0, *, tiled: bool = False
) -> Any:
    """Rank r's chunk s becomes rank s's chunk r, as ``lax.all_to_all``."""
    leaves, tree = jax.tree.flatten(no_shards("all_to_all", x))
    values = arrays("all_to_all", leaves)
    use = use_of("all_to_all", "all_to_all", schedule, size=bytes_of(values))
    fronts = [_split("all_to_all", use.n, v, split_axis, tiled) for v in values]
    at = [_dimension("all_to_all", v.shape, concat_axis) for v in values]
    done = _exchange(use, fronts, use.n, use.n)

    def back(v: jax.Array, front: jax.Array, y: jax.Array, at: int) -> jax.Array:
        y = y.reshape(front.shape)
        if not tiled:
            return jnp.moveaxis(y[:, 0], 0, at)
        y = jnp.moveaxis(y, 1, split_axis % v.ndim + 1)
        y = jnp.moveaxis(y, 0, at)
        return y.reshape(*y.shape[:at], y.shape[at] * y.shape[at + 1], *y.shape[at + 2 :])

    done = [back(*each) for each in zip(values, fronts, done, at, strict=True)]
    return jax.tree.unflatten(tree, done)


def pbroadcast(x: Any, schedule: On = None, source: int = 0, *, specs: Any = None) -> Any:
    """Rank ``source``'s value on every rank, as ``lax.pbroadcast``."""
    leaves, tree = jax.tree.flatten(no_shards("pbroadcast", x))
    values = arrays("pbroadcast", leaves)
    use = use_of("pbroadcast", "broadcast", schedule, source=source, size=bytes_of(values))
    return jax.tree.unflatten(tree, _whole(use, values, _specs(specs, tree)))


# ---- what all of them share -----------------------------------------------------------------------


def _is_bool(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.bool_)


def _reduce(
    x: Any, on: On, op: str, accumulate: Any, wire: Any, specs: Any, inconsistent: bool = False
) -> Any:
    leaves, tree = jax.tree.flatten(no_shards(f"p{op}", x))
    if not leaves:
        return x
    name = f"p{op}"
    numbers = arrays(name, leaves)
    size = bytes_of(numbers)
    use = use_of(
        name, "all_reduce", on, accumulate, wire, op=op, inconsistent=inconsistent, size=size
    )
    constant = not any(isinstance(v, Tracer) for v in leaves)
    if constant and (op not in ("sum", "mean") or not any(map(_is_bool, leaves))):
        # As in lax: a constant of the program is not sent.
        scaled = {"sum": lambda v: v * use.n, "mean": lambda v: v * use.n / use.n}
        return jax.tree.map(scaled[op], x) if op in scaled else x
    values = numbers
    if op in ("sum", "mean"):
        values = [v.astype(jnp.int32) if v.dtype == bool else v for v in values]
    each = _specs(specs, tree)
    whole = [i for i, v in enumerate(values) if not jnp.issubdtype(v.dtype, jnp.inexact)]
    if op != "mean" or not whole:
        return jax.tree.unflatten(tree, _whole(use, values, each))
    # The mean of integers is a float, as in lax: their sum, divided.
    parts = [i for i in range(len(values)) if i not in whole]
    done: dict[int, jax.Array] = {}
    for how, chosen in ((use, parts), (use.sum(), whole)):
        if chosen:
            own = None if each is None else [each[i] for i in chosen]
            done |= zip(chosen, _whole(how, [values[i] for i in chosen], own), strict=True)
    return jax.tree.unflatten(
        tree, [done[i] / use.n if i in whole else done[i] for i in sorted(done)]
    )


def _specs(specs: Any, tree: Any) -> list[PartitionSpec | None] | None:
    """The specs of the leaves of a pytree, from a pytree like it."""
    if specs is None:
        return None
    leaves, found = jax.tree.flatten(
        specs, is_leaf=lambda s: s is None or isinstance(s, PartitionSpec)
    )
    if found != tree:
        raise DataError(f"specs= has to be a pytree like the value, {tree}, but it is {found}.")
    return leaves


def _whole(
    use: Use, values: list[jax.Array], specs: list[PartitionSpec | None] | None
) -> list[jax.Array]:
    """Leaves in, leaves of the same shapes out."""
    auto = operands.automatic()
    if specs is not None and not auto:
        raise DataError("specs= has no effect here: no axis of the mesh is automatic. Drop it.")
    each = [None] * len(values) if specs is None else specs
    shards = [operands.shard_count(v, spec, auto) for v, spec in zip(values, each, strict=True)]
    slots = use.slots.slots * use.slots.grain
    if use.native:
        # As they are, but flat where a first dimension of 3 layers would be padded to 4.
        even = [
            v if v.ndim and (auto or v.shape[0] % slots == 0) else v.reshape(-1) for v in values
        ]
        done = use.run(even, shards)
        return [y.reshape(v.shape) for v, y in zip(values, done, strict=True)]
    if not auto:
        done = operands.flat([v.reshape(-1) for v in values], use.run)
        return [y.reshape(v.shape) for v, y in zip(values, done, strict=True)]
    pairs = [operands.cut(v, s, auto, slots) for v, s in zip(values, each, strict=True)]
    done = use.run([x for x, _ in pairs], shards)
    return [back(y) for (_, back), y in zip(pairs, done, strict=True)]


def _exchange(use: Use, fronts: list[jax.Array], lead_in: int, lead_out: int) -> list[jax.Array]:
    """[lead_in, p...] in, [lead_out, p...] out, as the primitive has them: with the leads merged."""
    if use.slots.grain == 1 and (use.native or (operands.automatic() and lead_in == 1)):
        return use.run(fronts)  # XLA has them as they are; a gather stacks them, and cuts nothing
    if operands.automatic():
        # [lead, k, rest] -> [lead * k, rest]; dimension 0 of what remains is cut along with it.
        merged = [
            f.reshape(f.shape[0] * f.shape[1], *f.shape[2:]) if f.ndim > 1 else f for f in fronts
        ]
        return use.run(merged)
    return operands.flat(fronts, use.run, lead_in, lead_out)


def _split(name: str, n: int, v: jax.Array, dimension: int, tiled: bool) -> jax.Array:
    """[n, k, rest...]: the dimension split over the ranks in front, its own part next."""
    if v.ndim == 0:
        raise DataError(f"collc.{name}: a scalar has no dimension to split over {n} ranks")
    dimension = _dimension(name, v.shape, dimension)
    size = v.shape[dimension]
    if tiled and size % n:
        raise DataError(
            f"collc.{name}: dimension {dimension} of shape {v.shape} does not divide over {n} ranks. "
            f"Pad it to {-(-size // n) * n}."
        )
    if not tiled and size != n:
        raise DataError(
            f"collc.{name}: dimension {dimension} of shape {v.shape} has to be {n}, one for each "
            "rank; or say tiled=True."
        )
    front = jnp.moveaxis(v, dimension, 0)
    return front.reshape(n, size // n, *front.shape[1:])


def _dimension(name: str, shape: tuple[int, ...], dimension: int) -> int:
    """The dimension counted from the front, or a DataError."""
    if not isinstance(dimension, int) or not -len(shape) <= dimension < len(shape):
        raise DataError(f"collc.{name}: a value of shape {shape} has no dimension {dimension}")
    return dimension % len(shape)
