"""What a server can be made of: plans, patterns of stacked parameters, and parameters."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from collc.errors import DataError, MeshError, StepError
from collc.lowering.shards import is_shard
from collc.training.modules import is_module
from collc.training.paths import matches, named_leaves
from collc.training.strategies import Strategies


def check_axes(by: Strategies) -> None:
    """Raises MeshError where servers cut leaves, but axes of the mesh stay with XLA."""
    plan = by.plan
    left = [a for a, n in plan.mesh.shape.items() if n > 1 and a not in plan.axes]
    if left and any(chosen.kind == "server" for _, chosen in by.patterns):
        raise MeshError(
            f"collc.server: the plan has {' and '.join(plan.axes)}, but {' and '.join(left)} of its "
            "mesh stays with XLA, which cannot shard flat parts. Let the plan take all axes, or reduce "
            "by strategy.all_reduce."
        )


def patterns_of(stacked: str | Sequence[str]) -> tuple[str, ...]:
    """The patterns of ``stacked=``. Raises StepError for what is none."""
    names = (stacked,) if isinstance(stacked, str) else stacked
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise StepError(
            f'collc.server: stacked= is a pattern of paths, as "layers/*", or several, not {stacked!r}.'
        )
    return tuple(names)


def check_stacked(params: Any, by: Strategies) -> None:
    """Raises StepError for a pattern of ``stacked=`` that names no server's parameter, DataError for a
    parameter without layers.
    """
    declared = by.declared(params)
    served = [leaf.path for leaf in declared if leaf.strategy.kind == "server"]
    for pattern in by.stacked:
        if not any(matches(pattern, path) for path in served):
            raise StepError(
                f"collc.server: stacked={pattern!r} has no effect: none of its parameters has a "
                "server, and others are not cut. Drop it."
            )
    for leaf, x in zip(declared, jax.tree.leaves(params), strict=True):
        if leaf.path in served and by.layers(leaf.path) and not (jnp.ndim(x) and jnp.shape(x)[0]):
            raise DataError(
                f"collc.server: stacked= names {leaf.path}, which is {list(jnp.shape(x))} and has no "
                "layers. Dimension 0 is theirs; narrow the pattern."
            )


def check_params(params: Any) -> None:
    """Raises DataError for what a server cannot hold."""
    for x in jax.tree.leaves(params, is_leaf=lambda x: is_shard(x) or is_module(x)):
        if is_shard(x):
            raise DataError("collc.server: a parameter is a collc.Shard already. Give it whole.")
        if is_module(x):
            raise DataError(
                f"collc.server: {type(x).__name__} is an nnx module. Give its parameters, as in "
                "graph, params, rest = nnx.split(model, nnx.Param, ...); a step merges them again, "
                "nnx.merge(graph, state.pull(), rest)."
            )
    for (path, _), x in zip(named_leaves(params), jax.tree.leaves(params), strict=True):
        dtype = getattr(x, "dtype", None)
        if dtype is None and isinstance(x, bool | int | float | complex):
            dtype = jnp.result_type(x)
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            raise DataError(
                f"collc.server: {path} is {dtype or type(x).__name__}, which has no gradient. Give "
                "parameters alone, of an nnx model nnx.split(model, nnx.Param, ...)[1], and pass the "
                "rest to the step."
            )
