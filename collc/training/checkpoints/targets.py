"""Where the plain arrays of a checkpoint go: what to ask Orbax for, and what to make of it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from collc.lowering.shards import Shard
from collc.training.checkpoints.flat import flat_shape, flat_sharding, unflattened
from collc.training.checkpoints.portable import NUMBERS, Place, Record, is_key, record
from collc.training.checkpoints.resize import resized

IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


@dataclass(frozen=True)
class Target:
    """What Orbax is asked for, None for nothing, and what makes the leaf of what it gives."""

    asked: ocp.RestoreArgs | None
    finish: Callable[[Any], Any]


def target(place: Place, saved: Record, rule: str | None) -> Target:
    """The target of a leaf that is like ``place.node``, saved as ``saved``."""
    like, here = place.node, record(place)
    if here.kind == "number":
        return Target(None, lambda _: _number(saved))
    if not saved.stored:
        return Target(None, lambda _: _empty(like))
    if isinstance(like, Shard):
        clean, sharding = saved.lay != here.lay, flat_sharding(like)
        if sharding is not None and _reaches(like.value):
            asked = _asked(flat_shape(like), like.value.dtype, sharding, strict=False)
            return Target(asked, lambda row: unflattened(row, like, clean))
        return Target(_numpy(), lambda row: _placed(unflattened(row, like, clean), like))
    if here.kind == "ranked" and (saved.lay, saved.shape) != (here.lay, here.shape):
        return Target(
            _numpy(), lambda x: _put(_resized(place.path, x, saved, here, rule, like), like)
        )
    sharding = _sharding(like)
    if sharding is None or not _reaches(like):
        return Target(_numpy(), lambda x: _put(x, like))
    if is_key(like):
        data = _key_data(like)
        return Target(_asked(data.shape, data.dtype, sharding), lambda x: _keys(x, like))
    return Target(_asked(like.shape, like.dtype, sharding), lambda x: x)


def _asked(
    shape: tuple[int, ...], dtype: Any, sharding: Any, strict: bool = True
) -> ocp.RestoreArgs:
    # Not strict: Orbax pads with zeros or truncates to the shape.
    return ocp.ArrayRestoreArgs(
        sharding=sharding, global_shape=tuple(shape), dtype=dtype, strict=strict
    )


def _numpy() -> ocp.RestoreArgs:
    return ocp.RestoreArgs(restore_type=np.ndarray)


def _number(saved: Record) -> Any:
    if saved.dtype == "bool":
        return saved.value == "True"
    return next(t for t in NUMBERS if t.__name__ == saved.dtype)(saved.value)


def _sharding(like: Any) -> Any:
    """Where a leaf has to lie; None for numpy and for what jax may move as it likes."""
    free = isinstance(like, jax.Array) and not like.committed
    return None if free else getattr(like, "sharding", None)


def _reaches(like: Any) -> bool:
    """Whether Orbax can write it in place: in several processes, not an array of one of them."""
    return jax.process_count() == 1 or not like.sharding.is_fully_addressable


def _put(x: np.ndarray, like: Any) -> Any:
    """Numpy values as what ``like`` is: numpy, or jax's in place. For keys, their data."""
    if isinstance(like, np.generic):
        return x[()]
    if isinstance(like, np.ndarray):
        return x
    sharding = _sharding(like)
    if sharding is None:
        placed: Any = jnp.asarray(x)
    elif sharding.is_fully_addressable:
        placed = jax.device_put(x, sharding)
    else:
        placed = jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
    return _keys(placed, like) if is_key(like) else placed


def _placed(shard: Shard, like: Shard) -> Shard:
    return replace(shard, value=_put(shard.value, like.value))


def _empty(like: Any) -> Any:
    """A leaf without elements; a shard of it is padding only."""
    if isinstance(like, Shard):
        row = np.zeros(flat_shape(like), like.value.dtype)
        return _placed(unflattened(row, like, clean=False), like)
    data = _key_data(like) if is_key(like) else like
    return _put(np.zeros(data.shape, data.dtype), like)


def _key_data(like: Any) -> Any:
    return jax.eval_shape(jax.random.key_data, like)


def _resized(
    path: str, x: np.ndarray, saved: Record, here: Record, rule: str | None, like: Any
) -> np.ndarray:
    inner = x.shape[len(saved.lay) + len(saved.shape) :]  # the words of a key
    old = x.reshape(saved.ranks, *saved.shape, *inner)
    new = (here.ranks, *here.shape, *inner)
    lay = (*here.lay, *here.shape, *inner)
    return np.reshape(resized(path, old, new, rule, is_key(like)), lay)


def _keys(data: jax.Array, like: Any) -> jax.Array:
    keys = jax.random.wrap_key_data(data, impl=_implementation(like))
    sharding = _sharding(like)
    return keys if sharding in (None, keys.sharding) else jax.device_put(keys, sharding)


def _implementation(like: Any) -> Any:
    if isinstance(like, jax.Array):
        return jax.random.key_impl(like)
    kinds = {i: jax.eval_shape(partial(jax.random.key, impl=i), 0).dtype for i in IMPLEMENTATIONS}
    return next(i for i, dtype in kinds.items() if dtype == like.dtype)
