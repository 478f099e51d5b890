"""``collc.sync``: gradients are reduced where the backward makes them, layer by layer."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from collc.errors import DataError, StepError
from collc.lowering import sync as lowering
from collc.lowering.use import no_shards
from collc.training.modules import is_module, is_variable

On = Any  # None, an axis name, a tuple of them, a schedule or its text, or a plan


def sync(
    params: Any,
    plan: On = None,
    *,
    add: Any = None,
    accumulate: Any = None,
    wire: Any = None,
    specs: Any = None,
) -> Any:
    """The parameters of a layer, unchanged; their gradients come back as means over the ranks.

    All of ``params`` are reduced at once, as ``collc.pmean`` would, as soon as the backward has their
    cotangents and while it goes on to the layer before; inside ``scan`` and ``jax.checkpoint``,
    ``nnx.scan`` and ``nnx.remat`` too. Call it once on what a layer uses, and use only what it
    returns. ``collc.pmean`` of all gradients then reduces the others alone.

    ``params`` is any pytree, of which leaves that are neither floating-point nor complex pass
    through; or an nnx module, of which a copy with these ``nnx.Param`` comes back that shares all
    other variables. ``plan``, ``accumulate``, ``wire``, ``specs``: as for ``collc.pmean``.

    ``add``: what is added to the cotangents before they are reduced, such as the gradients of earlier
    micro-batches, a pytree like params (of a module, like ``nnx.state(module, nnx.Param)``). A leaf on
    which the loss does not depend has no cotangent to add to. ``collc.value_and_grad`` adds by
    itself: of its micro-batches only the last one reduces.

    Raises PlanError, MeshError, ScheduleError as ``collc.pmean`` does, DataError for leaves that are
    no arrays and for ``add`` unlike params, StepError for modules that are no pytrees.
    """
    opened = jax.tree.map(lambda x: _state(x) if is_module(x) else x, params, is_leaf=is_module)
    leaves, tree = jax.tree.flatten(no_shards("sync", opened))
    each_spec = _like("specs", specs, tree, lambda s: s is None or isinstance(s, PartitionSpec))
    sums = _like("add", add, tree)
    values = {i: v for i, leaf in enumerate(leaves) if (v := _number(leaf)) is not None}
    if not values:
        return params
    if sums is not None and lowering.is_waiting():
        raise StepError(
            "collc.sync(add=...) inside collc.value_and_grad(microbatches=...), which keeps the sums "
            "itself. Drop add=, or write the loop by hand with jax.value_and_grad."
        )
    done = lowering.synced(
        list(values.values()),
        plan,
        add=None if sums is None else [_sum(v, sums[i]) for i, v in values.items()],
        accumulate=accumulate,
        wire=wire,
        specs=None if each_spec is None else [each_spec[i] for i in values],
    )
    for i, y in zip(values, done, strict=True):
        leaves[i] = y
    out = jax.tree.unflatten(tree, leaves)
    return jax.tree.map(
        lambda x, new: _copy(x, new) if is_module(x) else new, params, out, is_leaf=is_module
    )


def _number(leaf: Any) -> jax.Array | None:
    """The leaf as an array, None where it has no gradient."""
    try:
        value = jnp.asarray(leaf)
    except (TypeError, ValueError):
        raise DataError(f"collc.sync: {leaf!r} is no array, nor a number") from None
    return value if jnp.issubdtype(value.dtype, jnp.inexact) else None


def _like(name: str, given: Any, tree: Any, is_leaf: Any = None) -> list[Any] | None:
    """The leaves of an option that is a pytree like params."""
    if given is None:
        return None
    leaves, found = jax.tree.flatten(given, is_leaf=is_leaf)
    if found != tree:
        raise DataError(
            f"collc.sync: {name}= has to be a pytree like params, {tree}, but it is {found}."
        )
    return leaves


def _sum(value: jax.Array, add: Any) -> jax.Array:
    added = _number(add)
    if added is None or added.shape != value.shape:
        raise DataError(
            f"collc.sync: add= has {jnp.result_type(add)}{list(jnp.shape(add))} for a leaf "
            f"{value.dtype}{list(value.shape)}. It needs the same shape, in floating point."
        )
    return added


# ---- nnx modules ----------------------------------------------------------------------------------


def _state(module: Any) -> Any:
    from flax import nnx

    return nnx.state(module, nnx.Param)


def _copy(module: Any, params: Any) -> Any:
    """The module with other parameters. All other variables are the same objects, for a copy's
    changes to batch statistics would be lost.
    """
    from flax import nnx

    values = dict(nnx.to_flat_state(params))
    found = {id(v): (v, path) for path, v in nnx.iter_graph(module) if is_variable(v)}
    new = {
        key: v.replace(values[path].get_value())
        for key, (v, path) in found.items()
        if path in values
    }
    leaves, tree = jax.tree.flatten(module, is_leaf=is_variable)
    if len(new) != len(values) or not new.keys() <= {id(x) for x in leaves}:
        raise StepError(
            f"collc.sync: {type(module).__name__} is no pytree, so it cannot be copied. Give it "
            "nnx.state(module, nnx.Param), and the result to nnx.update."
        )
    return jax.tree.unflatten(tree, [new.get(id(x), x) for x in leaves])
