"""The kinds of a step's arguments and results: replicated, batch, and ranked.

Replicated is the default. A *batch* is split on dimension 0. A *ranked* value is one for each rank:
a global array with a leading dimension for each axis, sharded on it, of which the step sees its own
slice.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from collc.errors import DataError, MeshError, StepError, nearest
from collc.lowering import context
from collc.lowering.ranks import rank_in
from collc.lowering.shards import Shard
from collc.planning.plan import Plan, check_plan

AXES = "collc_axes"  # the metadata of a ranked nnx.Variable


@partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["axes"])
@dataclass(frozen=True)
class Ranked:
    """A pytree of values of which every rank has its own.

    Outside a step each leaf is [size of each of ``axes`` in turn..., shape...]; inside, the slice
    [shape...] of this rank. It leaves the step as it came. ``axes``: a name or several; without,
    all of the plan's.
    """

    value: Any
    axes: str | Sequence[str] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", _names(self.axes))


@partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=[])
@dataclass(frozen=True)
class Batch:
    """Marks a result of a step as per-example: it is put together on dimension 0, and unwrapped."""

    value: Any


def _names(axes: str | Sequence[str] | None) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def rank_axes(x: Any) -> tuple[str, ...] | None:
    """The axes of a Ranked node, a Shard, or a ranked nnx.Variable; None for anything else."""
    if isinstance(x, Ranked | Shard):
        return _names(x.axes)
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(x, nnx.Variable):
        return x.get_metadata().get(AXES)
    return None


def differs(node: Any) -> bool:
    """Whether each rank has a value of its own of a node: where such a tree is cut, as is_leaf."""
    return rank_axes(node) is not None


def ranked(
    value: Any, plan: Plan, axes: str | Sequence[str] | None = None, *, of: Any = None
) -> Any:
    """Gives every rank its own copy of a value, over the plan's axes or some of them.

    A pytree comes back as a ``Ranked`` node. An nnx module is changed in place: its variables of
    the type ``of``, as in ``collc.ranked(model, plan, of=nnx.BatchStat)``, get the leading
    dimensions. Raises MeshError for unknown axes, StepError where ``of`` selects nothing, DataError
    for what is no array.
    """
    check_plan(plan, "collc.ranked")
    chosen = plan.axes if axes is None else _names(axes)
    for axis in chosen:
        if axis not in plan.axes:
            raise MeshError(f"the plan has no axis {axis!r}. {nearest(axis, plan.axes)}")
    chosen = tuple(a for a in plan.axes if a in chosen)
    sizes = [dict(plan.sizes)[a] for a in chosen]

    def spread(x: Any) -> jax.Array:
        try:
            x = jnp.asarray(x)
        except (TypeError, ValueError) as e:
            raise DataError(
                f"collc.ranked takes arrays, but there is a {type(x).__name__}: {e}"
            ) from None
        wide = jnp.broadcast_to(x, (*sizes, *x.shape))
        if isinstance(plan.mesh, jax.sharding.Mesh) and not isinstance(wide, Tracer):
            return jax.device_put(wide, NamedSharding(plan.mesh, PartitionSpec(*chosen)))
        return wide

    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(value, nnx.Pytree):
        if of is not None:
            raise StepError("ranked(of=...) selects variables of an nnx module; this is none.")
        if any(map(differs, jax.tree.leaves(value, is_leaf=differs))):
            raise StepError(
                "ranked: the value is ranked already, or in shards (collc.Shard), of which each rank "
                "has its own. Call it once, on whole values."
            )
        return Ranked(jax.tree.map(spread, value), chosen)
    if not isinstance(of, type):
        raise StepError(
            "ranked(module, plan) needs of=, the type of the variables, as nnx.BatchStat"
        )
    found = [v for _, v in nnx.iter_graph(value) if isinstance(v, of)]
    if not found:
        raise StepError(f"the module has no variable of type {of.__name__}")
    if any(rank_axes(variable) for variable in found):
        raise StepError(
            f"ranked: variables of type {of.__name__} are ranked already. Call it once."
        )
    for variable in found:
        variable.set_value(spread(variable.get_value()))
        variable.set_metadata(AXES, chosen)
    return value


def rank_key(key: jax.Array) -> jax.Array:
    """A copy of a random key with the rank folded in, so that every rank draws its own numbers.

    The key itself stays replicated: keep that one in the state. Runs inside a decorated step.
    """
    plan = context.current()
    if plan is None:
        raise StepError("rank_key folds in the rank, so it runs inside a decorated step only.")
    assert isinstance(plan, Plan)
    return jax.random.fold_in(key, rank_in(plan.axes, dict(plan.sizes)))
