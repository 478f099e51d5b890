"""A leaf of a tree with what is declared for it, and whether it lies so."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from collc.errors import DataError, StepError
from collc.lowering.shards import Shard, is_shard
from collc.planning.plan import Plan
from collc.training.kinds import differs, rank_axes
from collc.training.modules import is_module
from collc.training.paths import is_parameter, is_wrapped
from collc.training.strategy import Strategy


@dataclass(frozen=True)
class Declared:
    """A leaf of a tree and its strategy.

    ``axes``: of its Ranked node, or its Shard; None where it is neither.
    """

    path: str
    pattern: str
    strategy: Strategy
    axes: tuple[str, ...] | None
    shard: Shard | None

    def __str__(self) -> str:
        return f"{self.path or 'the gradient'} (pattern {self.pattern!r})"


def check_lies(leaf: Declared, plan: Plan) -> None:
    """Raises StepError for a leaf that lies in another way than declared."""
    kind, dropped = leaf.strategy.kind, leaf.strategy.dropped
    if leaf.axes is None:
        if kind == "local":
            axes = f'"{dropped[0]}"' if len(dropped) == 1 else dropped
            raise StepError(
                f"{leaf} is one value for all ranks, but its strategy is {leaf.strategy}, by which "
                f"each rank keeps its own. Give it each one: collc.ranked(value, plan, {axes})."
            )
        return
    over = " and ".join(leaf.axes)
    if leaf.shard is not None:
        if kind != "server" or set(leaf.axes) != set(plan.axes):
            raise StepError(
                f"{leaf} is a Shard over {over}, but its strategy is {leaf.strategy}. Declare "
                "strategy.server(plan), with a plan over these axes."
            )
    elif kind != "local" or set(leaf.axes) != set(dropped):
        names = ", ".join(f'"{a}"' for a in leaf.axes)
        raise StepError(
            f"{leaf} is ranked over {over}: each rank has its own. But its strategy is "
            f"{leaf.strategy}. Declare strategy.local({names}), or make it one for all ranks."
        )


def differentiable(tree: Any) -> Any:
    """A tree of parameters without what has no gradient, for which None stands."""
    if is_module(tree):
        tree = sys.modules["flax.nnx"].state(tree)

    def kept(node: Any) -> Any:
        return node if is_parameter(node) and all(map(_is_inexact, jax.tree.leaves(node))) else None

    return jax.tree.map(kept, tree, is_leaf=is_wrapped)


def _is_inexact(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return jnp.issubdtype(jnp.result_type(x) if dtype is None else dtype, jnp.inexact)


def nodes(tree: Any) -> Iterator[tuple[tuple[str, ...] | None, Shard | None]]:
    """For each leaf the axes of the Ranked node or Shard that it is in, and that Shard."""
    for node in jax.tree.leaves(tree, is_leaf=differs):
        shard = node if is_shard(node) else None
        yield from [(rank_axes(node), shard)] * len(jax.tree.leaves(node))


def number(x: Any, leaf: Declared) -> jax.Array:
    """A gradient as an array. Raises DataError for what has no mean."""
    try:
        value = jnp.asarray(x)
    except (TypeError, ValueError):
        raise DataError(f"{leaf}: {x!r} is no array, nor a number") from None
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        raise DataError(
            f"{leaf} is {value.dtype}, which has no mean of its own dtype. Give None for parameters "
            "that have no gradient, or cast it to a floating-point dtype."
        )
    return value


def shape_of(x: Any, leaf: Declared) -> jax.ShapeDtypeStruct:
    """What a rank reduces of a leaf, from the global arrays that are outside a step."""
    shape, dtype = jnp.shape(x), jnp.result_type(x)
    if leaf.axes is not None:
        shape = shape[len(leaf.axes) :]
    if leaf.shard is not None:
        whole = leaf.shard.shape
        shape = (*shape[: len(shape) - max(1, len(whole))], *whole)
    return jax.ShapeDtypeStruct(shape, dtype)
