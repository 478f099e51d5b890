"""Flax NNX modules among a step's arguments, as pytrees of arrays.

Traced naively, what a step does to a module is silently lost: so modules are split before tracing,
merged inside, and brought up to date after. nnx is only looked at where it has been imported.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

from collc.errors import StepError
from collc.lowering.shards import is_shard
from collc.training import separable
from collc.training.kinds import Ranked, differs, rank_axes


def is_module(x: Any) -> bool:
    """Whether x is an nnx module, optimizer or metric: an object that a step changes in place."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Pytree) and not isinstance(x, nnx.State)


def is_variable(x: Any) -> bool:
    """Whether x is a variable of nnx: an array with metadata, of which a module has many."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Variable)


class Modules:
    """The nnx modules of a step's arguments, by the name of the argument."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.objects: dict[str, Any] = {}
        for name, value in arguments.items():
            if is_module(value):
                self.objects[name] = value
            elif any(map(is_module, jax.tree.leaves(value, is_leaf=is_module))):
                raise StepError(
                    f"argument {name!r} holds an nnx module inside a pytree. Pass the module as an "
                    "argument of its own, so that the step can change it."
                )
        self.graph: Any = None
        self.state: Any = None
        self._changed: Any = None  # the traced modules, where more than their state is new
        self._optimizers: list[tuple[Any, Any]] = []  # the merged ones, with their own tx
        if self.objects:
            from flax import nnx

            _refuse_attributes(self.objects)
            self.graph, self.state = nnx.split(self.objects)

    def leaves(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """For each leaf of ``state``: its path as a user writes it, the type of its variable, and the
        axes of a ranked variable, or of the Shard or Ranked node in it, () for any other.

        Raises StepError for a Ranked node that does not name its axes.
        """
        if not self.objects:
            return
        from flax import nnx

        found = jax.tree_util.tree_flatten_with_path(self.state, is_leaf=is_variable)[0]
        for path, x in found:
            variable = type(x).__name__ if is_variable(x) else ""
            variable = f"nnx.{variable}" if hasattr(nnx, variable) else variable
            for node in jax.tree.leaves(x, is_leaf=differs):
                axes = rank_axes(node)
                if axes == ():
                    raise StepError(
                        f"{dotted(path)} holds a collc.Ranked without axes. In a module's variable it "
                        'names them, as collc.ranked does: collc.Ranked(x, ("gpu",)).'
                    )
                for _ in jax.tree.leaves(node):
                    yield dotted(path), variable, axes or ()

    def merge(self, state: Any) -> dict[str, Any]:
        """The modules over other arrays, in the structure of ``state``."""
        if not self.objects:
            return {}
        from flax import nnx

        merged = nnx.merge(self.graph, state)
        found = [x for _, x in nnx.iter_graph(merged) if isinstance(x, nnx.Optimizer)]
        self._optimizers = [(x, x.tx) for x in found if not isinstance(x.tx.update, PartsUpdate)]
        for optimizer, tx in self._optimizers:
            optimizer.tx = optax.GradientTransformationExtraArgs(tx.init, PartsUpdate(tx))
        return merged

    def after(self, merged: dict[str, Any]) -> Any:
        """The state of merged modules once the step has run, in the structure of ``state``."""
        if not self.objects:
            return self.state
        from flax import nnx

        for optimizer, tx in self._optimizers:
            optimizer.tx = tx
        _refuse_attributes(merged)
        graph, state = nnx.split(merged)
        if jax.tree.structure(state) != jax.tree.structure(self.state):
            before, now = (dict(nnx.to_flat_state(s)) for s in (self.state, state))
            for path in sorted(before.keys() & now.keys(), key=str):
                _refuse_other(".".join(map(str, path)), before[path], now[path])
            changed = [".".join(map(str, p)) for p in sorted(before.keys() ^ now.keys(), key=str)]
            raise StepError(
                "the step adds or removes variables of a module"
                + (f": {', '.join(changed)}. " if changed else ". ")
                + "Its structure has to stay; create variables before the step."
            )
        self._changed = merged if graph != self.graph else None
        return state

    def update(self, state: Any) -> None:
        """Brings the caller's modules up to date."""
        if self.objects:
            from flax import nnx

            nnx.update(self.objects, state)
            if self._changed is not None:
                _copy_settings(self._changed, self.objects)


def dotted(path: tuple[Any, ...]) -> str:
    """The path of a module's variable, as ``model.blocks[0].kernel``."""
    keys = [getattr(k, "key", getattr(k, "name", getattr(k, "idx", k))) for k in path]
    parts = [f".{k}" if isinstance(k, str) and k.isidentifier() else f"[{k!r}]" for k in keys]
    return "".join(parts).removeprefix(".")


def _copy_settings(source: Any, target: Any) -> None:
    """What a step set besides variables, such as ``deterministic`` by ``model.train()``."""
    from flax import nnx

    known = {path: x for path, x in nnx.iter_graph(target) if is_module(x)}
    for path, new in nnx.iter_graph(source):
        old = known.get(path)
        if old is None or type(old) is not type(new):
            continue
        for name, value in vars(new).items():
            if name.startswith("_pytree__") or vars(old).get(name) is value:
                continue
            if not any(map(_is_data, jax.tree.leaves(value, is_leaf=_is_data))):
                setattr(old, name, value)


def _is_data(x: Any) -> bool:
    from flax import nnx

    return is_module(x) or isinstance(x, nnx.Variable | jax.Array | np.ndarray)


# ---- variables that hold parts ---------------------------------------------------------------------


@dataclass(frozen=True)
class PartsUpdate:
    """The update of an nnx.Optimizer in a step. Of Shard and Ranked nodes it is what a server's is:
    the parts alone have to be enough for it, and padding stays zero. Of arrays it is ``tx``'s own.

    Raises StepError for a ``tx`` that looks beyond a part.
    """

    tx: Any

    def __call__(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        if not _parts((updates, state, params)):
            return self.tx.update(updates, state, params, **extra)
        from flax import nnx

        inner = optax.with_extra_args_support(self.tx)
        tx = optax.GradientTransformationExtraArgs(inner.init, partial(inner.update, **extra))
        _refuse_unlike(updates, params)
        if _parts(state) != _parts(jax.eval_shape(partial(separable.init, tx), params)):
            raise StepError(
                "optimizer.update: the optimizer was made of other parameters than the module now has, "
                "of which some are in parts (collc.Shard, collc.Ranked). Make it, "
                "nnx.Optimizer(model, ...), once they are in the module."
            )
        new, after = separable.update(tx, updates, state, params)
        # In variables of their own, for nnx.state takes apart what is in none.
        held = jax.tree.map(
            lambda x: nnx.Variable(x) if _is_part(x) else x, after, is_leaf=_is_part
        )
        return new, held


def _refuse_unlike(grads: Any, params: Any) -> None:
    if jax.tree.structure(grads) != jax.tree.structure(params):
        raise StepError(
            "optimizer.update: the gradients do not lie as the parameters, of which some are in parts "
            f"(collc.Shard, collc.Ranked): {jax.tree.structure(grads)} for "
            f"{jax.tree.structure(params)}. Differentiate what collc.all_gather takes, or reduce by "
            "collc.strategies(...).reduce(grads)."
        )


def _is_part(x: Any) -> bool:
    return is_shard(x) or isinstance(x, Ranked)


def _parts(tree: Any) -> int:
    """How many of a tree's leaves are in parts."""
    return sum(map(_is_part, jax.tree.leaves(tree, is_leaf=_is_part)))


def _refuse_attributes(objects: Any) -> None:
    """Refuses nodes that nnx takes apart, as how their arrays lie would be lost."""
    from flax import nnx

    for path, x in nnx.iter_graph(objects):
        if _is_part(x):
            raise StepError(
                f"{dotted(path)} is a collc.{type(x).__name__} that is an attribute. Put it in a "
                "variable, nnx.Variable(...), or pass it as an argument of its own."
            )


def _refuse_other(path: str, before: Any, now: Any) -> None:
    """Refuses a variable that holds another kind of value than before the step."""
    old, new = (x.get_value() if hasattr(x, "get_value") else x for x in (before, now))
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise StepError(
            f"{path} held {_described(old)} before the step, but {_described(new)} after it. What a "
            "variable holds has to stay: gather shards into a copy of the module, and update the "
            "module by shards."
        )


def _described(x: Any) -> str:
    if is_shard(x):
        return f"a collc.Shard of {list(x.shape)}"
    if isinstance(x, Ranked):
        return f"a collc.Ranked over {' and '.join(x.axes) or 'all axes'}"
    return "an array" if isinstance(x, jax.Array) else f"a {type(x).__name__}"
