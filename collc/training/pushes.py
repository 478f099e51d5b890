"""The gradients that a push is given, checked: whose they are, what shapes, and who has reduced them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from collc.errors import StepError, nearest
from collc.lowering.shards import Shard, is_shard
from collc.training.consistency import Consistency
from collc.training.paths import named_leaves
from collc.training.strategies import Strategies
from collc.training.strategy import WEIGHTED


def structure(tree: Any) -> Any:
    """A pytree's structure, in which a shard is one leaf."""
    return jax.tree.structure(tree, is_leaf=is_shard)


@dataclass(frozen=True)
class Given:
    """What ``state.push`` is given, for these parameters of a server."""

    grads: Any
    params: Any
    counts: Mapping[str, Any]
    reduced: bool

    @property
    def by_path(self) -> bool:
        """Whether they are a dict of some gradients by path, and not a tree like the parameters."""
        return (
            isinstance(self.grads, dict)
            and structure(self.grads) != structure(self.params)
            and structure(self.grads) == structure(dict.fromkeys(self.grads, 0))
        )

    def check_tree(self) -> None:
        """Raises StepError for gradients of other parameters, shapes, or kinds of dtype."""
        if self.by_path and not self.grads:
            raise StepError(
                "state.push({}) would update nothing. Give gradients of some parameters by path, or of "
                "all of them."
            )
        if not self.by_path and structure(self.grads) != structure(self.params):
            raise StepError(
                f"state.push: the gradients are {structure(self.grads)}, but the parameters are "
                f"{structure(self.params)}. Give gradients like state.pull() returns the parameters, "
                "or a dict of some of them by path."
            )
        for path, grad, param in self._pairs():
            found, whole = _shape(grad), _shape(param)
            alike = not (is_shard(grad) and is_shard(param)) or _cut(grad) == _cut(param)
            if found != whole or not alike:
                raise StepError(
                    f"state.push: the gradient of {path} is {_said(grad)}, but the parameter is "
                    f"{_said(param)}. Give the gradient of what state.pull() returns."
                )
            if _kind(grad) != _kind(param):
                raise StepError(
                    f"state.push: the gradient of {path} is {_dtype(grad)}, but the parameter is "
                    f"{_dtype(param)}. Give the gradient of a real loss, as jax.grad returns it."
                )
            if self.reduced and is_shard(param) and not is_shard(grad):
                raise StepError(
                    f"state.push(reduced=True): {path} has a server, but its gradient is whole, so "
                    "nothing has reduced it. Push what value_and_grad of the strategies returned, or "
                    "leave reduced= out."
                )

    def check_counts(self, strategies: Strategies) -> None:
        """Raises StepError for counts that are missing, or that cannot count any more."""
        given = [name for name, count in self.counts.items() if count is not None]
        if self.reduced and given:
            raise StepError(
                f"state.push: {given[0]}= has no effect on gradients that are reduced already. Drop "
                "it, or reduced=True."
            )
        if self.reduced:
            return
        for leaf in strategies.declared(self.grads, partial=self.by_path):
            mean, name = leaf.strategy.mean, _ARGUMENT.get(leaf.strategy.mean, "")
            if mean not in WEIGHTED or (self.counts[name] is not None and leaf.shard is None):
                continue
            lacks = "is a mean over ranks already" if leaf.shard else f"needs {name}= of this rank"
            raise StepError(
                f'state.push: {leaf} has mean="{mean}", and its gradient {lacks}. What value_and_grad '
                "of the strategies returned is reduced as declared: state.push(grads, reduced=True)."
            )

    def check_delayed(self, consistency: Consistency, strategies: Strategies) -> None:
        """Raises StepError for what the reduction of a later step could not be told."""
        if self.by_path:
            raise StepError(
                f"state.push of some parameters needs consistency.Sync(): {consistency} delays whole "
                "trees of gradients. Push all of them."
            )
        weighted = [s.mean for _, s in strategies.patterns if s.mean in WEIGHTED]
        if weighted or any(count is not None for count in self.counts.values()):
            raise StepError(
                f"state.push: {consistency} applies the gradients of an earlier step, which this step's "
                "tokens= and participates= do not count. Weigh the loss, or take consistency.Sync()."
            )
        if self.reduced or any(is_shard(grad) for _, grad, _ in self._pairs()):
            raise StepError(
                f"state.push: {consistency} delays the reduction, but these gradients are reduced "
                "already. Differentiate what state.pull() returns, by jax.value_and_grad, or take "
                "consistency.Sync()."
            )

    def _pairs(self) -> Iterator[tuple[str, Any, Any]]:
        """Path, gradient and parameter, each a shard or a leaf. Raises StepError for other paths."""
        paths = [path for path, _ in named_leaves(self.params)]
        params = jax.tree.leaves(self.params, is_leaf=is_shard)
        if not self.by_path:
            yield from zip(
                paths, jax.tree.leaves(self.grads, is_leaf=is_shard), params, strict=True
            )
            return
        known = dict(zip(paths, params, strict=True))
        for path, grad in self.grads.items():
            if path not in known:
                raise StepError(
                    f"state.push: there is no parameter {path!r}. {nearest(str(path), paths)}"
                )
            yield path, grad, known[path]


def check_counters(opt: Any) -> None:
    """Raises StepError for an optimizer that waits for several pushes, of which some are by path."""
    for node in jax.tree.leaves(opt, is_leaf=lambda x: isinstance(x, _WAITS)):
        if isinstance(node, _WAITS):
            raise StepError(
                f"state.push of some parameters: the optimizer counts all pushes together "
                f"({type(node).__name__}), and updates at every k-th alone, so that what is pushed at "
                "others may never be updated. Push all of them; or use microbatches= of "
                "value_and_grad, which add up within a step."
            )


_WAITS = (optax.MultiStepsState, optax.ApplyEvery, optax.ConditionallyTransformState)
_ARGUMENT = {"tokens": "tokens", "participants": "participates"}


def _shape(x: Any) -> tuple[int, ...]:
    return (*x.layers, *x.shape) if is_shard(x) else np.shape(x)


def _dtype(x: Any) -> Any:
    x = x.value if is_shard(x) else x
    return getattr(x, "dtype", None) or jnp.result_type(x)


def _kind(x: Any) -> str:
    """What cannot become another without loss: real, complex, or neither."""
    dtype = _dtype(x)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return "complex"
    return "real" if jnp.issubdtype(dtype, jnp.floating) else "neither"


def _cut(x: Shard) -> Any:
    return x.shape, x.axes, x.servers, np.shape(x.value)


def _said(x: Any) -> str:
    if not is_shard(x):
        return f"{list(_shape(x))}"
    over = f"{' and '.join(x.axes)}{f' on {x.servers} servers' if x.servers else ''}"
    return f"a collc.Shard of {list(_shape(x))} over {over}"
