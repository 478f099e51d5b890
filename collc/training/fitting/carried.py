"""The state that a loop carries: a pytree that steps return, or nnx modules that they change."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from collc.errors import StepError
from collc.planning.plan import Plan
from collc.training.checkpoints.portable import NUMBERS
from collc.training.kinds import rank_axes
from collc.training.modules import is_module

SKIPPED = "skipped"  # the name of a counter of skipped steps, wherever it is in a state


class Carried:
    """A state and how a step takes it: ``step(state, batch) -> (state, metrics)``; or, of a module
    or a tuple of them, ``step(*modules, batch) -> metrics``, which changes them in place.

    Leaves that are not on all devices of the plan are copied there, replicated, so that the second
    step finds the state where the first one did.
    """

    def __init__(self, state: Any, plan: Plan | None) -> None:
        self._single = is_module(state)
        parts: Any = (state,) if self._single else state
        self.in_place = isinstance(parts, tuple) and len(parts) > 0 and all(map(is_module, parts))
        if not self.in_place and any(map(is_module, jax.tree.leaves(state, is_leaf=is_module))):
            raise StepError(
                "the state holds an nnx module inside a pytree. Give the modules as a tuple of their "
                "own, (model, optimizer): the step then takes and changes them."
            )
        self._state: Any = parts if self.in_place else state
        self.load(_placed(self.arrays(), plan))
        # Where they are is looked up once: a step keeps the tree.
        leaves = jax.tree.leaves_with_path(self.arrays())
        self._counters = [k for k, (path, x) in enumerate(leaves) if _counts(path, x)]

    @property
    def state(self) -> Any:
        """As the user gave it."""
        return self._state[0] if self._single else self._state

    def arrays(self) -> Any:
        """All that a step changes, as a pytree of arrays."""
        if not self.in_place:
            return self._state
        from flax import nnx

        return nnx.state(self._state)

    def load(self, arrays: Any) -> None:
        """Put what ``arrays`` returned back, or the like of it."""
        if not self.in_place:
            self._state = arrays
            return
        from flax import nnx

        nnx.update(self._state, arrays)

    def call(self, step: Callable[..., Any], batch: Any) -> dict[str, Any]:
        """Run a step; returns its metrics, not waited for. Raises StepError for other results."""
        if self.in_place:
            return named(step(*self._state, batch), "step")
        result = step(self._state, batch)
        if not isinstance(result, tuple) or len(result) != 2:
            raise StepError(
                f"step returned {type(result).__name__}, but (state, metrics) is needed; metrics is "
                "the loss, or a dict of scalars."
            )
        self._state, metrics = result
        return named(metrics, "step")

    def evaluate(self, function: Callable[..., Any]) -> dict[str, float]:
        """The scalars that a function of the state returns."""
        found = function(*self._state) if self.in_place else function(self._state)
        return {name: float(x) for name, x in named(found, "evaluate").items()}

    def skipped(self) -> Any:
        """A copy of the counter of skipped steps, the largest if there are several; or None."""
        if not self._counters:
            return None
        leaves = jax.tree.leaves(self.arrays())
        found = [jnp.max(leaves[k]) for k in self._counters]
        return found[0] if len(found) == 1 else jnp.max(jnp.stack(found))

    def devices(self) -> list[Any]:
        """Those that the state lies on."""
        found: set[Any] = set()
        for x in jax.tree.leaves(self.arrays()):
            if isinstance(x, jax.Array):
                found |= x.sharding.device_set
        return sorted(found, key=lambda device: device.id)


def _counts(path: tuple[Any, ...], x: Any) -> bool:
    """Whether a leaf is a counter of skipped steps. Of an nnx variable, ``value`` is the last key."""
    words = [getattr(key, "key", getattr(key, "name", None)) for key in path]
    return SKIPPED in words[-2:] and jnp.issubdtype(x.dtype, jnp.integer)


def _placed(tree: Any, plan: Plan | None) -> Any:
    mesh = plan.mesh if plan is not None else None
    everywhere = NamedSharding(mesh, PartitionSpec()) if isinstance(mesh, Mesh) else None

    def put(x: Any) -> Any:
        x = jnp.asarray(x) if isinstance(x, (*NUMBERS, np.ndarray, np.generic)) else x
        if everywhere is None or not isinstance(x, jax.Array):
            return x
        there = x.sharding.device_set == everywhere.device_set
        return x if there else jax.device_put(x, everywhere)

    def node(x: Any) -> Any:
        return x if rank_axes(x) is not None else jax.tree.map(put, x)

    return jax.tree.map(node, tree, is_leaf=lambda x: rank_axes(x) is not None)


def named(found: Any, of: str) -> dict[str, Any]:
    """Metrics by name: a scalar is the loss. StepError for what is no scalar."""
    metrics = found if isinstance(found, Mapping) else {"loss": found}
    for name, x in metrics.items():
        scalar = isinstance(x, int | float) or getattr(x, "shape", None) == ()
        if not isinstance(name, str) or not scalar:
            shape = getattr(x, "shape", None)
            what = type(x).__name__ if shape is None else f"shape {list(shape)}"
            raise StepError(
                f"{of} returned {name!r} of {what} among its metrics. Return a scalar loss, or a dict "
                'of scalars by name with the loss as "loss".'
            )
    return dict(metrics)
