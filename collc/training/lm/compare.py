"""The same steps twice: with a plan's schedules, and with plain `jax.lax.pmean`.

The honest picture: same model, same initial state, same batches; taken in turns, step by step, each
way first in every other step, because the machine is never the same for two runs one after the
other.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from collc.errors import StepError

Step = Callable[
    [Any, Any, Any], jax.Array
]  # (model, optimizer, batch) -> loss, updating the first two in place
WARM = 2  # steps of each way that compile and warm up, and are not timed


@dataclass(frozen=True)
class SideBySide:
    """What two ways of the same `steps` steps gave. Times are medians in milliseconds, over all but
    the first steps.

    `largest_difference` is the largest absolute difference of any parameter, at `where`;
    `largest_change` is how far any parameter moved meanwhile, to judge that by. `ratio` is the
    median of the paired ratios, plan to lax: above 1, lax is faster; half of all pairs lie between
    `ratio_low` and `ratio_high`.
    """

    steps: int
    largest_difference: float
    where: str
    largest_change: float
    ratio: float
    ratio_low: float
    ratio_high: float
    plan_ms: float
    lax_ms: float


def _parameters(model: nnx.Module) -> dict[str, np.ndarray]:
    leaves = jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.array(leaf)
        for path, leaf in leaves
    }


def _timed(step: Step, state: tuple[nnx.Module, nnx.Optimizer], batch: jax.Array) -> float:
    began = time.perf_counter()
    step(*state, batch)
    jax.block_until_ready(nnx.state(state))
    return 1000 * (time.perf_counter() - began)


def side_by_side(
    plan: Step,
    lax: Step,
    fresh: Callable[[], tuple[nnx.Module, nnx.Optimizer]],
    batch: Callable[[int], jax.Array],
    steps: int,
    stop: Callable[[], bool] = lambda: False,
    done: Callable[[int], object] = lambda step: None,
) -> SideBySide | None:
    """Run `steps` steps both ways from `fresh()` state on `batch(t)`; None if `stop()` says so
    before the end.

    `done(t)` is told how many steps are finished. Raises StepError if a parameter is not finite at
    the end.
    """
    ways, states, times = (plan, lax), (fresh(), fresh()), np.zeros((steps, 2))
    start = _parameters(states[0][0])
    for t in range(steps):
        if stop():
            return None
        data = batch(t)
        for way in (0, 1) if t % 2 else (1, 0):
            times[t, way] = _timed(ways[way], states[way], data)
        done(t + 1)
    one, other = _parameters(states[0][0]), _parameters(states[1][0])
    difference = {name: float(np.abs(one[name] - other[name]).max()) for name in one}
    for name, largest in difference.items():
        if not np.isfinite(largest):
            raise StepError(
                f"After {steps} steps both ways, {name} is no longer finite: there is nothing to "
                "compare. Train afresh with a lower learning rate."
            )
    where = max(difference, key=lambda name: difference[name])
    timed = times[min(WARM, steps - 1) :]
    low, middle, high = (
        float(value) for value in np.quantile(timed[:, 0] / timed[:, 1], (0.25, 0.5, 0.75))
    )
    return SideBySide(
        steps=steps,
        largest_difference=difference[where],
        where=where,
        largest_change=max(float(np.abs(one[name] - start[name]).max()) for name in one),
        ratio=middle,
        ratio_low=low,
        ratio_high=high,
        plan_ms=float(np.median(timed[:, 0])),
        lax_ms=float(np.median(timed[:, 1])),
    )
