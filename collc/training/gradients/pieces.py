"""Micro-batches: value and gradients of a device's batch, taken in pieces.

Where the loss has a ``collc.sync``, the last piece is taken by itself: the syncs of all others do
nothing, and its own reduce the sum of all.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from collc.errors import DataError, StepError
from collc.lowering import sync
from collc.training.gradients import sums
from collc.training.gradients.opened import Opened
from collc.training.kinds import Batch
from collc.training.layouts import is_array
from collc.training.modules import Modules

Loss = Callable[..., Any]
Path = tuple[str, ...]  # the name of an argument, and the keys of a leaf in it


class Pieces:
    """The arguments of a loss by name, some of which are split in k pieces on dimension 0."""

    def __init__(
        self, values: Mapping[str, Any], batches: Sequence[str], k: int, has_aux: bool
    ) -> None:
        self.values, self.k, self.has_aux = values, k, has_aux
        # What is no array, such as a flag, is a constant: it is in no piece.
        self.flat = {name: jax.tree.flatten(values[name]) for name in batches}
        self.pieces = {
            name: [_split(name, x, k) if is_array(x) else None for x in leaves]
            for name, (leaves, _) in self.flat.items()
        }
        self.modules = Modules(values)

    def gradient(
        self, loss: Loss, grad_of: Callable[[Loss], Loss], wrt: str | Sequence[str]
    ) -> tuple[Any, Any]:
        """The mean of value and gradients over the pieces.

        ``grad_of``: makes the gradient function of a loss; ``wrt``: the names of the arguments that
        it differentiates.
        """
        with sync.waiting():
            return self._gradient(loss, grad_of, wrt)

    def _gradient(
        self, loss: Loss, grad_of: Callable[[Loss], Loss], wrt: str | Sequence[str]
    ) -> tuple[Any, Any]:
        grad, start = grad_of(loss), self.modules.state
        first = jax.tree.map(lambda x: x[0], self.pieces)
        traced, (_, out, grads) = jax.make_jaxpr(
            lambda state, piece: self._one(grad, state, piece), return_shape=True
        )(start, first)
        zeros = self._sums(out, grads)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, _wide(x.dtype)), zeros)
        reduced = frozenset()
        if sums.binds_sync(traced):
            reduced = _Traced(loss, self.arguments(start, first), self.has_aux).reduced

        def body(carry: Any, piece: dict[str, Any]) -> Any:
            state, total = carry
            state, out, grads = self._one(grad, state, piece)
            return (state, self._added(total, out, grads)), self._aux(out)

        scanned = self.pieces if not reduced else jax.tree.map(lambda x: x[:-1], self.pieces)
        length = self.k if not reduced else self.k - 1
        (state, total), aux = lax.scan(body, (start, zeros), scanned, length=length)
        ready: dict[Path, Any] = {}
        if reduced:
            so_far = _by_path(total[1], wrt)

            def last(*args: Any) -> Any:
                here = _Traced(loss, dict(zip(self.values, args, strict=True)), self.has_aux)
                return here.run({path: so_far[path] for path in reduced & so_far.keys()}, self.k)

            piece = jax.tree.map(lambda x: x[-1], self.pieces)
            state, out, grads_of_last = self._one(grad_of(last), state, piece)
            ready = {p: g for p, g in _by_path(grads_of_last, wrt).items() if p in reduced}
            total = self._added(total, out, grads_of_last)
            aux = jax.tree.map(lambda xs, x: jnp.concatenate([xs, x[None]]), aux, self._aux(out))
        self.modules.update(state)
        value, mean = jax.tree.map(
            lambda s, x: (s / self.k).astype(x.dtype), total, self._sums(out, grads)
        )
        leaves, tree = jax.tree.flatten(mean)
        paths = _by_path(mean, wrt)
        mean = jax.tree.unflatten(
            tree, [ready.get(path, x) for path, x in zip(paths, leaves, strict=True)]
        )
        return ((value, _joined(aux)) if self.has_aux else value), mean

    def arguments(self, state: Any, piece: Mapping[str, Any]) -> dict[str, Any]:
        parts = {}
        for name, (leaves, tree) in self.flat.items():
            filled = [x if p is None else p for x, p in zip(leaves, piece[name], strict=True)]
            parts[name] = jax.tree.unflatten(tree, filled)
        return {**self.values, **self.modules.merge(state), **parts}

    def _one(self, grad: Loss, state: Any, piece: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        """The state of the modules after a piece, what the loss returns of it, and its gradients."""
        arguments = self.arguments(state, piece)
        out, grads = grad(*arguments.values())
        return self.modules.after({n: arguments[n] for n in self.modules.objects}), out, grads

    def _sums(self, out: Any, grads: Any) -> tuple[Any, Any]:
        return (out[0] if self.has_aux else out), grads

    def _aux(self, out: Any) -> Any:
        return out[1] if self.has_aux else None

    def _added(self, total: Any, out: Any, grads: Any) -> Any:
        return jax.tree.map(lambda s, x: s + x.astype(s.dtype), total, self._sums(out, grads))


class _Traced:
    """A loss as a jaxpr, for arguments of which modules may change."""

    def __init__(self, loss: Loss, arguments: Mapping[str, Any], has_aux: bool) -> None:
        def value_first(values: dict[str, Any]) -> Any:
            out = loss(*values.values())
            return out if has_aux else (out, None)

        self.has_aux, self.opened = has_aux, Opened(value_first, arguments)
        named = jax.tree_util.tree_flatten_with_path
        paths = [path for path, _ in named(self.opened.plain)[0]]
        of_state = [path for path, _ in named(self.opened.modules.state)[0]]
        paths = [paths[i] for i in self.opened.arrays] + of_state
        self.at = {_path(path): i for i, path in enumerate(paths)}

    @property
    def reduced(self) -> frozenset[Path]:
        """The leaves that a sync reduces as a whole, once."""
        closed = self.opened.closed
        kept = frozenset(range(1, len(closed.out_avals)))  # all but the value
        found = sums.passing_one_sync(closed, self.at.values(), kept)
        return frozenset(path for path, i in self.at.items() if i in found)

    def run(self, so_far: Mapping[Path, Any], k: int) -> Any:
        """What the loss returns; of these leaves the sums so far are reduced with their gradients."""
        if not so_far.keys() <= self.reduced:
            raise StepError(
                "collc.value_and_grad: the loss uses collc.sync in another way when it is traced "
                "again. Let it depend on its arguments alone, or drop microbatches=."
            )
        given = {self.at[path]: s for path, s in so_far.items()}
        closed = self.opened.closed
        outs = sums.run(closed, closed.consts, self.opened.args, given, k)
        value, aux = self.opened.returned(outs)
        return (value, aux) if self.has_aux else value


def _path(keys: Sequence[Any]) -> Path:
    return tuple(map(str, keys))


def _by_path(grads: Any, wrt: str | Sequence[str]) -> dict[Path, Any]:
    """Leaves of gradients by the path of their argument, in their order."""
    each = {wrt: grads} if isinstance(wrt, str) else dict(zip(wrt, grads, strict=True))
    found = {}
    for name, of_one in each.items():
        for path, x in jax.tree_util.tree_flatten_with_path({name: of_one})[0]:
            found[_path(path)] = x
    return found


def _split(name: str, x: Any, k: int) -> Any:
    """[k * m, ...] -> [k, m, ...]"""
    if x.shape[0] % k:
        raise DataError(
            f"{name}: a device's part of the batch is {x.shape[0]}, which does not divide in "
            f"microbatches={k} pieces."
        )
    return x.reshape(k, x.shape[0] // k, *x.shape[1:])


def _joined(aux: Any) -> Any:
    """Per-example results of all pieces, [k, m, ...] -> [k * m, ...]; others stay stacked."""

    def is_batch(x: Any) -> bool:
        return isinstance(x, Batch)

    def join(x: Any) -> Any:
        if not is_batch(x):
            return x
        scalars = [y for y in jax.tree.leaves(x) if y.ndim < 2]
        return x if scalars else jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), x)

    return jax.tree.map(join, aux, is_leaf=is_batch)


def _wide(dtype: Any) -> Any:
    """At least float32, in which gradients are added up."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
