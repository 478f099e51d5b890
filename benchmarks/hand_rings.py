"""Ring all-reduces as one writes them by hand: reduce-scatter, then all-gather, by ``ppermute``.

All are per-device functions [k] -> [k] under ``jax.shard_map``, for k that the n ranks divide. In
the scatter rank r sends chunk r first and ends with the sum of chunk r + 1, which it passes on first
in the gather.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

Ring = Callable[[jax.Array], jax.Array]
AXIS = "gpu"


def _hop(value: jax.Array) -> jax.Array:
    n = lax.axis_size(AXIS)
    return lax.ppermute(value, AXIS, [(r, (r + 1) % n) for r in range(n)])


def _get(buffer: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(buffer, i % buffer.shape[0], keepdims=False)


def _put(buffer: jax.Array, value: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(buffer, value, i % buffer.shape[0], axis=0)


def in_place(x: jax.Array) -> jax.Array:
    """Unrolled, on one buffer: every hop sends a chunk of it and writes what arrives into it."""
    n, r = lax.axis_size(AXIS), lax.axis_index(AXIS)
    buffer = x.reshape(n, -1)
    for t in range(n - 1):
        got = _hop(_get(buffer, r - t))
        buffer = _put(buffer, _get(buffer, r - t - 1) + got, r - t - 1)
    for t in range(n - 1):
        buffer = _put(buffer, _hop(_get(buffer, r + 1 - t)), r - t)
    return buffer.reshape(x.shape)


def values(x: jax.Array) -> jax.Array:
    """Unrolled: what travels is a value, and the gather writes to an output that starts as zeros."""
    n, r = lax.axis_size(AXIS), lax.axis_index(AXIS)
    buffer = x.reshape(n, -1)
    value = _get(buffer, r)
    for t in range(n - 1):
        value = _hop(value) + _get(buffer, r - t - 1)
    out = _put(jnp.zeros_like(buffer), value, r + 1)
    for t in range(n - 1):
        value = _hop(value)
        out = _put(out, value, r - t)
    return out.reshape(x.shape)


def _rolled(x: jax.Array, out: Ring) -> jax.Array:
    n, r = lax.axis_size(AXIS), lax.axis_index(AXIS)
    buffer = x.reshape(n, -1)

    def scatter(t: jax.Array, value: jax.Array) -> jax.Array:
        return _hop(value) + _get(buffer, r - t - 1)

    def gather(t: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        value, out = carry
        value = _hop(value)
        return value, _put(out, value, r - t)

    value = lax.fori_loop(0, n - 1, scatter, _get(buffer, r))
    _, whole = lax.fori_loop(0, n - 1, gather, (value, _put(out(buffer), value, r + 1)))
    return whole.reshape(x.shape)


def rolled(x: jax.Array) -> jax.Array:
    """The same in two ``fori_loop``, with an output that starts as zeros."""
    return _rolled(x, jnp.zeros_like)


def rolled_into_input(x: jax.Array) -> jax.Array:
    """The same, but that the gather writes into the input, which the scatter has used up."""
    return _rolled(x, lambda buffer: buffer)


HAND: dict[str, Ring] = {"in place": in_place, "values": values, "rolled": rolled}
