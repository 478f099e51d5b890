"""How each leaf of a step's arguments and results lies over the plan's axes."""

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from collc.errors import DataError, StepError
from collc.lowering.operands import names_in
from collc.planning.plan import Plan
from collc.training.kinds import Batch, differs, rank_axes
from collc.training.modules import Modules

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Leaf:
    """A leaf: where it stands, as a user would write it, and how it lies over the plan's axes.

    kind: "replicated", "batch" or "ranked". axes: those over which it differs. variable: the type
    of the nnx variable that holds it, if a module's.
    """

    path: str
    kind: str = "replicated"
    axes: Axes = ()
    variable: str = ""

    @property
    def spec(self) -> P:
        """Its PartitionSpec; a ranked leaf has a dimension for each axis."""
        if self.kind == "ranked":
            return P(*self.axes)
        return P(self.axes) if self.axes else P()


def subsets(axes: Axes) -> list[Axes]:
    """All subsets of the axes, in their order.

    >>> subsets(("host", "gpu"))
    [(), ('host',), ('gpu',), ('host', 'gpu')]
    """
    found: list[Axes] = [()]
    for axis in axes:
        found += [(*some, axis) for some in found]
    return found


def is_array(x: Any) -> bool:
    """Whether a leaf is data; anything else, such as a flag or a name, is the program's constant."""
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def is_constant(x: Any) -> bool:
    """Whether an argument is one constant as a whole: a flag, a name, a number, or nothing."""
    leaves = jax.tree.leaves(x)
    return not leaves or (leaves[0] is x and not is_array(x))


class Arguments:
    """A call's arguments as arrays: the arrays, their layouts, and the way back.

    Raises DataError for a batch that does not divide over the plan's devices.
    """

    def __init__(
        self, step: str, plan: Plan, plain: dict[str, Any], modules: Modules, batch: Sequence[str]
    ) -> None:
        self.names, self.step, self.plan, self.batch = tuple(plain), step, plan, batch
        # As a list: a dict's leaves would come in the order of its sorted keys.
        own, self._tree = jax.tree.flatten(list(plain.values()))
        state, self._state = jax.tree.flatten(modules.state)
        self._count, self._all = len(own), [*own, *state]
        layouts = [leaf for name in plain for leaf in self._argument(name, plain[name])]
        for x, (path, variable, axes) in zip(state, modules.leaves(), strict=True):
            here = Leaf(path, variable=variable)
            layouts.append(self._ranked(path, x, axes, variable) if axes else here)
        arrays = [(x, leaf) for x, leaf in zip(self._all, layouts, strict=True) if is_array(x)]
        self.values = [x for x, _ in arrays]
        self.leaves = [leaf for _, leaf in arrays]

    def rebuild(self, values: Sequence[Any]) -> tuple[dict[str, Any], Any]:
        """The arguments by name, and the modules' state, with other arrays in them."""
        rest = iter(values)
        full = [next(rest) if is_array(x) else x for x in self._all]
        plain = jax.tree.unflatten(self._tree, full[: self._count])
        state = jax.tree.unflatten(self._state, full[self._count :])
        return dict(zip(self.names, plain, strict=True)), state

    def resharded(self) -> list[Any]:
        """The arrays, on an Explicit mesh, where sharding is part of the type, brought to the step's."""
        explicit = set(getattr(self.plan.mesh, "explicit_axes", ())) & set(self.plan.axes)
        if not explicit:
            return self.values
        pairs = zip(self.values, self.leaves, strict=True)
        return [_reshard(jnp.asarray(v), leaf, self.plan) for v, leaf in pairs]

    def _argument(self, name: str, value: Any) -> Iterator[Leaf]:
        found = list(_leaves(value))
        if name in self.batch and not found:
            raise DataError(f"{self.step}: {name} holds no array, but batch= names it.")
        for path, leaf, mark in found:
            own = f"{name}{path}"
            if isinstance(mark, Batch):
                raise StepError(
                    f"{self.step}: {own} is in a collc.Batch, which marks results. Name an argument "
                    "that is a batch in batch=."
                )
            if mark is not None:
                yield self._ranked(own, leaf, rank_axes(mark) or self.plan.axes)
            elif name in self.batch:
                yield self._split(own, leaf)
            else:
                yield Leaf(own)

    def _split(self, path: str, leaf: Any) -> Leaf:
        if not is_array(leaf):
            raise DataError(
                f"{self.step}: {path} is a {type(leaf).__name__}, but what batch= names holds arrays, "
                "which are split on dimension 0. Make it one (np.asarray), or pass it as an argument "
                "of its own."
            )
        shape, ranks = np.shape(leaf), self.plan.ranks
        if shape and shape[0] == 0:
            raise DataError(f"{self.step}: {path} has shape {shape}: the batch is empty.")
        if not shape or shape[0] % ranks:
            found = f"its dimension 0 is {shape[0]}" if shape else "it is a scalar"
            remedy = (
                f"Make it a multiple of {ranks}, or do not name it in batch=."
                if shape
                else "Name in batch= only arguments that are split."
            )
            raise DataError(
                f"{self.step}: {path} has shape {shape}: as a batch it is split on dimension 0 over "
                f"{ranks} devices ({' x '.join(self.plan.axes)}), but {found}. {remedy}"
            )
        return Leaf(path, "batch", self.plan.axes)

    def _ranked(self, path: str, leaf: Any, axes: Axes, variable: str = "") -> Leaf:
        sizes = tuple(dict(self.plan.sizes).get(a, 0) for a in axes)
        if axes not in subsets(self.plan.axes):
            raise DataError(_not_axes(self.step, path, axes, self.plan))
        if np.shape(leaf)[: len(axes)] != sizes:
            raise DataError(
                f"{self.step}: {path} is ranked over {' and '.join(axes)}, so its shape has to begin "
                f"with {sizes}; it is {np.shape(leaf)}. Make it with collc.ranked."
            )
        return Leaf(path, "ranked", axes, variable)


def results(
    step: str,
    plan: Plan,
    result: Any,
    called: Mapping[str, str] = types.MappingProxyType({}),
) -> Iterator[Leaf]:
    """The layouts of what a step returns, in the order of its leaves. Raises StepError.

    ``called``: other names for what begins with these paths, as ``{"[0]": "value"}``.
    """
    for path, leaf, mark in _leaves(result):
        own = f"result{path}"
        for start, name in called.items():
            if path.startswith(start):
                own = name + path[len(start) :]
        try:
            jax.typeof(leaf)
        except TypeError:
            raise StepError(
                f"{step}: {own} is a {type(leaf).__name__}, but a step is a plain function that "
                "returns arrays, numbers, None, and pytrees of them. Leave it out: what is no array "
                "is known before the step runs."
            ) from None
        if mark is None:
            yield Leaf(own)
        elif not isinstance(mark, Batch):
            axes = rank_axes(mark) or plan.axes
            if axes not in subsets(plan.axes):
                raise StepError(_not_axes(step, own, axes, plan))
            yield Leaf(own, "ranked", axes)
        elif np.shape(leaf):
            yield Leaf(own, "batch", plan.axes)
        else:
            raise StepError(
                f"{step}: {own} is marked as a batch, but it is a scalar. Reduce it with collc.pmean "
                "instead."
            )


def _leaves(tree: Any) -> Iterator[tuple[str, Any, Any]]:
    """The leaves of a pytree: path, value, and the node that marks it as ranked or batch, or None."""

    def marked(x: Any) -> bool:
        return isinstance(x, Batch) or differs(x)

    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=marked)[0]:
        if not marked(node):
            yield jax.tree_util.keystr(path), node, None
            continue
        for below, leaf in jax.tree_util.tree_flatten_with_path(node)[0]:
            inner = below[1:]  # without the mark's own ".value"
            yield jax.tree_util.keystr((*path, *inner)), leaf, node


def _not_axes(step: str, path: str, axes: Axes, plan: Plan) -> str:
    return (
        f"{step}: {path} is ranked over {' and '.join(axes)}, but the plan's axes are "
        f"{' and '.join(plan.axes)}, in this order. Name axes of the plan, or none for all of them."
    )


def _reshard(x: Any, leaf: Leaf, plan: Plan) -> Any:
    """The array with the plan's axes where the step wants them, and other axes where they are."""
    typed = [*jax.typeof(x).sharding.spec]
    typed += [None] * (x.ndim - len(typed))
    rest = [tuple(a for a in names_in(entry) if a not in plan.axes) for entry in typed]
    for d, entry in enumerate(leaf.spec):
        rest[d] = (*names_in(entry), *rest[d])
    spec = P(*(names[0] if len(names) == 1 else names or None for names in rest))
    return jax.sharding.reshard(x, NamedSharding(plan.mesh, spec))
