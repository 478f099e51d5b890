"""Leaves of parameters cut in equal parts, one for each rank or each server.

A leaf is flattened, padded with zeros, and cut: what divides does not matter. Rank r holds part r.

    [5, 3], 4 ranks   --gather-->   [5, 3] from parts of 4 numbers, the last of them one of padding

Flattened with the first dimension fastest: a backward pass makes the gradient of w in x @ w as that of
w's transpose, which is so cut as it lies. By rows, the matmul of each such gradient became a slower one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from collc.errors import DataError
from collc.lowering.ranks import rank_in

# An identity whose cotangent is divided: a reduce-scatter of cotangents is a sum, and with it a mean.
divided_p = Primitive("collc_divided_cotangent")
UNPADDED = "collc_unpadded"  # what jaxprs call it


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["value"],
    meta_fields=["shape", "axes", "servers"],
)
@dataclass(frozen=True)
class Shard:
    """A leaf of which every rank holds a part.

    Inside a step ``value`` is this rank's part, [k, 1, ...] with as many dimensions as the leaf (one
    for a scalar), so that what decides by ``ndim`` decides as before. Outside, [size of each of
    ``axes``..., k, 1, ...]. A loop that stacks layers has a dimension before k. ``shape``: of the whole
    leaf, of one layer. ``servers``: how many ranks hold a part, None for all; others hold zeros.
    """

    value: Any
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    servers: int | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """The stacked dimension, () where there is none. Of what a step sees.

        Raises DataError for a part that a loop has taken apart.
        """
        front = self.value.ndim - max(1, len(self.shape))
        if front < 0:
            raise DataError(
                f"a collc.Shard of {list(self.shape)} holds {list(self.value.shape)}, which is no part "
                "of it: a loop went over the part. If the loop is over the parameter's dimension 0, "
                "name the parameter in collc.server(..., stacked=...), so that it is not cut."
            )
        return tuple(self.value.shape[:front])

    def parts(self, sizes: Mapping[str, int]) -> int:
        """How many parts the leaf is cut in, on axes of these sizes."""
        return self.servers or math.prod(sizes[a] for a in self.axes)


def is_shard(x: Any) -> bool:
    """Whether a node is a shard; for ``is_leaf``."""
    return isinstance(x, Shard)


def part(shape: Sequence[int], parts: int) -> int:
    """How many numbers of a leaf each part has: at least one, so that no array is empty.

    >>> part((5, 3), 4), part((), 8), part((0,), 8)
    (4, 1, 1)
    """
    return max(1, -(-math.prod(shape) // parts))


def own(x: jax.Array, shard: Shard, sizes: Mapping[str, int]) -> Shard:
    """This rank's part of a whole leaf [layers..., shape...], as ``shard`` is cut. Inside a step."""
    parts = shard.parts(sizes)
    rank = rank_in(shard.axes, sizes)
    cut = rows(x, shard.shape, parts)
    mine = jax.lax.dynamic_index_in_dim(cut, rank, axis=-2, keepdims=False)  # clamps
    if shard.servers:
        mine = jnp.where(rank < parts, mine, 0)
    return replace(shard, value=with_ones(mine, shard.shape))


def unpadded(shard: Shard, sizes: Mapping[str, int]) -> Shard:
    """The shard with zeros in its padding, and on ranks that do not serve. Inside a step."""
    size, k = math.prod(shard.shape), part(shard.shape, shard.parts(sizes))
    if size == math.prod(sizes[a] for a in shard.axes) * k:
        return shard

    def collc_unpadded(value: jax.Array) -> jax.Array:
        start, ones = rank_in(shard.axes, sizes) * k, (1,) * (len(shard.shape) - 1)
        at = start + jnp.arange(k).reshape(k, *ones)
        return jnp.where(at < size, value, jnp.zeros_like(value))

    # In a function of this name, so that who follows shards through an optimizer knows it.
    return replace(shard, value=jax.jit(collc_unpadded)(shard.value))


def rows(x: jax.Array, shape: Sequence[int], parts: int) -> jax.Array:
    """[layers..., shape...] -> [layers..., parts, k], padded."""
    layers = x.shape[: x.ndim - len(shape)]
    size, k = math.prod(shape), part(shape, parts)
    flat = _turned(x, len(layers)).reshape(*layers, size)
    if size < parts * k:
        flat = jnp.pad(flat, [(0, 0)] * len(layers) + [(0, parts * k - size)])
    return flat.reshape(*layers, parts, k)


def whole(rows: jax.Array, shape: Sequence[int]) -> jax.Array:
    """[layers..., parts, k] -> [layers..., shape...]"""
    layers, size = rows.shape[:-2], math.prod(shape)
    flat = rows.reshape(*layers, math.prod(rows.shape[-2:]))
    flat = flat if flat.shape[-1] == size else flat[..., :size]
    return _turned(flat.reshape(*layers, *shape[::-1]), len(layers))


def _turned(x: jax.Array, layers: int) -> jax.Array:
    """[layers..., shape...] -> [layers..., reversed shape...]"""
    return x.transpose(*range(layers), *reversed(range(layers, x.ndim)))


def with_ones(flat: jax.Array, shape: Sequence[int]) -> jax.Array:
    """[..., k] -> [..., k, 1, ...], with as many dimensions as the leaf."""
    return flat.reshape(*flat.shape, *(1,) * (len(shape) - 1))


def divided(x: jax.Array, n: int) -> jax.Array:
    """x, whose cotangent is divided by n."""
    return divided_p.bind(x, n=n) if jnp.issubdtype(x.dtype, jnp.inexact) else x


divided_p.def_impl(lambda x, n: x)
divided_p.def_abstract_eval(lambda x, n: x)
ad.deflinear2(divided_p, lambda ct, x, n: [ct / n])
batching.defvectorized(divided_p)
mlir.register_lowering(divided_p, lambda _, x, n: [x])
