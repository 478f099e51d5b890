"""How much each rank's gradients count: by ranks, tokens, or participants.

A sum of weighted gradients over a sum of weights is a plain mean of gradients that were scaled:

    sum(c g) / sum(c)   =   mean(w g), w = c / mean(c)

So whatever the denominator, what travels is reduced to a mean, and can share a bucket.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from collc.errors import DataError, StepError
from collc.lowering import collectives
from collc.planning.plan import Plan
from collc.training.strategy import WEIGHTED, Strategy

_ARGUMENT = {"tokens": "tokens", "participants": "participates"}


class Weights:
    """This rank's counts, None for those that were not given."""

    def __init__(self, plan: Plan, counts: Mapping[str, Any]) -> None:
        self.plan = plan
        self.counts = {m: count(m, c) for m, c in counts.items() if c is not None}
        self.means: dict[tuple[str, tuple[str, ...]], jax.Array] = {}

    def mean(self, mean: str, axes: tuple[str, ...]) -> jax.Array:
        """The mean of a count over the ranks of some axes."""
        if (mean, axes) not in self.means:
            self.means[mean, axes] = averaged(self.counts[mean], self.plan, axes)
        return self.means[mean, axes]

    def scaled(self, x: jax.Array, strategy: Strategy, same: bool = False) -> jax.Array:
        """A gradient, whose mean over the strategy's axes is what the strategy wants.

        ``same``: whether it is the same on all ranks, of which the mean is right as of any other.
        """
        if strategy.mean in WEIGHTED:
            own = self.counts[strategy.mean]
            return times(x, over(own, self.mean(strategy.mean, strategy.over)), own)
        return divided_as_declared(x, strategy)


def check_given(given: Mapping[str, Any], means: set[str]) -> None:
    """Raises StepError for counts that are missing, or that no leaf wants."""
    for mean in WEIGHTED:
        name = _ARGUMENT[mean]
        if mean in means and mean not in given:
            raise StepError(
                f'a strategy has mean="{mean}", but {name}= was not given: say how much this rank '
                "counts; or, of gradients that value_and_grad of the strategies has reduced, "
                "state.push(grads, reduced=True)."
            )
        if mean not in means and mean in given:
            raise StepError(
                f'{name}= has no effect: no leaf\'s strategy has mean="{mean}". Drop it, or say so '
                "in a strategy."
            )


def count(mean: str, c: Any) -> jax.Array:
    """A count as a float32 scalar, of participants 0 or 1. Raises DataError for what is none."""
    try:
        value = jnp.asarray(c)
    except (TypeError, ValueError):
        value = None
    if value is None or value.shape or jnp.issubdtype(value.dtype, jnp.complexfloating):
        found = repr(c) if value is None else f"{value.dtype}{list(value.shape)}"
        raise DataError(f"{_ARGUMENT[mean]}= is one number for this rank, not {found}. Sum it up.")
    return ((value != 0) if mean == "participants" else value).astype(jnp.float32)


def averaged(c: jax.Array, plan: Plan, axes: tuple[str, ...]) -> jax.Array:
    """The mean over the ranks of some of a plan's axes."""
    if not axes:
        return c
    on = plan if axes == plan.axes else plan.schedule("all_reduce", axes, size=c.dtype.itemsize)
    return collectives.pmean(c, on)


def over(c: jax.Array, mean: jax.Array) -> jax.Array:
    """c / mean, 0 where nothing counts."""
    return jnp.where(mean > 0, c / jnp.where(mean > 0, mean, 1), 0)


def times(x: jax.Array, weight: Any, counts: jax.Array | None = None) -> jax.Array:
    """A gradient times its weight, in at least float32 until it has its dtype again.

    0 where ``counts`` is, whatever the gradient.
    """
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32)) * weight
    return (y if counts is None else jnp.where(counts > 0, y, 0)).astype(x.dtype)


def divided_as_declared(x: jax.Array, strategy: Strategy) -> jax.Array:
    """A gradient, whose mean over the strategy's axes is divided by the ranks that it says."""
    sizes = dict(strategy.placed.sizes)
    ranks = math.prod(sizes[a] for a in strategy.over)
    return x if ranks == strategy.divisor else times(x, ranks / strategy.divisor)
