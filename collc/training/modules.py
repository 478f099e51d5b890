"""Flax NNX modules among a step's arguments, as pytrees of arrays.

Traced naively, what a step does to a module is silently lost: so modules are split before tracing,
merged inside, and brought up to date after. nnx is only looked at where it has been imported.
"""

import sys
from collections.abc import Mapping
from typing import Any

import jax

from collc.errors import StepError
from collc.training.kinds import AXES


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
        if self.objects:
            from flax import nnx

            self.graph, self.state = nnx.split(self.objects)

    def axes(self) -> list[tuple[str, ...] | None]:
        """For each leaf of ``state``: the axes of a ranked variable, None for any other."""
        if not self.objects:
            return []
        return _axes(self.state)

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

        state = nnx.split(merged)[1]
        if jax.tree.structure(state) != jax.tree.structure(self.state):
            before = {path for path, _ in nnx.to_flat_state(self.state)}
            now = {path for path, _ in nnx.to_flat_state(state)}
            changed = [".".join(map(str, p)) for p in sorted(before ^ now, key=str)]
            raise StepError(
                "the step adds or removes variables of a module"
                + (f": {', '.join(changed)}. " if changed else ". ")
                + "Its structure has to stay; create variables before the step."
            )
        return state

    def update(self, state: Any) -> None:
        """Brings the caller's modules up to date."""
        if self.objects:
            from flax import nnx

            nnx.update(self.objects, state)


def _axes(state: Any) -> list[tuple[str, ...] | None]:
    from flax import nnx

    found: list[tuple[str, ...] | None] = []

    def visit(x: Any) -> None:
        axes = x.get_metadata().get(AXES) if isinstance(x, nnx.Variable) else None
        found.extend([axes] * len(jax.tree.leaves(x)))

    for leaf in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        visit(leaf)
    return found
