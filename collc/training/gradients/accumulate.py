"""``Strategies.value_and_grad``: the loss of a rank, differentiated, and reduced as declared."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from collc.errors import DataError, StepError
from collc.training.gradients import buckets, weights
from collc.training.gradients.backward import traced
from collc.training.gradients.buckets import Entry
from collc.training.gradients.pieces import Pieces
from collc.training.gradients.plain import positions_of
from collc.training.layouts import is_array, is_constant
from collc.training.modules import is_module
from collc.training.step import argument_names
from collc.training.strategy import WEIGHTED, Strategy

if TYPE_CHECKING:
    from collc.training.strategies import Strategies

_WEIGHT = "collc weight"  # an argument of the loss besides its own: how much a piece counts
Counts = Callable[..., Any]  # of the loss's arguments


def value_and_grad(
    self: "Strategies",
    loss_fn: Callable[..., Any],
    argnums: Any = 0,
    has_aux: bool = False,
    *,
    microbatches: int = 1,
    batch: str | Sequence[str] | None = None,
    tokens: Counts | None = None,
    participates: Counts | None = None,
) -> Callable[..., Any]:
    """As ``jax.value_and_grad`` (``nnx.value_and_grad`` of modules), for use inside a decorated step.

    ``loss_fn`` is the loss of one rank's batch, a mean over its examples. The value comes back as the
    mean over all ranks, the gradients as declared, in buckets in the order in which the backward
    makes them. ``argnums``, ``has_aux`` as in jax; what has_aux returns is this rank's own.

    ``microbatches=k`` takes the arguments named by ``batch`` (by default all that are not
    differentiated) in k pieces, adds up their gradients in at least float32, and reduces once.

    ``tokens``: a function of the loss's arguments, which says of how many tokens a loss is the mean;
    value and gradients are then those of the mean over all tokens. The loss is weighed before it is
    differentiated, so that this is true of shards and experts too. ``participates`` likewise says
    whether there is data. Of a rank or piece that counts for nothing the gradients may be NaN, but
    not what the loss itself sends to other ranks.

    Raises StepError where the strategies' denominators are not of one loss, or no leaf wants a count.
    """
    if not callable(loss_fn):
        raise StepError(f"value_and_grad takes a loss function, not {loss_fn!r}.")
    weighing = _weighing(self, {"tokens": tokens, "participants": participates})
    signature = inspect.signature(loss_fn)
    argnums, positions = positions_of(argnums, loss_fn, signature)
    names = list(signature.parameters)
    differentiated = [names[i] for i in positions]
    rest = tuple(name for name in names if name not in differentiated)
    batches = rest if batch is None else argument_names(batch)
    for name in batches:
        if name not in rest:
            why = "differentiated" if name in differentiated else "no argument of the loss"
            raise StepError(f"value_and_grad: batch={name!r} is {why}.")
    if type(microbatches) is not int or microbatches < 1:
        raise DataError(f"microbatches is a positive integer, not {microbatches!r}")

    @functools.wraps(loss_fn)
    def graded(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        split = [n for n in batches if not is_module(values[n]) and not is_constant(values[n])]
        nnx = sys.modules.get("flax.nnx") if is_module(values[differentiated[0]]) else None

        def call(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
            here: Any = {n: values[n] for n in names if n in values}
            arguments = inspect.BoundArguments(signature, here)
            return function(*arguments.args, **arguments.kwargs)

        share = None
        if weighing is not None:
            mean, function = weighing
            per_piece = _counts(lambda v: call(function, v), values, split, microbatches)
            share = _Share(self, mean, jax.vmap(lambda c: weights.count(mean, c))(per_piece))
            values = {**values, _WEIGHT: share.weight}
            split = [*split, _WEIGHT]

        def local(*args: Any) -> Any:
            here = dict(zip(values, args, strict=True))
            out = call(loss_fn, here)
            value, aux = out if has_aux else (out, None)
            value = value.astype(jnp.promote_types(value.dtype, jnp.float32))
            if share is not None:
                value = value * here[_WEIGHT].reshape(())
            return (value, aux) if has_aux else value

        def grad_of(loss: Callable[..., Any]) -> Callable[..., Any]:
            grad = (nnx or jax).value_and_grad(loss, argnums=argnums, has_aux=has_aux)
            return (
                grad if share is None or microbatches == 1 else share.masked(grad, values, has_aux)
            )

        def run(values: Mapping[str, Any]) -> Any:
            if microbatches == 1:
                return grad_of(local)(*values.values())
            wrt = differentiated if isinstance(argnums, tuple) else differentiated[0]
            return Pieces(values, split, microbatches, has_aux).gradient(local, grad_of, wrt)

        if microbatches > 1 and not any(
            is_array(x) for n in split if n != _WEIGHT for x in jax.tree.leaves(values[n])
        ):
            raise DataError(
                f"microbatches={microbatches}: none of the loss's arguments is a batch that could be "
                "split. Pass it as an argument, and name it in batch=."
            )
        found = traced(run, values)
        leaves, tree = jax.tree.flatten(found.grads)
        declared = self.declared(found.grads)
        scaled = share.scaled if share is not None else weights.Weights(self.plan, {}).scaled
        entries = self.entries(found.grads, leaves, declared, found.ready, scaled, found.same)
        value, aux = found.out if has_aux else (found.out, None)
        if share is not None:
            value = jnp.where(share.own > 0, value, 0)
        message = buckets.message_of(self.plan, self.plan.axes, value)
        entries.append(Entry(value, message, -1, name="the loss"))
        *done, value = buckets.reduced(entries, self.bucket)
        return ((value, aux) if has_aux else value), jax.tree.unflatten(tree, done)

    return graded


def _weighing(
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


def _counts(
    function: Callable[[Mapping[str, Any]], Any],
    values: Mapping[str, Any],
    split: Sequence[str],
    k: int,
) -> jax.Array:
    """The count of each piece: [k]."""
    if k == 1:
        return jnp.asarray(function(values))[None]
    pieces = Pieces(values, split, k, False)
    return lax.map(
        lambda piece: jnp.asarray(function(pieces.arguments(pieces.modules.state, piece))),
        pieces.pieces,
    )


class _Share:
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
            return weights.of_world(x, strategy, self.plan)
        axes, counts = strategy.axes(self.plan), None if same else self.own
        if axes == self.plan.axes:
            return x if same else weights.times(x, 1, counts)
        if axes not in self.some:
            self.some[axes] = weights.averaged(self.own, self.plan, axes)
        return weights.times(x, weights.over(self.all, self.some[axes]), counts)

    def masked(
        self, grad: Callable[..., Any], names: Sequence[str] | Mapping[str, Any], has_aux: bool
    ) -> Callable[..., Any]:
        """The gradients of a piece: 0 where it counts for nothing, but for what others send."""

        def zeroed(*args: Any) -> Any:
            values = dict(zip(names, args, strict=True))
            found = traced(lambda values: grad(*values.values()), values)
            counts = values[_WEIGHT].reshape(()) > 0
            leaves, tree = jax.tree.flatten(found.grads)
            declared = self.strategies.declared(found.grads)
            kept = [
                x if same or leaf.shard is not None or leaf.strategy.mean != self.mean
                else jnp.where(counts, x, 0)
                for x, leaf, same in zip(leaves, declared, found.same, strict=True)
            ]  # fmt: skip
            value, aux = found.out if has_aux else (found.out, None)
            value = jnp.where(counts, value, 0)
            return ((value, aux) if has_aux else value), jax.tree.unflatten(tree, kept)

        return zeroed
