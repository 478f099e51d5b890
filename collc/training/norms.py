"""Norms and finiteness of trees whose leaves lie in different ways, each counted once.

The nodes of a tree say how its leaves lie: a ``Shard`` and a ``Ranked`` differ over their axes, all
other leaves are the same on all ranks. Leaves of the same axes are summed up first, so that one
scalar travels for each such group, and none for what is replicated.

    {w: [..], e: Ranked(.., gpu), s: Shard(.., host gpu)}
        -->  sqrt(|w|² + psum[gpu] |e|² + psum[host gpu] |s|²)

A scalar has nothing to schedule, so it takes XLA's own collective.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from collc.errors import DataError, StepError
from collc.lowering import context
from collc.lowering.collectives import pmax, psum
from collc.lowering.shards import is_shard, unpadded
from collc.planning.compose import native
from collc.planning.plan import Plan
from collc.training.kinds import rank_axes

Axes = tuple[str, ...]


def global_norm(tree: Any) -> jax.Array:
    """The Euclidean norm of all leaves together, as ``optax.global_norm``; float32 at least, [].

    Inside a decorated step it is the same on all ranks, and no leaf is counted twice; padding, and
    ranks without a part, do not count. Outside, and on one device, nothing travels. Integers and
    random keys have no gradient and are left out. Raises StepError for nodes over axes that the
    mesh here does not have.
    """
    groups: dict[Axes, list[jax.Array]] = {}
    for axes, x in _leaves(tree):
        groups.setdefault(axes, []).append(_square(x))
    total = jnp.float32(0)
    for axes, squares in groups.items():
        own = sum(squares[1:], start=squares[0])
        total += psum(own, native("all_reduce") @ axes) if axes else own
    return jnp.sqrt(total)


def all_finite(tree: Any) -> jax.Array:
    """Whether no leaf has an infinity or a NaN on any rank: bool, [], the same on all ranks.

    One scalar travels, none where all leaves are replicated. Raises as ``global_norm``.
    """
    bad, over = jnp.bool_(False), set[str]()
    for axes, x in _leaves(tree):
        bad |= jnp.any(~jnp.isfinite(x))
        over.update(axes)
    if over:  # what is the same on some of the axes is so too in the largest
        axes = _ordered(over)
        bad = pmax(bad.astype(jnp.int32), native("all_reduce") @ axes) > 0
    return ~bad


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """As ``optax.clip_by_global_norm``, by ``collc.global_norm``.

    Updates of a smaller norm pass bit for bit. A norm that is NaN makes all updates NaN, for
    ``collc.skip_nonfinite`` to see. Raises DataError for a ``max_norm`` that is no positive number.
    """
    _check_norm(max_norm)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        norm = global_norm(updates)
        small = norm < max_norm
        divisor = jnp.where(small, 1, norm)

        def clip(x: Any) -> Any:
            if not _counts(x):
                return x
            wide = jnp.promote_types(jnp.result_type(x), norm.dtype)
            clipped = jnp.asarray(x, wide) / divisor * max_norm
            return jnp.where(small, x, clipped.astype(jnp.result_type(x)))

        return jax.tree.map(clip, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


class SkipState(NamedTuple):
    """The state of ``skip_nonfinite``.

    inner: that of the transformation within. skipped: how many updates were left out so far, int32
    []. finite: whether the last one was not, bool [].
    """

    inner: Any
    skipped: jax.Array
    finite: jax.Array


def skip_nonfinite(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The same transformation, but for updates that are not finite: these change nothing.

    All ranks skip if a leaf has an infinity or a NaN on any of them. Then the state within stays as
    it was, bit for bit; all updates are -0.0, which leaves every parameter as it is (+0.0 would turn
    -0.0 into +0.0); and ``skipped`` grows by one. Raises StepError for what is no transformation.
    """
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise StepError(f"skip_nonfinite takes an optax transformation, not {tx!r}.")
    inner = optax.with_extra_args_support(tx)

    def init(params: Any) -> SkipState:
        return SkipState(inner.init(params), jnp.int32(0), jnp.bool_(True))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, SkipState]:
        finite = all_finite(updates)
        new, after = inner.update(updates, state.inner, params, **extra)

        def nothing(x: Any) -> Any:
            return jnp.where(finite, x, -jnp.zeros_like(x)) if _counts(x) else _still(x, finite)

        kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), after, state.inner)
        skipped = state.skipped + (~finite).astype(jnp.int32)
        return jax.tree.map(nothing, new), SkipState(kept, skipped, finite)

    return optax.GradientTransformationExtraArgs(init, update)


# ---- how leaves lie -------------------------------------------------------------------------------


def _leaves(tree: Any) -> Iterator[tuple[Axes, Any]]:
    """The leaves that have a gradient, with the axes over which each differs, in the mesh's order.

    Outside a step a leaf is one global array with the parts of all ranks in it: it differs nowhere.
    """
    inside = bool(jax.sharding.get_abstract_mesh().manual_axes)
    for axes, x in _lying((tree,), frozenset()):
        if _counts(x):
            yield _ordered(axes) if inside else (), x


def _lying(node: Any, over: frozenset[str]) -> Iterator[tuple[frozenset[str], Any]]:
    def lies(x: Any) -> bool:
        return x is not node and rank_axes(x) is not None

    for child in jax.tree.leaves(node, is_leaf=lies):
        own = own_axes(child)
        if own is None:
            yield over, child
        else:
            yield from _lying(_without_padding(child), over.union(own))


def _without_padding(node: Any) -> Any:
    """A shard of a step whose padding does not count: within an optimizer it may hold anything."""
    mesh = jax.sharding.get_abstract_mesh()
    inside = is_shard(node) and set(node.axes) <= set(mesh.manual_axes)
    return unpadded(node, dict(mesh.shape)) if inside and jax.tree.leaves(node) else node


def own_axes(node: Any) -> Sequence[str] | None:
    """As ``rank_axes``, where no axes stand for all of the plan's. Raises StepError without a plan."""
    axes, plan = rank_axes(node), context.current()
    if axes is None or axes:
        return axes
    if isinstance(plan, Plan):
        return plan.axes
    if jax.sharding.get_abstract_mesh().manual_axes:
        raise StepError(
            f"a {type(node).__name__} without axes is over all of a plan's, but no plan is here. "
            "Name its axes, or decorate the step with @collc.schedule(plan, ...)."
        )
    return ()


def _ordered(axes: frozenset[str] | set[str]) -> Axes:
    manual = jax.sharding.get_abstract_mesh().manual_axes
    missing = sorted(axes - set(manual))
    if missing:
        raise StepError(
            f"a leaf lies over {' and '.join(sorted(axes))}, but {' and '.join(missing)} is no axis "
            f"of the step here, which has {' and '.join(manual)}. Use the plan that it was made with."
        )
    return tuple(a for a in jax.sharding.get_abstract_mesh().axis_names if a in axes)


# ---- numbers --------------------------------------------------------------------------------------


def _counts(x: Any) -> bool:
    return jnp.issubdtype(_dtype(x), jnp.inexact)


def _dtype(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else jnp.result_type(x)


def _square(x: Any) -> jax.Array:
    """The sum of |x|², in float32 at least."""
    wide = jnp.asarray(x, jnp.promote_types(_dtype(x), jnp.float32))
    return jnp.sum(wide.real**2 + wide.imag**2 if jnp.iscomplexobj(wide) else wide**2)


def _still(x: Any, finite: jax.Array) -> Any:
    """Of what has no negative zero: zeros; of the gradient of an integer, itself."""
    if _dtype(x) == jax.dtypes.float0:
        return x
    return jnp.where(finite, x, jnp.zeros_like(x))


def _check_norm(max_norm: Any) -> None:
    """A traced one, as of optax.inject_hyperparams, is not known yet."""
    if isinstance(max_norm, Tracer) and not max_norm.shape and _counts(max_norm):
        return
    try:
        number = None if isinstance(max_norm, bool | str) else float(max_norm)
    except (TypeError, ValueError):
        number = None
    if number is None or math.isnan(number) or number <= 0:
        raise DataError(
            f"clip_by_global_norm: max_norm is a positive number, not {max_norm!r}. To leave the "
            "norm as it is, drop the transformation."
        )
