"""How much each rank and each piece of its batch counts in one weighed loss."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from collc.errors import StepError
from collc.training.gradients import weights
from collc.training.gradients.backward import traced
from collc.training.gradients.loss import Loss
from collc.training.gradients.pieces import Pieces
from collc.training.strategy import WEIGHTED, Strategy

if TYPE_CHECKING:
    from collc.training.strategies import Strategies

WEIGHT = "collc weight"  # an argument of the loss besides its own: how much a piece counts
Counts = Callable[..., Any]  # of the loss's arguments


def weighing_of(
    strategies: "Strategies", counts: Mapping[str, Counts | None]
) -> tuple[str, Counts] | None:
    """The denominator of the one loss that is differentiated, and the function that counts; or None."""
    given = {mean: f for mean, f in counts.items() if f is not None}
    for mean, function in given.items():
        if not callable(function):
            raise StepError(
                f"value_and_grad counts {mean} by a function of the loss's arguments, not "
                f"{function!r}. Write it as lambda params, batch: ..."
            )
    by_mean = {s.mean: pattern for pattern, s in reversed(strategies.patterns)}
    weights.check_given(given, set(by_mean))
    if not given:
        return None
    mean, function = next(iter(given.items()))
    for other in (*WEIGHTED, "ranks"):
        if other != mean and other in by_mean:
            raise StepError(
                f'value_and_grad differentiates one loss, weighed by {mean}; but mean="{other}" of '
                f'{by_mean[other]!r} is another. Give it mean="{mean}", or "world" where it sees '
                "examples of all ranks; or take jax.value_and_grad and reduce."
            )
    return mean, function


def counts_of_pieces(
    function: Callable[[Mapping[str, Any]], Any],
    values: Mapping[str, Any],
    split: Sequence[str],
    k: int,
) -> jax.Array:
    """What a function of the loss's arguments counts in each piece: [k]."""
    if k == 1:
        return jnp.asarray(function(values))[None]
    pieces = Pieces(values, split, k, False)
    return lax.map(
        lambda piece: jnp.asarray(function(pieces.arguments(pieces.modules.state, piece))),
        pieces.pieces,
    )


class Share:
    """How much this rank counts, with what its pieces count.

    ``weight``: of each piece, by which its loss is multiplied; a mean over all pieces of all ranks is
    then the weighted one. ``own``: the mean of the rank's counts.
    """

    def __init__(self, strategies: "Strategies", mean: str, counts: jax.Array) -> None:
        self.strategies, self.plan, self.mean = strategies, strategies.plan, mean
        self.own = counts.mean()
        self.all = weights.averaged(self.own, self.plan, self.plan.axes)
        self.weight = weights.over(counts, self.all)
        self.some: dict[tuple[str, ...], jax.Array] = {}

    def scaled(self, x: jax.Array, strategy: Strategy, same: bool) -> jax.Array:
        """A gradient of the weighed loss, so that its mean is what the strategy wants."""
        if strategy.mean != self.mean:
            return weights.divided_as_declared(x, strategy)
        axes, counts = strategy.over, None if same else self.own
        if axes == self.plan.axes:
            return x if same else weights.times(x, 1, counts)
        if axes not in self.some:
            self.some[axes] = weights.averaged(self.own, self.plan, axes)
        return weights.times(x, weights.over(self.all, self.some[axes]), counts)

    def masked(
        self, grad: Callable[..., Any], names: Mapping[str, Any], loss: Loss
    ) -> Callable[..., Any]:
        """The gradients of a piece: 0 where it counts for nothing, but for what others send."""

        def zeroed(*args: Any) -> Any:
            values = dict(zip(names, args, strict=True))
            found = traced(lambda values: grad(*values.values()), values)
            counts = values[WEIGHT].reshape(()) > 0
            leaves, tree = jax.tree.flatten(found.grads)
            declared = self.strategies.declared(found.grads)
            kept = [
                x if same or leaf.shard is not None or leaf.strategy.mean != self.mean
                else jnp.where(counts, x, 0)
                for x, leaf, same in zip(leaves, declared, found.same, strict=True)
            ]  # fmt: skip
            value, aux = loss.unpacked(found.out)
            return loss.packed(jnp.where(counts, value, 0), aux), jax.tree.unflatten(tree, kept)

        return zeroed
