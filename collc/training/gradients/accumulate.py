"""The gradient of a rank's loss by strategies: what ``Strategies.value_and_grad`` returns."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from collc.errors import DataError
from collc.training.gradients import buckets, weights
from collc.training.gradients.backward import traced
from collc.training.gradients.buckets import Entry, Message
from collc.training.gradients.loss import check_microbatches, loss_of
from collc.training.gradients.pieces import Pieces
from collc.training.gradients.weighing import (
    WEIGHT,
    Counts,
    Share,
    counts_of_pieces,
    weighing_of,
)
from collc.training.layouts import is_array

if TYPE_CHECKING:
    from collc.training.strategies import Strategies


def graded(
    strategies: "Strategies",
    loss_fn: Callable[..., Any],
    argnums: Any,
    has_aux: bool,
    *,
    microbatches: int,
    batch: str | Sequence[str] | None,
    tokens: Counts | None,
    participates: Counts | None,
) -> Callable[..., Any]:
    """Value and gradients of a loss, reduced as declared, for use inside a decorated step."""
    loss, plan = loss_of(loss_fn, argnums, has_aux, batch), strategies.plan
    weighing = weighing_of(strategies, {"tokens": tokens, "participants": participates})
    check_microbatches(microbatches)

    @functools.wraps(loss_fn)
    def grad(*args: Any, **kwargs: Any) -> Any:
        values, split = loss.bound(args, kwargs)
        if microbatches > 1 and not any(
            is_array(x) for n in split for x in jax.tree.leaves(values[n])
        ):
            raise DataError(
                f"microbatches={microbatches}: none of the loss's arguments is a batch that could be "
                "split. Pass it as an argument, and name it in batch=."
            )
        share = None
        if weighing is not None:
            mean, function = weighing
            counted = counts_of_pieces(
                lambda v: loss.call(v, function), values, split, microbatches
            )
            share = Share(strategies, mean, jax.vmap(lambda c: weights.count(mean, c))(counted))
            values, split = {**values, WEIGHT: share.weight}, [*split, WEIGHT]

        def local(*args: Any) -> Any:
            here = dict(zip(values, args, strict=True))
            value, aux = loss.unpacked(loss.call(here))
            value = value.astype(jnp.promote_types(value.dtype, jnp.float32))
            if share is not None:
                value = value * here[WEIGHT].reshape(())
            return loss.packed(value, aux)

        def grad_of(function: Callable[..., Any]) -> Callable[..., Any]:
            one = loss.grad(function, values)
            return one if share is None or microbatches == 1 else share.masked(one, values, loss)

        def run(values: Mapping[str, Any]) -> Any:
            if microbatches == 1:
                return grad_of(local)(*values.values())
            pieces = Pieces(values, split, microbatches, has_aux)
            return pieces.gradient(local, grad_of, loss.wrt)

        found = traced(run, values)
        leaves, tree = jax.tree.flatten(found.grads)
        declared = strategies.declared(found.grads)
        scaled = share.scaled if share is not None else weights.Weights(plan, {}).scaled
        entries = strategies.entries(found.grads, leaves, declared, found.ready, scaled, found.same)
        value, aux = loss.unpacked(found.out)
        if share is not None:
            value = jnp.where(share.own > 0, value, 0)
        message = Message(plan, plan.axes, value.dtype.name, value.dtype.name)
        entries.append(Entry(value, message, -1, name="the loss"))
        *done, value = buckets.reduced(entries, strategies.bucket)
        return loss.packed(value, aux), jax.tree.unflatten(tree, done)

    return grad
