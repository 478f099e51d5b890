"""Pytree leaves as operands of the primitive, and back.

Where all axes of the mesh are manual, the leaves of a dtype travel as one flat buffer. Where some
are automatic nothing is ravelled or concatenated: each leaf is an operand of its own, cut along a
dimension that no automatic axis shards.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from collc.errors import DataError, nearest

Run = Callable[[list[jax.Array]], list[jax.Array]]


def automatic() -> dict[str, int]:
    """The axes of the mesh that are not manual here, with their sizes; size 1 does not count."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return {}
    free = set(mesh.axis_names) - set(mesh.manual_axes)
    return {a: mesh.shape[a] for a in mesh.axis_names if a in free and mesh.shape[a] > 1}


def flat(xs: Sequence[jax.Array], run: Run, lead_in: int = 1, lead_out: int = 1) -> list[jax.Array]:
    """Runs on the leaves of each dtype as one buffer.

    Each leaf is [lead_in, p], or [p] where lead_in is 1, and comes back as [lead_out, p] likewise.
    """
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(xs):
        groups.setdefault(x.dtype, []).append(i)
    buffers = []
    for members in groups.values():
        rows = [xs[i].reshape(lead_in, -1) for i in members]
        joined = rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=1)
        buffers.append(joined.reshape(-1))
    out: list[Any] = [None] * len(xs)
    for members, buffer in zip(groups.values(), run(buffers), strict=True):
        joined, start = buffer.reshape(lead_out, -1), 0
        for i in members:
            size = xs[i].size // lead_in
            part = joined if size == joined.shape[1] else joined[:, start : start + size]
            out[i] = part if lead_out > 1 else part.reshape(-1)
            start += size
    return out


def names_in(entry: Any) -> tuple[str, ...]:
    """The axes in an entry of a PartitionSpec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def sharded_dims(
    x: jax.Array, spec: PartitionSpec | None, auto: dict[str, int]
) -> list[int] | None:
    """For each dimension, over how many devices automatic axes shard it; None where unknown."""
    mesh = jax.sharding.get_abstract_mesh()
    typed = jax.typeof(x).sharding.spec
    known = set(getattr(mesh, "explicit_axes", ()))
    if spec is None and not set(auto) <= known:
        return None
    entries = list(spec if spec is not None else typed)
    if len(entries) > x.ndim:
        raise DataError(f"specs: {spec} has more entries than a value of shape {x.shape}")
    entries += [None] * (x.ndim - len(entries))
    counts = []
    for entry in entries:
        names = names_in(entry)
        for name in names:
            if name not in mesh.axis_names:
                raise DataError(
                    f"specs: {spec} names axis {name!r}, which the mesh does not have. "
                    f"{nearest(str(name), mesh.axis_names)}"
                )
        counts.append(math.prod(auto.get(str(a), 1) for a in names))
    return counts


def shard_count(x: jax.Array, spec: PartitionSpec | None, auto: dict[str, int]) -> int | None:
    """Over how many devices automatic axes shard a value; None where unknown. Raises DataError."""
    counts = sharded_dims(x, spec, auto)
    return None if counts is None else math.prod(counts)


def cut(
    x: jax.Array, spec: PartitionSpec | None, auto: dict[str, int], slots: int
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """The leaf with a dimension in front that no automatic axis shards, and the way back.

    ``slots``: by what that dimension had best divide. Raises DataError where the sharding of the
    leaf is unknown: cutting along a sharded dimension would gather it.
    """
    if x.ndim == 0:
        return x.reshape(1), lambda y: y.reshape(())
    counts = sharded_dims(x, spec, auto)
    if counts is None:
        raise DataError(
            f"a value of shape {x.shape} on a mesh with automatic axes {', '.join(auto)}: how it is "
            "sharded over them is unknown inside jit. Say specs=, use Flax partitioning metadata, "
            f"or make the axes Explicit; or let the plan name {', '.join(auto)} too."
        )
    free = [d for d, k in enumerate(counts) if k == 1]
    if free:
        best = min(free, key=lambda d: (x.shape[d] % slots != 0, -x.shape[d], d))
        return jnp.moveaxis(x, best, 0), lambda y: jnp.moveaxis(y, 0, best)
    # All are sharded: the inner part of one is free, as [shards, size / shards].
    best = max(range(x.ndim), key=lambda d: x.shape[d] // counts[d])
    inner = x.shape[best] // counts[best]
    shape = (*x.shape[:best], counts[best], inner, *x.shape[best + 1 :])

    def back(y: jax.Array) -> jax.Array:
        return jnp.moveaxis(y, 0, best + 1).reshape(x.shape)

    return jnp.moveaxis(x.reshape(shape), best + 1, 0), back
