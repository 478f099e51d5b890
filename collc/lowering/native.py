"""XLA's own collectives, in the shapes that schedules have."""

import jax
import jax.numpy as jnp
from jax import lax

from collc.errors import ScheduleError
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
            return [lax.psum_scatter(x, axes) for x in xs]
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
            send = lax.psum if kind == "broadcast" else lax.psum_scatter
            return [send(x, axes) for x in alone]
    raise ScheduleError(f"{place.leaf}: XLA has no {kind}. Take one of collc's schedules.")
