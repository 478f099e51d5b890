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
from collc.training.fitting.forms import difference, form, is_number, path_of
from collc.training.kinds import differs
from collc.training.modules import is_module
from collc.training.paths import word

SKIPPED = "skipped"  # the name of a counter of skipped steps, wherever it is in a state
VALIDATION = "validation_"  # begins the names of what ``evaluate`` returns, where they are written
COLUMNS = ("step", "seconds", "skipped", "switches", "tokens_per_s")  # that the loop itself writes


class Carried:
    """A state and how a step takes it: ``step(state, batch) -> (state, metrics)``; or, of a module
    or a tuple of them, ``step(*modules, batch) -> metrics``, which changes them in place.

    Leaves that are not on all devices of the plan are copied there, replicated, so that the second
    step finds the state where the first one did. Weak types become strong ones, which is what a
    checkpoint brings back: a run that was resumed has to compute as one that was not.

    Raises StepError for numbers that the types of jax cannot hold.
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
        self._tree = jax.tree.structure(self.arrays())
        self._kinds = [_kind(x) for _, x in leaves]
        self._forms = [form(x) for _, x in leaves]  # the same, as errors say it
        self._checked = False

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
            metrics = named(step(*self._state, batch), "step")
            if not self._checked:  # once: nnx takes long to list variables, and steps are alike
                arrays = self.arrays()
                made = self._like_before(arrays)
                self._checked = made is arrays
                if not self._checked:
                    self.load(made)
            return metrics
        result = step(self._state, batch)
        if not isinstance(result, tuple) or len(result) != 2:
            raise StepError(
                f"step returned {form(result)}, but (state, metrics) is needed; metrics is the loss, "
                'or a dict of scalars with the loss as "loss".'
            )
        try:
            self._state = self._like_before(result[0])
        except StepError as error:
            if jax.tree.structure(result) != self._tree:
                raise
            raise StepError(
                "step returned the state alone, a tuple of 2, but (state, metrics) is needed: "
                "((a, b), loss)."
            ) from error
        return named(result[1], "step")

    def _like_before(self, arrays: Any) -> Any:
        """What a step made of the state, all of it strongly typed. StepError where its tree, a shape
        or a dtype is another one: the next step would be traced anew, and no checkpoint would fit.
        """
        leaves, tree = jax.tree.flatten(arrays)
        if tree != self._tree or [_kind(x) for x in leaves] != self._kinds:
            before = jax.tree.unflatten(self._tree, self._forms)
            after = jax.tree.unflatten(tree, map(form, leaves))
            path, was, now = difference(before, after) or ((), str(self._tree), str(tree))
            raise StepError(
                f"step changed what the state is made of: {path_of(path) or 'the state'} was {was}, "
                f"and became {now}. Return a state of the same tree, shapes and dtypes; an astype "
                "keeps a dtype."
            )
        weak = any(getattr(x, "weak_type", False) for x in leaves)
        return jax.tree.unflatten(tree, map(_strong, leaves)) if weak else arrays

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
    return SKIPPED in map(word, path[-2:]) and jnp.issubdtype(x.dtype, jnp.integer)


def _kind(x: Any) -> Any:
    return getattr(x, "shape", None), getattr(x, "dtype", type(x))


def _placed(tree: Any, plan: Plan | None) -> Any:
    mesh = plan.mesh if plan is not None else None
    everywhere = NamedSharding(mesh, PartitionSpec()) if isinstance(mesh, Mesh) else None

    def put(keys: Any, x: Any) -> Any:
        x = _held(keys, x) if isinstance(x, (*NUMBERS, np.ndarray, np.generic)) else _strong(x)
        if everywhere is None or not isinstance(x, jax.Array):
            return x
        there = x.sharding.device_set == everywhere.device_set
        return x if there else jax.device_put(x, everywhere)

    def node(keys: Any, x: Any) -> Any:
        if differs(x):
            return jax.tree.map(_strong, x)
        return jax.tree.map_with_path(lambda below, leaf: put((*keys, *below), leaf), x)

    return jax.tree.map_with_path(node, tree, is_leaf=differs)


def _strong(x: Any) -> Any:
    return x.astype(x.dtype) if getattr(x, "weak_type", False) else x


def _held(keys: Any, x: Any) -> jax.Array:
    """A number or numpy array as jax has it. StepError where that would be another number."""
    given, path = np.asarray(x), path_of(keys) or "the state"
    if is_number(given.dtype):
        with np.errstate(over="ignore", invalid="ignore"):
            kept = given.astype(jax.dtypes.canonicalize_dtype(given.dtype), copy=False)
        if kept.dtype == given.dtype or _equal(kept, given):
            return jnp.asarray(kept, kept.dtype)
    elif not isinstance(x, int):  # numpy has no type for an int of more than 64 bits
        raise StepError(f"{path} is {form(given)}, but numbers are needed.")
    raise StepError(
        f"{path} is {form(given) if given.ndim else x}, which jax's types of 32 bits do not hold. Keep "
        'it smaller, or set jax.config.update("jax_enable_x64", True).'
    )


def _equal(kept: np.ndarray, given: np.ndarray) -> bool:
    """Whether a narrower type has the same numbers; of floats, which it rounds, as finite ones."""
    if given.dtype.kind in "iu":
        return np.array_equal(kept, given)
    return np.array_equal(np.isfinite(kept), np.isfinite(given))


def named(found: Any, of: str) -> dict[str, Any]:
    """Metrics by name: a scalar is the loss. StepError for what is no real scalar; of a step also
    where there is no loss, or a name under which the run itself writes.
    """
    metrics = found if isinstance(found, Mapping) else {"loss": found}
    for name, x in metrics.items():
        if not isinstance(name, str) or not _is_scalar(x):
            raise StepError(
                f"{of} returned {name!r} of {_said(x)} among its metrics. Return a scalar loss, or a "
                'dict of real scalars by name with the loss as "loss".'
            )
        if of == "step" and (name in COLUMNS or name.startswith(VALIDATION)):
            raise StepError(
                f"step returned a metric {name!r}, but the run itself writes {', '.join(COLUMNS)} and "
                f"{VALIDATION}... there. Choose another name."
            )
    if of == "step" and "loss" not in metrics:
        raise StepError(
            f'step returned metrics without "loss": {", ".join(metrics) or "none"}. Return what is '
            'trained on as "loss" too: where it is not finite, the run has to notice.'
        )
    if not metrics:
        raise StepError(f"{of} returned no metrics. Return a loss, or a dict of scalars by name.")
    return dict(metrics)


def _is_scalar(x: Any) -> bool:
    """Whether it is a real number, so that ``float`` takes it."""
    if isinstance(x, int | float):
        return True
    if getattr(x, "shape", None) != () or not hasattr(x, "dtype"):
        return False
    return is_number(x.dtype) and not jnp.issubdtype(x.dtype, jnp.complexfloating)


def _said(x: Any) -> str:
    shape = getattr(x, "shape", None)
    if shape is None:
        return type(x).__name__
    return f"shape {list(shape)}" if shape else str(x.dtype)
