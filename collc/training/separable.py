"""An optimizer on the shards of parameters: element by element, it may run there.

The optimizer's update is traced with shards, and what becomes of them is followed: see
``separable_flow``. What looks further than one element, such as a norm, is refused with its line.
It is traced with whole parameters too, and has to do the same to them: see ``separable_alike``.
"""

import re
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from collc.errors import CollcError, StepError
from collc.lowering.shards import Shard, is_shard, part, unpadded
from collc.training.check.values import Where, opened
from collc.training.kinds import differs
from collc.training.norms import own_axes
from collc.training.paths import named_leaves
from collc.training.separable_alike import check_alike, refuse_paths
from collc.training.separable_flow import PARTIAL, SHARD, WHOLE, Follow, Value, uniform
from collc.training.separable_refusals import refuse, remedy

# As Python says it, and as optax does.
_MISSING = re.compile(
    r"missing \d+ required (?:keyword-only|positional) arguments?: (.+)|(\w+) must be provided"
)


def init(tx: Any, params: Any) -> Any:
    """An optimizer's state for parameters of which some are shards, with zeros in all padding.

    Inside a step, with the rank's own ``Shard`` nodes. Raises StepError for an optimizer that does not
    keep one number for each element of a shard, or not what it keeps for whole parameters.
    """
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    closed, shapes = traced = _jaxpr(tx.init, (params,))
    kept = [path for path, _ in named_leaves(shapes)]
    for node, path in zip(_nodes(shapes), kept, strict=True):
        _value(node, sizes, path)
    if _has_shards(params):
        check_alike(tx.init, (params,), traced, [f"what it keeps at {path}" for path in kept])
    state = jax.tree.unflatten(
        jax.tree.structure(shapes), jaxpr_as_fun(closed)(*jax.tree.leaves(params))
    )
    return _unpadded(state, sizes)


def update(tx: Any, updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """The optimizer's update, if it does to shards what it does to whole parameters.

    Inside a step, as ``init``. Padding stays zero. What communicates itself over the shards' axes, as
    ``collc.clip_by_global_norm`` does, is accepted. Raises StepError, with the transformation and its
    line.
    """
    args = updates, state, params
    closed, shapes = traced = _jaxpr(tx.update, args)
    _check_update(args, traced)
    if _has_shards(args):
        names = [f"the update of {path}" for path, _ in named_leaves(shapes[0])]
        names += [f"what it keeps at {path}" for path, _ in named_leaves(shapes[1])]
        check_alike(tx.update, args, traced, names)
    done = jaxpr_as_fun(closed)(*jax.tree.leaves(args))
    new, after = jax.tree.unflatten(jax.tree.structure(shapes), done)
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    return _unpadded(new, sizes), _unpadded(after, sizes)


def _jaxpr(function: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """The jaxpr of an optimizer's function, and the shapes of its results."""
    try:
        return jax.make_jaxpr(function, return_shape=True)(*args)
    except CollcError:
        raise
    except Exception as error:
        if missing := _MISSING.search(str(error)):
            raise StepError(
                f"the optimizer's update needs {missing[1] or missing[2]}, which is not given: "
                "state.push has gradients alone. Take an optimizer that needs no more; "
                "nnx.Optimizer.update takes such arguments by name."
            ) from error
        refuse_paths(function, args, error)
        raise


def _has_shards(tree: Any) -> bool:
    return any(map(is_shard, jax.tree.leaves(tree, is_leaf=is_shard)))


def _check_update(args: tuple[Any, Any, Any], traced: tuple[Any, Any]) -> None:
    """Raises StepError for an update, as traced, that looks beyond a shard."""
    (updates, state, _), (closed, shapes) = args, traced
    for given, returned in zip((updates, state), shapes, strict=True):
        if jax.tree.structure(given) != jax.tree.structure(returned):
            raise StepError(
                "the optimizer returns another tree than it was given, so where shards lie is lost: "
                f"{jax.tree.structure(returned)} for {jax.tree.structure(given)}. {remedy()}"
            )
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    outs = Follow(sizes).run(closed, [_value(x, sizes) for x in _nodes(args)], None)
    for node, value, out in zip(_nodes(shapes), outs, opened(closed).outvars, strict=True):
        eqn = next((e for e in opened(closed).eqns if any(v is out for v in e.outvars)), None)
        where = Where(eqn, None) if eqn else None
        if value.kind == PARTIAL:
            refuse(value.since, value.parts)
        if value.kind == SHARD and not is_shard(node):
            refuse(where, value.parts, "a result that is no shard, computed")
        if value.kind == WHOLE and is_shard(node):
            found = "values for each place that are computed elsewhere"
            refuse(where, node.parts(sizes), found)


def _unpadded(tree: Any, sizes: dict[str, int]) -> Any:
    def clean(x: Any) -> Any:
        kept = is_shard(x) and jax.tree.leaves(x)  # what is masked keeps nothing
        return unpadded(x, sizes) if kept else x

    return jax.tree.map(clean, tree, is_leaf=is_shard)


def _nodes(tree: Any) -> list[Any]:
    """For each leaf its Shard or Ranked node, or itself."""
    found = jax.tree.leaves(tree, is_leaf=differs)
    return [node for node in found for _ in jax.tree.leaves(node)]


def _value(x: Any, sizes: dict[str, int], at: str = "") -> Value:
    """What is known of a node's leaf. Raises StepError for a shard that holds no part."""
    axes = own_axes(x)
    if axes is None:
        return uniform(x)
    if not isinstance(x, Shard):
        return Value(WHOLE, frozenset(axes))
    parts = x.parts(sizes)
    own = (part(x.shape, parts), *(1,) * (len(x.shape) - 1))
    shape = getattr(x.value, "shape", None)
    if shape is None or tuple(shape[-len(own) :]) != own:
        found = f"a value of shape {list(shape)}" if shape is not None else "several values"
        raise StepError(
            f"the optimizer keeps {found}{f' at {at}' if at else ''} for a parameter {list(x.shape)} "
            f"that is cut in {parts} shards of {list(own)}. It has to keep one number for each "
            f"element, which factored moments, and norms or flags by layer, are not. {remedy(at)}"
        )
    return Value(SHARD, frozenset(x.axes), parts)
