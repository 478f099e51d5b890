"""How long collectives take, as compiled: what is compared takes turns, call by call.

A machine is never the same for two runs one after the other, so a time alone says little: the
ratio of two calls of one turn is what counts, and the median of those.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from collc.errors import DataError, ScheduleError
from collc.language.library import find
from collc.language.states import COLLECTIVES
from collc.lowering import collectives

USES = ("fresh", "donated", "intermediate")

PerDevice = Callable[[jax.Array], jax.Array]


def per_device(collective: str, on: Any) -> PerDevice:
    """The collective of a placed schedule or a plan; of a tuple of axis names XLA's own, by lax.

    [k] -> [k] for an all_reduce, all_to_all or broadcast, [n * k] -> [k] for a reduce_scatter and
    [k] -> [n * k] for an all_gather, over n ranks.
    """
    plain = isinstance(on, tuple)
    match collective:
        case "all_reduce":
            return lambda x: (
                lax.psum(x, on) if plain else collectives.psum(x, on, inconsistent=True)
            )
        case "reduce_scatter":
            scatter = lax.psum_scatter if plain else collectives.psum_scatter
            return lambda x: scatter(x, on, tiled=True)
        case "all_gather":
            gather = lax.all_gather if plain else collectives.all_gather
            return lambda x: gather(x, on, tiled=True)
        case "all_to_all":
            swap = lax.all_to_all if plain else collectives.all_to_all
            return lambda x: swap(x, on, 0, 0, tiled=True)
        case "broadcast":
            # lax.pbroadcast has no CPU lowering; native.broadcast is what XLA offers instead.
            own = find("native.broadcast") @ on if plain else on
            return lambda x: collectives.pbroadcast(x, own)
    raise ScheduleError(f"there is nothing to time of a {collective}: {', '.join(COLLECTIVES)}.")


def compiled(function: PerDevice, mesh: Mesh, x: jax.Array, use: str) -> Any:
    """The function on every device of the mesh, compiled for a value sharded over all of them.

    ``use``: "fresh" leaves the input as it is, "donated" gives it up, and "intermediate" makes the
    collective's input and uses up its output within the program, as a train step does.
    """
    if use not in USES:
        raise DataError(f"a value is used {', '.join(USES)}, not {use!r}")

    def body(x: jax.Array) -> jax.Array:
        return function(x + x) * x.dtype.type(2) if use == "intermediate" else function(x)

    spread = PartitionSpec(mesh.axis_names)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spread, out_specs=spread, check_vma=False)
    return jax.jit(mapped, donate_argnums=(0,) * (use == "donated")).lower(x).compile()


def zeros(mesh: Mesh, length: int, dtype: str = "float32") -> jax.Array:
    """[length], sharded over all axes of the mesh, for calls that are timed.

    Written by the devices: zeros of the host's may be one page of memory over and over.
    """
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.jit(partial(jnp.zeros, (length,), dtype), out_shardings=sharding)()


class Repeated:
    """A compiled function and the value that it is called on, again and again.

    Where that is donated, the output is the next call's input; so give zeros, which do not grow.
    """

    def __init__(self, function: Callable[[jax.Array], jax.Array], x: jax.Array, donated: bool):
        self.function, self.x, self.donated = function, x, donated

    def __call__(self) -> float:
        """Seconds of one call, until its output is there."""
        began = time.perf_counter()
        y = jax.block_until_ready(self.function(self.x))
        seconds = time.perf_counter() - began
        if self.donated:
            self.x = y
        return seconds


def in_turns(
    calls: Mapping[str, Callable[[], float]], iterations: int, warmup: int = 3
) -> dict[str, NDArray[np.float64]]:
    """Seconds of every call, [iterations] each: in each turn all are called once.

    In another order each time, since a call leaves caches and free pages behind for the next.
    """
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    order = np.random.default_rng(0)
    for turn in range(warmup + iterations):
        for name in order.permutation(names).tolist():
            took = calls[name]()
            if turn >= warmup:
                seconds[name].append(took)
    return {name: np.array(taken) for name, taken in seconds.items()}


def ratio(seconds: NDArray[np.float64], base: NDArray[np.float64]) -> float:
    """The median over the turns of one call's time to another's."""
    return float(np.median(seconds / base))
