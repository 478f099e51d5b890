"""Shards as one row of numbers, whose head is the leaf: it does not depend on the number of ranks.

    [ranks..., layers..., k, 1, ...]  <-->  [layers..., ranks * k], sharded on the last dimension

Each device keeps its own part; nothing travels.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from collc.errors import CheckpointError
from collc.lowering.operands import names_in
from collc.lowering.shards import Shard


def layers_of(shard: Shard) -> tuple[int, ...]:
    """The stacked dimensions of a shard as it is outside a step."""
    shape = tuple(shard.value.shape)
    return shape[len(shard.axes) : len(shape) - max(1, len(shard.shape))]


def ranks_of_shard(shard: Shard) -> int:
    """How many ranks a shard lies over, whether or not each holds a part. Outside a step."""
    return math.prod(shard.value.shape[: len(shard.axes)])


def flat_shape(shard: Shard) -> tuple[int, ...]:
    """[layers..., ranks * k]"""
    layers = layers_of(shard)
    return (*layers, ranks_of_shard(shard) * shard.value.shape[len(shard.axes) + len(layers)])


def flat_sharding(shard: Shard) -> NamedSharding | None:
    """The sharding of the row that keeps each part where it is; None where parts have no place."""
    sharding = getattr(shard.value, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    entries = [names_in(entry) for entry in sharding.spec]
    entries += [()] * (len(shard.value.shape) - len(entries))
    leading, rest = entries[: len(shard.axes)], entries[len(shard.axes) :]
    sizes = zip(shard.axes, shard.value.shape, strict=False)
    placed = all(
        names == (axis,) or (names == () and size == 1)
        for names, (axis, size) in zip(leading, sizes, strict=True)
    )
    if not placed or any(rest):
        return None
    spec = PartitionSpec(*(None,) * len(layers_of(shard)), shard.axes)
    return NamedSharding(sharding.mesh, spec)


def flattened(path: str, shard: Shard) -> Any:
    """The row of a shard, [layers..., ranks * k]. Raises CheckpointError if it lies unlike one."""
    layers, value = layers_of(shard), shard.value
    sharding = flat_sharding(shard)
    if sharding is not None:
        parts = [part.data.reshape(*layers, -1) for part in value.addressable_shards]
        return jax.make_array_from_single_device_arrays(flat_shape(shard), sharding, parts)
    if not (value.is_fully_addressable or value.is_fully_replicated):
        raise CheckpointError(
            f"{path} is a shard over {' and '.join(shard.axes)}, but lies on its devices as "
            f"{value.sharding}. Place it by {PartitionSpec(*shard.axes)}."
        )
    rows = np.asarray(value).reshape(-1, *layers, flat_shape(shard)[-1] // ranks_of_shard(shard))
    return np.moveaxis(rows, 0, -2).reshape(flat_shape(shard))


def unflattened(row: Any, like: Shard, clean: bool) -> Shard:
    """The shard of a row, in place as ``like``. ``clean``: zero what follows the leaf's end.

    A row of numpy may have any length, and gives a shard of numpy.
    """
    layers, size, shape = layers_of(like), math.prod(like.shape), tuple(like.value.shape)
    wanted = flat_shape(like)
    if isinstance(row, np.ndarray):
        if clean:
            row, short = row[..., :size], np.zeros(wanted, row.dtype)
            short[..., :size] = row
            row = short
        rows = np.moveaxis(row.reshape(*layers, ranks_of_shard(like), -1), -2, 0)
        return replace(like, value=np.ascontiguousarray(rows.reshape(shape)))
    k = wanted[-1] // ranks_of_shard(like)
    one = (*(1,) * len(like.axes), *shape[len(like.axes) :])
    parts = []
    for part in row.addressable_shards:
        data = part.data
        if clean:
            own = min(max(0, size - (part.index[-1].start or 0)), k)
            data = jnp.where(jnp.arange(k) < own, data, 0) if own < k else data
        parts.append(data.astype(row.dtype).reshape(one))
    value = jax.make_array_from_single_device_arrays(shape, like.value.sharding, parts)
    return replace(like, value=value)
