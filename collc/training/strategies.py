"""``collc.strategies``: for each parameter, by its path, what happens to its gradients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from collc.errors import DataError, MeshError, StepError, nearest
from collc.lowering import operands
from collc.lowering.shards import Shard, own
from collc.machine.units import parse_size
from collc.planning.plan import Plan
from collc.training.declared import (
    Declared,
    check_lies,
    differentiable,
    nodes,
    number,
    shape_of,
)
from collc.training.gradients import buckets
from collc.training.gradients.accumulate import graded
from collc.training.gradients.buckets import Entry
from collc.training.gradients.plain import metadata
from collc.training.gradients.weights import Weights, check_given
from collc.training.paths import check_distinct, matches, named_leaves
from collc.training.strategy import WEIGHTED, Strategy, check_axes
from collc.training.strategy_table import Row, table

REST = "*"  # alone: the leaves that no other pattern takes


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
        check_given(weights.counts, {leaf.strategy.mean for leaf in declared})
        for leaf in declared:
            if leaf.shard is not None and leaf.strategy.mean in WEIGHTED:
                raise StepError(
                    f"{leaf}: collc.all_gather has reduced it to a mean over ranks, which cannot be "
                    f"weighed by {leaf.strategy.mean} any more. Use value_and_grad of the strategies, "
                    "which weighs the loss, and state.push(grads, reduced=True)."
                )
        order = range(len(leaves), 0, -1)
        entries = self.entries(grads, leaves, declared, order, weights.scaled)
        return jax.tree.unflatten(tree, buckets.reduced(entries, self.bucket))

    def value_and_grad(
        self,
        loss_fn: Callable[..., Any],
        argnums: Any = 0,
        has_aux: bool = False,
        *,
        microbatches: int = 1,
        batch: str | Sequence[str] | None = None,
        tokens: Callable[..., Any] | None = None,
        participates: Callable[..., Any] | None = None,
    ) -> Callable[..., Any]:
        """As ``jax.value_and_grad`` (``nnx.value_and_grad`` of modules), inside a decorated step.

        ``loss_fn`` is the loss of one rank's batch, a mean over its examples. The value comes back as
        the mean over all ranks, the gradients as declared, in buckets in the order in which the
        backward makes them. ``argnums``, ``has_aux`` as in jax; what has_aux returns is this rank's
        own.

        ``microbatches=k`` takes the arguments named by ``batch`` (by default all that are not
        differentiated) in k pieces, adds up their gradients in at least float32, and reduces once.

        ``tokens``: a function of the loss's arguments, which says of how many tokens a loss is the mean;
        value and gradients are then those of the mean over all tokens. The loss is weighed before it is
        differentiated, so that this is true of shards and experts too. ``participates`` likewise says
        whether there is data. Of a rank or piece that counts for nothing the gradients may be NaN, but
        not what the loss itself sends to other ranks.

        Raises StepError where the strategies' denominators are not of one loss, and for counts that
        no leaf wants.
        """
        return graded(
            self,
            loss_fn,
            argnums,
            has_aux,
            microbatches=microbatches,
            batch=batch,
            tokens=tokens,
            participates=participates,
        )

    def explain(self, params: Any) -> str:
        """What happens to the gradients of these parameters, as a table with bytes and, where the plan
        has a machine, predicted time.

        ``params``: arrays or their shapes, outside a step. What has no gradient does not count, such
        as integers, random keys, and of nnx modules and their states all but ``nnx.Param``.
        """
        params = differentiable(params)
        declared = self.declared(params)
        rows: dict[str, Row] = {pattern: Row(pattern, s, []) for pattern, s in self.patterns}
        for leaf, x in reversed(list(zip(declared, jax.tree.leaves(params), strict=True))):
            rows[leaf.pattern].leaves.append(shape_of(x, leaf))
        return table(self.plan, list(rows.values()), self.bucket)

    # -- for the other modules of training --

    def declared(self, tree: Any, *, partial: bool = False) -> list[Declared]:
        """Each leaf with what is declared for it. Raises StepError as ``of`` does."""
        named = named_leaves(tree)
        check_distinct(tree)
        found = [self._pattern(path) for path, _ in named]
        if not partial:
            self._all_match([path for path, _ in named])
        known = dict(self.patterns)
        declared = [
            Declared(path, pattern, known[pattern], axes, shard)
            for (path, _), pattern, (axes, shard) in zip(named, found, nodes(tree), strict=True)
        ]
        for leaf in declared:
            check_lies(leaf, self.plan)
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
        x = number(x, leaf)
        chosen, stacked = leaf.strategy, self.layers(leaf.path)
        if chosen.kind == "server" and known:
            whole = Shard(None, x.shape[stacked:], self.plan.axes, chosen.servers)
            return Entry(own(scaled(x, chosen, known), whole, dict(self.plan.sizes)))
        if chosen.kind != "server" and not x.size:
            return Entry(jnp.zeros(x.shape, x.dtype))  # the same on all ranks, as can be seen
        message = buckets.message_of(chosen, x)
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
                what = "the pattern" if pattern in declared else "of stacked= the pattern"
                below = f"{pattern.rstrip('/')}/"
                inside = any(path.startswith(below) for path in paths)
                hint = f'Write "{below}*" for all below it.' if inside else nearest(pattern, paths)
                raise StepError(f"{what} {pattern!r} matches no leaf. {hint}")


def strategies(patterns: Mapping[str, Strategy], bucket: str | int = "32MiB") -> Strategies:
    """What happens to the gradients of each parameter, by patterns of its path.

    ``patterns``: of paths as ``blocks/0/kernel``, where ``*`` stands for any part, "/" included, and
    all else for itself. ``"*"`` alone means the leaves that no other takes; others must not meet in a
    leaf. ``bucket``: gradients that are treated alike are reduced together, up to so many bytes as
    they travel, those which the backward makes first before others.

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
                f"collc.strategies takes pairs of a pattern and a strategy, as collc.strategy makes "
                f"them, not {_said(pattern)}: {_said(chosen)}."
            )
        if set(pattern) == {"*"} and pattern != REST:
            raise StepError(
                f'collc.strategies: {pattern!r} stands for any path. Write "*", which takes what no '
                "other pattern does."
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
    placed = tuple((p, s if s.plan else replace(s, plan=plan)) for p, s in patterns.items())
    return Strategies(placed, plan, parse_size(str(bucket)))


def _said(x: Any) -> str:
    """How messages name what was given."""
    return repr(x) if isinstance(x, str | int | float | None) else f"a {type(x).__name__}"
