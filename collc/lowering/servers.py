"""Rows between all ranks and the first k, which serve: what ``server(servers=k)`` moves.

    push    [k, m, ...] on every rank   ->   [m, ...]: the mean of row c at rank c < k, else zeros
    pull    [m, ...], of ranks < k      ->   [k, m, ...]: row c of rank c, on all ranks

Ranks are linear over ``axes``. Leaves of one dtype travel in one message. The transpose of pull is
the push of the cotangents, summed. They run inside ``jax.shard_map(..., check_vma=False)``.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from collc.errors import DataError
from collc.lowering import operands
from collc.lowering.ranks import rank_in
from collc.lowering.use import Use, use_of
from collc.schedules import servers


def push(
    xs: Sequence[jax.Array],
    axes: Sequence[str],
    k: int,
    op: str = "mean",
    accumulate: Any = None,
) -> list[jax.Array]:
    """The mean, or with ``op="sum"`` the sum, over all ranks of row c of [k, ...], at rank c.

    [k, m, ...] -> [m, ...], zeros at ranks >= k. ``accumulate``: as for ``collc.psum``.
    Raises DataError for other leaves, a mean of integers and another operation; ScheduleError where
    k is more than the ranks; MeshError for axes that are not manual here.
    """
    if op not in ("mean", "sum"):
        raise DataError(f"servers.push: op is 'mean' or 'sum', not {op!r}")
    for x in xs:
        if x.ndim == 0 or x.shape[0] != k:
            raise DataError(f"servers.push: a value of shape {x.shape} has to have {k} rows")
        if op == "mean" and not jnp.issubdtype(x.dtype, jnp.inexact):
            raise DataError(f"servers.push: the mean of {x.dtype} is no {x.dtype}. Say op='sum'.")
    schedule = servers.push(k) @ tuple(axes)
    use = use_of("push", "reduce", schedule, accumulate, op=op)
    rank = _rank(use, axes)
    done = operands.flat([x.reshape(k, -1) for x in xs], use.run, k, k)

    def own(x: jax.Array, y: jax.Array) -> jax.Array:
        rows = y.reshape(x.shape)
        mine = jax.lax.dynamic_index_in_dim(rows, jnp.minimum(rank, k - 1), keepdims=False)
        return mine if k == use.n else jnp.where(rank < k, mine, 0)

    return [own(x, y) for x, y in zip(xs, done, strict=True)]


def pull(
    xs: Sequence[jax.Array], axes: Sequence[str], k: int, sums: str = "float32"
) -> list[jax.Array]:
    """The rows of the first k ranks, on every rank: [m, ...] -> [k, m, ...].

    ``sums``: the dtype in which cotangents of narrower leaves are added.
    Raises ScheduleError where k is more than the ranks; MeshError for axes that are not manual here.
    """
    use = use_of("pull", "broadcast", servers.pull(k) @ tuple(axes)).widened(sums)
    rank = _rank(use, axes)

    def placed(x: jax.Array) -> jax.Array:
        # Only the row of a rank's own is read, and of ranks that do not serve none is.
        rows = jnp.zeros((k, x.size), x.dtype)
        return jax.lax.dynamic_update_index_in_dim(rows, x.reshape(-1), jnp.minimum(rank, k - 1), 0)

    done = operands.flat([placed(x) for x in xs], use.run, k, k)
    return [y.reshape(k, *x.shape) for x, y in zip(xs, done, strict=True)]


def _rank(use: Use, axes: Sequence[str]) -> jax.Array:
    return rank_in(axes, dict(use.certificate.sizes))
