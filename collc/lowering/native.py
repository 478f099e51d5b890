"""XLA's own collectives, in the shapes that schedules have."""

import jax
import jax.numpy as jnp
from jax import lax

from collc.errors import ScheduleError
from collc.lowering.ranks import Place


def lower(place: Place, xs: list[jax.Array]) -> list[jax.Array]:
    """One array for each operand: [n, ...] where the axis is whole, [...] where it is a shard.

    The whole buffer of an all_reduce or a broadcast may have any shape.
    """
    axes = place.leaf.axes[0] if len(place.leaf.axes) == 1 else place.leaf.axes
    kind = place.leaf.facing.name
    match kind, place.op:
        case "all_reduce", "sum":
            return lax.psum(xs, axes)
        case "all_reduce", "max":
            return lax.pmax(xs, axes)
        case "all_reduce", "min":
            return lax.pmin(xs, axes)
        case "reduce_scatter", "sum":
            return [lax.psum_scatter(x, axes) for x in xs]
        case "reduce_scatter", _:
            # XLA reduces and scatters by sums only.
            whole = [lax.all_to_all(x, axes, 0, 0) for x in xs]
            over = {"max": jnp.max, "min": jnp.min}[place.op]
            return [over(x, axis=0) for x in whole]
        case "all_gather", _:
            return [lax.all_gather(x, axes) for x in xs]
        case "all_to_all", _:
            return [lax.all_to_all(x, axes, 0, 0) for x in xs]
        case "broadcast", _:
            # XLA:CPU has no broadcast: a sum to which only the root contributes is the same.
            root = place.names[0]
            return [
                lax.psum(jnp.where(place.rank() == int(root), x, jnp.zeros_like(x)), axes)
                for x in xs
            ]
    raise ScheduleError(f"{place.leaf}: XLA has no {kind}. Take one of collc's schedules.")
