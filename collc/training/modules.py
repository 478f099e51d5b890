"""Flax NNX modules among a step's arguments, as pytrees of arrays.

Traced naively, what a step does to a module is silently lost: so modules are split before tracing,
merged inside, and brought up to date after. nnx is only looked at where it has been imported.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from collc.errors import StepError
from collc.training.kinds import rank_axes


def is_module(x: Any) -> bool:
    """Whether x is an nnx module, optimizer or metric: an object that a step changes in place."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Pytree) and not isinstance(x, nnx.State)


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
        if self.objects:
            from flax import nnx

            self.graph, self.state = nnx.split(self.objects)

    def leaves(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """For each leaf of ``state``: its path as a user writes it, the type of its variable, and the
        axes of a ranked variable, () for any other.
        """
        if not self.objects:
            return
        from flax import nnx

        is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
        found = jax.tree_util.tree_flatten_with_path(self.state, is_leaf=is_variable)[0]
        for path, x in found:
            variable = type(x).__name__ if is_variable(x) else ""
            variable = f"nnx.{variable}" if hasattr(nnx, variable) else variable
            for _ in jax.tree.leaves(x):
                yield dotted(path), variable, rank_axes(x) or ()

    def merge(self, state: Any) -> dict[str, Any]:
        """The modules over other arrays, in the structure of ``state``."""
        if not self.objects:
            return {}
        from flax import nnx

        return nnx.merge(self.graph, state)

    def after(self, merged: dict[str, Any]) -> Any:
        """The state of merged modules once the step has run, in the structure of ``state``."""
        if not self.objects:
            return self.state
        from flax import nnx

        graph, state = nnx.split(merged)
        if jax.tree.structure(state) != jax.tree.structure(self.state):
            before = {path for path, _ in nnx.to_flat_state(self.state)}
            now = {path for path, _ in nnx.to_flat_state(state)}
            changed = [".".join(map(str, p)) for p in sorted(before ^ now, key=str)]
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
