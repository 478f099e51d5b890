"""Shards to whole leaves and back: the two collectives of a parameter server.

gather     Shard [k]  ->  leaf [5, 3], the same on all ranks
scatter    leaf [5, 3] of gradients  ->  Shard [k], this rank's part of their mean
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from collc.errors import DataError, MeshError
from collc.language.algebra import Schedule
from collc.language.library import find
from collc.lowering import collectives, operands
from collc.lowering.primitive import is_narrower
from collc.lowering.servers import pull, push
from collc.lowering.shards import Shard, divided, is_shard, rows, whole, with_ones
from collc.lowering.use import taken_as_axis

SUMS = "float32"  # at least, for the gradients of shards


def gather_tree(tree: Any, on: Any = None) -> Any:
    """The whole leaves of a pytree of shards, in one collective for each of their dtypes.

    ``on``: as for ``collc.all_gather``. The gradient of a shard is a mean over the ranks, summed up in
    at least float32. Raises DataError for leaves that are no shards, MeshError outside a step and
    where the schedule is over other axes.
    """
    nodes, structure = jax.tree.flatten(tree, is_leaf=is_shard)
    for node in nodes:
        if not is_shard(node):
            raise DataError(
                "collc.all_gather: among the shards there is a leaf that is none, "
                f"{jax.typeof(node)}. Gather the shards alone, or all by state.pull()."
            )
    return jax.tree.unflatten(structure, gather(nodes, on))


def gather(shards: Sequence[Shard], on: Any = None) -> list[jax.Array]:
    """Whole leaves, [layers..., shape...], the same on all ranks. ``on`` as for ``gather_tree``."""
    _refuse_automatic("collc.all_gather")
    out: list[Any] = [None] * len(shards)
    for servers, axes in dict.fromkeys((s.servers, s.axes) for s in shards):
        here = [i for i, s in enumerate(shards) if (s.servers, s.axes) == (servers, axes)]
        own, n = [shards[i] for i in here], _ranks(axes)
        flats = [divided(s.value.reshape(*s.layers, -1), n) for s in own]
        by = _over(axes, on)
        if servers is None:
            rows_of = collectives.stacked(flats, by, SUMS)
        elif isinstance(by, Schedule):
            raise DataError(
                f"collc.all_gather: {by} has no effect on the shards of servers={servers}, which "
                f"servers.pull({servers}) gathers. Drop it."
            )
        else:
            rows_of = pull(flats, axes, servers, SUMS)
        for i, s, x in zip(here, own, rows_of, strict=True):
            out[i] = whole(jnp.moveaxis(x, 0, -2), s.shape)
    return out


def scatter(
    xs: Sequence[jax.Array],
    plan: Any,
    *,
    layers: Sequence[int],
    servers: int | None = None,
    sums: str,
    wire: Any = None,
) -> list[Shard]:
    """The parts of the means over the plan's axes: leaves [layers..., shape...] in, shards out.

    ``layers``: how many dimensions in front a loop has stacked, for each leaf. ``servers``: how many
    ranks hold a part, None for all. ``sums``: the dtype in which they are kept, and travel where
    ``wire`` does not say how; to k servers no sums travel.
    """
    _refuse_automatic("a parameter server")
    n = _ranks(plan.axes)
    shapes = [x.shape[front:] for x, front in zip(xs, layers, strict=True)]
    stacked = [
        jnp.moveaxis(rows(x, shape, servers or n), -2, 0)
        for x, shape in zip(xs, shapes, strict=True)
    ]
    if servers is None:
        wide = [x.astype(sums) for x in stacked]
        mine = collectives.scattered(wide, plan, op="mean", wire=wire)
    else:
        narrow = any(is_narrower(x.dtype, sums) for x in xs)
        mine = push(stacked, plan.axes, servers, accumulate=sums if narrow else None)
    return [
        Shard(with_ones(y.astype(x.dtype), shape), shape, plan.axes, servers)
        for x, y, shape in zip(xs, mine, shapes, strict=True)
    ]


def _refuse_automatic(what: str) -> None:
    """Raises MeshError where axes of the mesh stay with XLA: a flat part would undo their sharding."""
    if automatic := operands.automatic():
        raise MeshError(
            f"{what} cuts flattened leaves, but {' and '.join(automatic)} stay with XLA, which would "
            "gather what it shards over them. Let the plan take all axes, or reduce these parameters "
            "by strategy.all_reduce."
        )


def _ranks(axes: Sequence[str]) -> int:
    """How many ranks hold parts. Raises MeshError where these axes are not manual."""
    mesh = jax.sharding.get_abstract_mesh()
    if not set(axes) <= set(mesh.manual_axes):
        here = f"the mesh has {' and '.join(map(str, mesh.axis_names))}" if mesh.axis_names else ""
        raise MeshError(
            f"collc.Shard over {' and '.join(axes)}: each rank has its part only where these axes are "
            f"manual, but {here or 'there is no mesh'} here. Call it in a step that is decorated with "
            "@collc.schedule(plan), or in jax.shard_map."
        )
    return math.prod(mesh.shape[a] for a in axes)


def _over(axes: tuple[str, ...], on: Any) -> Any:
    """What to gather by, if it is over the shards' axes in their order."""
    if isinstance(on, str):
        on = (on,) if on.isidentifier() else find(on)
    given = axes if on is None else getattr(on, "axes", on)
    if isinstance(on, Schedule) and len(axes) > 1:
        given = tuple(a for a in axes if a in on.axes)
    if isinstance(given, list | tuple) and tuple(given) != axes:
        taken = taken_as_axis("all_gather", given[0]) if len(given) == 1 else ""
        raise MeshError(
            f"collc.all_gather: the shards lie over {' and '.join(axes)}, but the schedule is over "
            f"{' and '.join(map(str, given))}. {taken or 'Take the plan that the server has.'}"
        )
    return on
