"""``collc.strategies``: for each parameter, by its path, what happens to its gradients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from collc.errors import DataError, MeshError, StepError, nearest
from collc.lowering import operands
from collc.lowering.shards import Shard, is_shard, own
from collc.machine.units import parse_size
from collc.planning.plan import Plan
from collc.training.gradients import buckets
from collc.training.gradients.accumulate import value_and_grad
from collc.training.gradients.buckets import Entry
from collc.training.gradients.plain import metadata
from collc.training.gradients.weights import Weights
from collc.training.kinds import rank_axes
from collc.training.paths import matches, named_leaves
from collc.training.strategy import WEIGHTED, Strategy, check_axes
from collc.training.strategy_table import Row, table

REST = "*"  # alone: the leaves that no other pattern takes


@dataclass(frozen=True)
class Declared:
    """A leaf of a tree and its strategy.

    ``axes``: of its Ranked node, or its Shard; None where it is neither.
    """

    path: str
    pattern: str
    strategy: Strategy
    axes: tuple[str, ...] | None
    shard: Shard | None

    def __str__(self) -> str:
        return f"{self.path or 'the gradient'} (pattern {self.pattern!r})"


@dataclass(frozen=True)
class Strategies:
    """Made by ``collc.strategies``; hashable.

    ``bucket``: the most bytes that are reduced at once. ``stacked``: patterns of leaves whose
    dimension 0 is that of a loop's layers, which their servers do not cut.
    """

    patterns: tuple[tuple[str, Strategy], ...]
    plan: Plan
    bucket: int = 32 << 20
    stacked: tuple[str, ...] = ()

    value_and_grad = value_and_grad

    def of(self, tree: Any, *, partial: bool = False) -> list[tuple[str, Strategy]]:
        """The path and the strategy of each leaf, in the tree's order.

        ``partial``: the tree is only a part, so that patterns may match nothing. Raises StepError for
        a pattern that matches nothing, and for a leaf that several take, or none.
        """
        return [(leaf.path, leaf.strategy) for leaf in self.declared(tree, partial=partial)]

    def reduce(
        self, grads: Any, tokens: Any = None, participates: Any = None, *, partial: bool = False
    ) -> Any:
        """The gradients of this rank, reduced as declared. Runs inside a decorated step.

        ``grads``: a pytree like the parameters; those of servers come back as ``Shard`` nodes, and
        such nodes, which ``collc.all_gather`` has reduced, pass. ``tokens``: how many tokens this
        rank's gradients are a mean of; ``participates``: whether it has data. A rank that counts for
        nothing may hold NaN; where none counts, gradients are 0. ``partial`` as in ``of``.

        Raises StepError as ``of`` does, for counts that are missing or that no leaf wants, and for
        leaves that lie in another way than declared; DataError for dtypes without a mean.
        """
        leaves, tree = jax.tree.flatten(grads)
        declared = self.declared(grads, partial=partial)
        weights = Weights(self.plan, {"tokens": tokens, "participants": participates})
        weights.check({leaf.strategy.mean for leaf in declared})
        for leaf in declared:
            if leaf.shard is not None and leaf.strategy.mean in WEIGHTED:
                raise StepError(
                    f"{leaf}: collc.all_gather has reduced it to a mean over ranks, which cannot be "
                    f"weighed by {leaf.strategy.mean} any more. Use value_and_grad of the strategies."
                )
        order = range(len(leaves), 0, -1)
        entries = self.entries(grads, leaves, declared, order, weights.scaled)
        return jax.tree.unflatten(tree, buckets.reduced(entries, self.bucket))

    def explain(self, params: Any) -> str:
        """What happens to the gradients of these parameters, as a table with bytes and, where the plan
        has a machine, predicted time. ``params``: arrays or their shapes, outside a step.
        """
        declared = self.declared(params)
        sizes = dict(self.plan.sizes)
        rows: dict[str, Row] = {pattern: Row(pattern, s, []) for pattern, s in self.patterns}
        for leaf, x in reversed(list(zip(declared, jax.tree.leaves(params), strict=True))):
            rows[leaf.pattern].leaves.append(_shape(x, leaf, sizes))
        return table(self.plan, list(rows.values()), self.bucket)

    # -- for the other modules of training --

    def declared(self, tree: Any, *, partial: bool = False) -> list[Declared]:
        """Each leaf with what is declared for it. Raises StepError as ``of`` does."""
        named = named_leaves(tree)
        found = [self._pattern(path) for path, _ in named]
        if not partial:
            self._all_match([path for path, _ in named])
        known = dict(self.patterns)
        nodes = list(_nodes(tree))
        declared = [
            Declared(path, pattern, known[pattern], axes, shard)
            for (path, _), pattern, (axes, shard) in zip(named, found, nodes, strict=True)
        ]
        for leaf in declared:
            self._lies_as_declared(leaf)
        return declared

    def entries(
        self,
        grads: Any,
        leaves: Sequence[Any],
        declared: Sequence[Declared],
        order: Sequence[int],
        scaled: Callable[[jax.Array, Strategy, bool], jax.Array],
        same: Sequence[bool] = (),
    ) -> list[Entry]:
        """What is to be done to each leaf.

        ``order``: when each is ready; ``scaled``: weighs a leaf; ``same``: those which are known to
        be the same on all ranks.
        """
        specs: Sequence[Any] = [None] * len(leaves)
        if operands.automatic() and (found := metadata(grads)) is not None:
            specs = jax.tree.leaves(found)
        known = same or [False] * len(leaves)
        each = zip(leaves, declared, order, specs, known, strict=True)
        return [self._entry(*one, scaled) for one in each]

    def _entry(
        self, x: Any, leaf: Declared, ready: int, spec: Any, known: bool, scaled: Any
    ) -> Entry:
        if leaf.shard is not None or getattr(x, "dtype", None) == jax.dtypes.float0:
            return Entry(x)
        x = _number(x, leaf)
        chosen, plan = leaf.strategy, leaf.strategy.plan or self.plan
        stacked = self.layers(leaf.path)
        if chosen.kind == "server" and known:
            whole = Shard(None, x.shape[stacked:], plan.axes, chosen.servers)
            return Entry(own(scaled(x, chosen, known), whole, dict(plan.sizes)))
        if chosen.kind != "server" and not x.size:
            return Entry(jnp.zeros(x.shape, x.dtype))  # the same on all ranks, as can be seen
        axes = chosen.axes(plan)
        if not axes:
            return Entry(scaled(x, chosen, known))
        message = buckets.message_of(
            plan,
            axes,
            x,
            accumulate=chosen.accumulate,
            wire=chosen.wire,
            scatter=chosen.kind == "server",
            servers=chosen.servers,
        )
        return Entry(scaled(x, chosen, known), message, ready, stacked, spec, str(leaf))

    def layers(self, path: str) -> int:
        """How many dimensions in front of a leaf are a loop's layers, 0 or 1."""
        return int(any(matches(pattern, path) for pattern in self.stacked))

    def _pattern(self, path: str) -> str:
        """The pattern that takes a leaf."""
        taken = [p for p, _ in self.patterns if p != REST and matches(p, path)]
        if len(taken) > 1:
            both = " and ".join(map(repr, taken[:2]))
            raise StepError(
                f"{path}: the patterns {both} collide: both take it. Narrow one of them; only "
                "'*' alone gives way to others."
            )
        if taken:
            return taken[0]
        if REST in dict(self.patterns):
            return REST
        raise StepError(
            f"{path or 'the tree, one leaf without a path,'} has no strategy: none of the patterns "
            f'{", ".join(repr(p) for p, _ in self.patterns)} takes it. Add one, or "*" for the rest.'
        )

    def _all_match(self, paths: Sequence[str]) -> None:
        declared = [p for p, _ in self.patterns if p != REST]
        for pattern in [*declared, *self.stacked]:
            if not any(matches(pattern, path) for path in paths):
                what = "stacked= has the pattern" if pattern not in declared else "the pattern"
                raise StepError(f"{what} {pattern!r} matches no leaf. {nearest(pattern, paths)}")

    def _lies_as_declared(self, leaf: Declared) -> None:
        if leaf.axes is None:
            return
        over, kind = " and ".join(leaf.axes), leaf.strategy.kind
        if leaf.shard is not None:
            if kind != "server" or set(leaf.axes) != set((leaf.strategy.plan or self.plan).axes):
                raise StepError(
                    f"{leaf} is a Shard over {over}, but its strategy is {leaf.strategy}. Declare "
                    "strategy.server(plan), with a plan over these axes."
                )
        elif kind != "local" or set(leaf.axes) != set(leaf.strategy.dropped):
            names = ", ".join(f'"{a}"' for a in leaf.axes)
            raise StepError(
                f"{leaf} is ranked over {over}: each rank has its own. But its strategy is "
                f"{leaf.strategy}. Declare strategy.local({names}), or make it one for all ranks."
            )


def strategies(patterns: Mapping[str, Strategy], bucket: str | int = "32MiB") -> Strategies:
    """What happens to the gradients of each parameter, by patterns of its path.

    ``patterns``: of paths as ``blocks/0/kernel``, where ``*`` stands for any part. ``"*"`` alone means
    the leaves that no other takes; others must not meet in a leaf. ``bucket``: gradients that are
    treated alike are reduced together, up to so many bytes, those which the backward makes first
    before others.

    Raises StepError for what is no strategy, MeshError where the plans are for different meshes or
    axes, and for axes that they do not have, DataError for bucket sizes.
    """
    if not isinstance(patterns, Mapping) or not patterns:
        raise StepError(
            'collc.strategies takes strategies by pattern, as {"*": strategy.all_reduce(plan)}, not '
            f"{patterns!r}."
        )
    for pattern, chosen in patterns.items():
        if not isinstance(pattern, str) or not isinstance(chosen, Strategy):
            raise StepError(
                f"collc.strategies: {pattern!r}: {chosen!r} is no pattern with its strategy. See "
                "collc.strategy."
            )
    plans = [(p, s.plan) for p, s in patterns.items() if s.plan is not None]
    if not plans:
        raise StepError(
            "collc.strategies: none of the strategies has a plan. Give one, as in "
            'strategy.local("gpu", plan=plan).'
        )
    first, plan = plans[0]
    for pattern, other in plans:
        if other.mesh != plan.mesh or other.axes != plan.axes:
            raise MeshError(
                f"the patterns {first!r} and {pattern!r} have plans over different meshes or axes, "
                f"{plan} and {other}. Make both of one mesh, over the same axes."
            )
    for chosen in patterns.values():
        check_axes(chosen.dropped, plan)
    if isinstance(bucket, bool) or not isinstance(bucket, str | int):
        raise DataError(f"bucket= is a size in bytes, as '32MiB', not {bucket!r}")
    return Strategies(tuple(patterns.items()), plan, parse_size(str(bucket)))


def _nodes(tree: Any) -> Iterator[tuple[tuple[str, ...] | None, Shard | None]]:
    """For each leaf the axes of the Ranked node or Shard that it is in, and that Shard."""
    for node in jax.tree.leaves(tree, is_leaf=lambda x: rank_axes(x) is not None):
        shard = node if is_shard(node) else None
        yield from [(rank_axes(node), shard)] * len(jax.tree.leaves(node))


def _number(x: Any, leaf: Declared) -> jax.Array:
    try:
        value = jnp.asarray(x)
    except (TypeError, ValueError):
        raise DataError(f"{leaf}: {x!r} is no array, nor a number") from None
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        raise DataError(
            f"{leaf} is {value.dtype}, which has no mean of its own dtype. Give None for parameters "
            "that have no gradient, or cast it to a floating-point dtype."
        )
    return value


def _shape(x: Any, leaf: Declared, sizes: Mapping[str, int]) -> jax.ShapeDtypeStruct:
    """What a rank reduces of a leaf, from the global arrays that are outside a step."""
    shape, dtype = jnp.shape(x), jnp.result_type(x)
    if leaf.axes is not None:
        shape = shape[len(leaf.axes) :]
    if leaf.shard is not None:
        whole = leaf.shard.shape
        shape = (*shape[: len(shape) - max(1, len(whole))], *whole)
    return jax.ShapeDtypeStruct(shape, dtype)
