"""A parameter server emulated on devices: each holds a part of the state, and updates it.

    params = state.pull()           all-gather: the parts, put together on every rank
    state = state.push(grads)       reduce-scatter: each rank's part of the mean, applied where it lies

The optimizer sees parts only, and keeps all that it keeps in parts.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from collc.errors import DataError, StepError, nearest
from collc.lowering import context, parts
from collc.lowering.shards import Shard, is_shard, own, unpadded
from collc.planning.plan import Plan
from collc.training import strategy
from collc.training.consistency import Consistency, Sync
from collc.training.kinds import Ranked
from collc.training.norms import skip_nonfinite
from collc.training.paths import matches, named_leaves
from collc.training.separable import check_separable
from collc.training.step import schedule
from collc.training.strategies import Declared, Strategies, strategies


@dataclass(frozen=True)
class Server:
    """Made by ``collc.server``; hashable. What is constant about a server's state."""

    strategies: Strategies
    tx: optax.GradientTransformationExtraArgs
    consistency: Consistency = field(default_factory=Sync)

    @property
    def plan(self) -> Plan:
        return self.strategies.plan

    def init(self, params: Any) -> "ServerState":
        """The state for these parameters, with the optimizer's own, where it belongs.

        ``params``: a pytree of arrays, the same on all ranks; ``Ranked`` nodes where each rank has its
        own. Raises StepError for parameters without a strategy, DataError for what is no array.
        """
        for leaf in jax.tree.leaves(params, is_leaf=is_shard):
            if is_shard(leaf):
                raise DataError(
                    "collc.server: a parameter is a collc.Shard already. Give it whole."
                )
        return jax.jit(schedule(self.plan)(self._init))(params)

    def _init(self, params: Any) -> "ServerState":
        declared = self.strategies.declared(params)
        leaves, tree = jax.tree.flatten(params)
        placed = [self._placed(x, leaf) for x, leaf in zip(leaves, declared, strict=True)]
        kept = jax.tree.unflatten(tree, placed)
        mine = Ranked([jnp.zeros_like(x) for x in leaves], self.plan.axes)
        return ServerState(kept, self.tx.init(kept), self.consistency.start(mine), self)

    def _placed(self, x: Any, leaf: Declared) -> Any:
        if leaf.strategy.kind != "server":
            return x
        layers = self.strategies.layers(leaf.path)
        if layers and not jnp.ndim(x):
            raise DataError(f"collc.server: stacked= names {leaf.path}, which is a scalar.")
        cut = Shard(None, jnp.shape(x)[layers:], self.plan.axes, leaf.strategy.servers)
        return own(jnp.asarray(x), cut, dict(self.plan.sizes))

    def explain(self, params: Any) -> str:
        """What happens to these parameters, as ``Strategies.explain`` has it."""
        return self.strategies.explain(params)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "opt", "waiting"],
    meta_fields=["server"],
)
@dataclass(frozen=True)
class ServerState:
    """Parameters and the optimizer's state, each rank holding its parts. A pytree, of which a step
    takes and returns one.

    ``params``: like the parameters, with a ``Shard`` for each that servers hold. ``opt``: what optax
    keeps, in the same nodes. ``waiting``: pushes that have not taken effect.
    """

    params: Any
    opt: Any
    waiting: Any
    server: Server

    @property
    def skipped(self) -> jax.Array:
        """How many pushes were dropped since a gradient was not finite, int32."""
        return self.opt.skipped

    def pull(self, *keys: str) -> Any:
        """The whole parameters, the same on all ranks (but for ``Ranked`` ones). Inside a step.

        ``keys``: paths, or patterns of them; then only these, as a dict by path.
        """
        nodes, tree = jax.tree.flatten(self.params, is_leaf=is_shard)
        paths = self._paths()
        wanted = _chosen(keys, paths) if keys else paths
        here = [i for i, x in enumerate(nodes) if is_shard(x) and paths[i] in wanted]
        with self._inside("pull"):
            whole = parts.gather([nodes[i] for i in here], self.server.plan) if here else []
        for i, x in zip(here, whole, strict=True):
            nodes[i] = x
        if not keys:
            return jax.tree.unflatten(tree, nodes)
        return {path: x for path, x in zip(paths, nodes, strict=True) if path in wanted}

    def push(self, grads: Any, *, tokens: Any = None, participates: Any = None) -> "ServerState":
        """The state after these gradients of this rank, reduced as declared. Inside a step.

        ``grads``: like the parameters; or a dict of some of them by path, and only these are updated.
        Gradients of ``state.params`` themselves, from ``collc.all_gather``, are reduced already.
        ``tokens``, ``participates``: as ``Strategies.reduce`` takes them. Where a gradient is not
        finite on any rank, nothing is updated and ``skipped`` counts it.

        Raises StepError for other trees, and for pushes that the consistency cannot delay.
        """
        counts = {"tokens": tokens, "participates": participates}
        with self._inside("push"):
            if self._by_path(grads):
                return self._push_some(grads, counts)
            if _structure(grads) != _structure(self.params):
                raise StepError(
                    f"state.push: the gradients are {_structure(grads)}, but the parameters are "
                    f"{_structure(self.params)}. Give gradients like state.pull() returns the "
                    "parameters, or a dict of some of them by path."
                )
            if self.waiting is None:
                reduced = self.server.strategies.reduce(grads, **counts)
                return self._applied(reduced)
            if tokens is not None or participates is not None:
                raise StepError(
                    f"state.push: {self.server.consistency} applies the gradients of an earlier step, "
                    "which this step's tokens= and participates= do not count. Weigh the loss, or "
                    "take consistency.Sync()."
                )
            self._refuse_reduced(grads)
            leaves, tree = jax.tree.flatten(grads)
            return self._exchanged(leaves, tree)

    def flush(self) -> "ServerState":
        """The state once all that waits has taken effect. Inside a step."""
        consistency, now = self.server.consistency, self
        with self._inside("flush"):
            if not consistency.late:
                return self
            due, _, _ = consistency.exchange(self.waiting, None)
            nothing = Ranked(jax.tree.map(jnp.zeros_like, due.value), self.server.plan.axes)
            for _ in range(consistency.late):
                now = now._exchanged(nothing.value, _structure(self.params))
        return replace(now, waiting=consistency.start(nothing))

    def _exchanged(self, leaves: Sequence[Any], tree: Any) -> "ServerState":
        """The state after the push that is due, while this one waits."""
        server = self.server
        mine = Ranked(list(leaves), server.plan.axes)
        due, ready, waiting = server.consistency.exchange(self.waiting, mine)
        new = self._applied(server.strategies.reduce(jax.tree.unflatten(tree, due.value)))
        if ready is not None:
            old = self.params, self.opt
            kept = jax.tree.map(lambda a, b: jnp.where(ready, a, b), (new.params, new.opt), old)
            new = replace(new, params=kept[0], opt=kept[1])
        return replace(new, waiting=waiting)

    def _applied(self, means: Any) -> "ServerState":
        """The state after these means, each where its parameter lies."""
        check_separable(self.server.tx, means, self.opt, self.params)
        updates, opt = self.server.tx.update(means, self.opt, self.params)
        sizes = dict(self.server.plan.sizes)
        params = jax.tree.map(
            lambda x: unpadded(x, sizes) if is_shard(x) else x,
            optax.apply_updates(self.params, updates),
            is_leaf=is_shard,
        )
        return replace(self, params=params, opt=opt)

    def _push_some(self, grads: Mapping[str, Any], counts: Mapping[str, Any]) -> "ServerState":
        paths = self._paths()
        unknown = [path for path in grads if path not in paths]
        if unknown:
            raise StepError(
                f"state.push: there is no parameter {unknown[0]!r}. {nearest(unknown[0], paths)}"
            )
        if self.waiting is not None:
            raise StepError(
                f"state.push of some parameters needs consistency.Sync(): {self.server.consistency} "
                "delays whole trees of gradients. Push all of them."
            )
        reduced = self.server.strategies.reduce(dict(grads), **counts, partial=True)
        nodes, tree = jax.tree.flatten(self.params, is_leaf=is_shard)
        zeros = [jax.tree.map(jnp.zeros_like, x) for x in nodes]
        means = [reduced.get(path, zero) for path, zero in zip(paths, zeros, strict=True)]
        new = self._applied(jax.tree.unflatten(tree, means))
        return replace(
            new,
            params=_only(grads, paths, new.params, self.params),
            opt=_only(grads, paths, new.opt, self.opt),
        )

    def _paths(self) -> list[str]:
        return [path for path, _ in named_leaves(self.params)]

    def _by_path(self, grads: Any) -> bool:
        return (
            isinstance(grads, dict)
            and _structure(grads) != _structure(self.params)
            and _structure(grads) == _structure(dict.fromkeys(grads, 0))
        )

    def _refuse_reduced(self, grads: Any) -> None:
        if any(map(is_shard, jax.tree.leaves(grads, is_leaf=is_shard))):
            raise StepError(
                f"state.push: {self.server.consistency} delays the reduction, but collc.all_gather has "
                "reduced these gradients. Differentiate what state.pull() returns, or take "
                "consistency.Sync()."
            )

    @contextmanager
    def _inside(self, what: str) -> Iterator[None]:
        plan = context.current()
        axes = getattr(plan, "axes", None)
        if axes != self.server.plan.axes:
            found = f"a step over {' and '.join(axes)}" if axes else "no step"
            raise StepError(
                f"state.{what} runs inside a step over the server's axes, "
                f"{' and '.join(self.server.plan.axes)}, but here is {found}. Decorate it with "
                "@collc.schedule(plan, ...)."
            )
        yield


def server(
    by: Plan | Strategies,
    tx: optax.GradientTransformation,
    servers: int | None = None,
    *,
    consistency: Consistency | None = None,
    stacked: str | Sequence[str] = (),
) -> Server:
    """A parameter server on the devices of a plan, each of them worker and server for its part.

    ``by``: a plan, by which all parameters are served; or strategies, by which each is served,
    all-reduced or local. ``tx``: an optax transformation, which sees a rank's parts: norms are
    ``collc.clip_by_global_norm``'s. ``servers=k``: the first k ranks hold the parts, as k servers
    do, 1 is a star; every device gives 1/k of the memory, since all run one program.
    ``consistency``: ``collc.consistency.Sync()``, or ``Delayed(1)``, whose push overlaps the next
    step. ``stacked``: patterns of parameters whose dimension 0 is that of a loop's layers, which is
    not cut, so that the loop takes a layer's parts.

    Raises StepError and DataError for what is none of these.
    """
    if isinstance(by, Plan):
        by = strategies({"*": strategy.server(by, servers=servers)})
    elif not isinstance(by, Strategies):
        raise StepError(f"collc.server takes a plan or strategies, not {by!r}.")
    elif servers is not None:
        raise StepError(
            "collc.server: servers= has no effect on strategies, each of which says so itself: "
            "strategy.server(plan, servers=...)."
        )
    names = (stacked,) if isinstance(stacked, str) else tuple(stacked)
    when = Sync() if consistency is None else consistency
    if not (callable(getattr(when, "start", None)) and callable(getattr(when, "exchange", None))):
        raise StepError(f"consistency= is Sync() or Delayed(1) of collc.consistency, not {when!r}.")
    return Server(replace(by, stacked=names), skip_nonfinite(tx), when)


def _one(_: Any) -> int:
    return 0


def _structure(tree: Any) -> Any:
    """A pytree's structure, in which a shard is one leaf."""
    return jax.tree.structure(jax.tree.map(_one, tree, is_leaf=is_shard))


def _chosen(keys: Sequence[str], paths: Sequence[str]) -> set[str]:
    """The paths that keys name. Raises StepError for a key that names none."""
    for key in keys:
        if not any(matches(key, path) for path in paths):
            raise StepError(f"state.pull: {key!r} names no parameter. {nearest(key, paths)}")
    return {path for path in paths if any(matches(key, path) for key in keys)}


def _only(names: Mapping[str, Any], paths: Sequence[str], new: Any, old: Any) -> Any:
    """The new leaves of some parameters and of what an optimizer keeps for them, the old of others.

    What is kept for a parameter has the parameter's path at the end of its own; what is kept for
    none, such as a count, is new.
    """
    leaves, tree = jax.tree.flatten(new)
    chosen = []
    for (path, _), a, b in zip(named_leaves(new), leaves, jax.tree.leaves(old), strict=True):
        owners = [p for p in paths if path == p or path.endswith(f"/{p}")]
        chosen.append(b if owners and max(owners, key=len) not in names else a)
    return jax.tree.unflatten(tree, chosen)
