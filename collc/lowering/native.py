"""XLA's own collectives, in the shapes that schedules have."""

from itertools import accumulate

import jax
import jax.numpy as jnp
from jax import lax

from collc.errors import ScheduleError
from collc.lowering import operands
from collc.lowering.ranks import Place


def lower(place: Place, xs: list[jax.Array]) -> list[jax.Array]:
    """One array for each operand: [n, ...] where the axis is whole, [...] where it is a shard.

    The whole buffer of an all_reduce or a broadcast may have any shape. Where XLA serves all ranks
    alike, a reduce and a gather leave the result on all of them, not on the root alone.
    """
    axes = place.leaf.axes[0] if len(place.leaf.axes) == 1 else place.leaf.axes
    kind = place.leaf.facing.name
    match kind, place.op:
        case "all_reduce" | "reduce", "sum":
            return lax.psum(xs, axes)
        case "all_reduce" | "reduce", "max":
            return lax.pmax(xs, axes)
        case "all_reduce" | "reduce", "min":
            return lax.pmin(xs, axes)
        case "reduce_scatter", "sum":
            return _scattered(xs, axes)
        case "reduce_scatter", _:
            # XLA reduces and scatters by sums only.
            whole = [lax.all_to_all(x, axes, 0, 0) for x in xs]
            over = {"max": jnp.max, "min": jnp.min}[place.op]
            return [over(x, axis=0) for x in whole]
        case "all_gather" | "gather", _:
            return [lax.all_gather(x, axes) for x in xs]
        case "all_to_all", _:
            return [lax.all_to_all(x, axes, 0, 0) for x in xs]
        case "broadcast" | "scatter", _:
            # XLA:CPU has no broadcast: a sum to which only the root contributes is the same.
            here = place.rank() == int(place.names[0])
            alone = [jnp.where(here, x, jnp.zeros_like(x)) for x in xs]
            return lax.psum(alone, axes) if kind == "broadcast" else _scattered(alone, axes)
    raise ScheduleError(f"{place.leaf}: XLA has no {kind}. Take one of collc's schedules.")


def _scattered(xs: list[jax.Array], axes: str | tuple[str, ...]) -> list[jax.Array]:
    """Sums of [n, ...], of which each rank keeps one, in one message: JAX has one operand for it.

    What is gathered does not travel as one: the buffer would stay for as long as any part is used.
    """
    if len(xs) == 1 or operands.automatic():
        return [lax.psum_scatter(x, axes) for x in xs]
    joined = jnp.concatenate([x.reshape(x.shape[0], -1) for x in xs], axis=1)
    ends = list(accumulate(x[0].size for x in xs))
    parts = jnp.split(lax.psum_scatter(joined, axes), ends[:-1])
    return [part.reshape(x.shape[1:]) for part, x in zip(parts, xs, strict=True)]
