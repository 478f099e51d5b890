"""A parameter server emulated on devices: each holds a part of the state, and updates it.

    params = state.pull()           all-gather: the parts, put together on every rank
    state = state.push(grads)       reduce-scatter: each rank's part of the mean, applied where it lies

The optimizer sees parts only, and keeps all that it keeps in parts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from collc.errors import StepError, nearest
from collc.lowering import context, parts
from collc.lowering.shards import Shard, is_shard, own
from collc.planning.plan import Plan
from collc.training import separable, strategy
from collc.training.consistency import Consistency, Sync
from collc.training.kinds import Ranked
from collc.training.norms import skip_nonfinite
from collc.training.owners import owners
from collc.training.paths import matches, named_leaves
from collc.training.pushes import Given, check_counters, structure
from collc.training.servable import check_axes, check_params, check_stacked, patterns_of
from collc.training.step import schedule
from collc.training.strategies import Declared, Strategies, strategies


@dataclass(frozen=True)
class Server:
    """Made by ``collc.server``; hashable. What is constant about a server's state.

    ``follows``: whether the plan of the step that pulls and pushes counts, in place of the strategies'.
    """

    strategies: Strategies
    tx: optax.GradientTransformationExtraArgs
    consistency: Consistency = field(default_factory=Sync)
    follows: bool = False

    @property
    def plan(self) -> Plan:
        return self.strategies.plan

    def init(self, params: Any) -> "ServerState":
        """The state for these parameters, with the optimizer's own, where it belongs.

        ``params``: a pytree of arrays, the same on all ranks; ``Ranked`` nodes where each rank has its
        own. Raises StepError for parameters without a strategy, DataError for what has no gradient.
        """
        check_params(params)
        check_stacked(params, self.strategies)
        return jax.jit(schedule(self.plan)(self._init))(params)

    def _init(self, params: Any) -> "ServerState":
        declared = self.strategies.declared(params)
        leaves, tree = jax.tree.flatten(params)
        placed = [self._placed(x, leaf) for x, leaf in zip(leaves, declared, strict=True)]
        kept = jax.tree.unflatten(tree, placed)
        mine = Ranked([jnp.zeros_like(x) for x in leaves], self.plan.axes)
        return ServerState(kept, separable.init(self.tx, kept), self.consistency.start(mine), self)

    def _placed(self, x: Any, leaf: Declared) -> Any:
        if leaf.strategy.kind != "server":
            return x
        front = self.strategies.layers(leaf.path)
        cut = Shard(None, jnp.shape(x)[front:], self.plan.axes, leaf.strategy.servers)
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

        ``keys``: paths, or patterns of them; then only these, as a dict by path. Raises StepError for
        keys that name nothing.
        """
        nodes, tree = jax.tree.flatten(self.params, is_leaf=is_shard)
        strategies = self._here("pull")
        declared = strategies.declared(self.params)
        paths = [leaf.path for leaf in declared]
        wanted = _chosen(keys, paths) if keys else set(paths)
        of: dict[Plan, list[int]] = {}
        for i, leaf in enumerate(declared):
            if leaf.shard is not None and leaf.path in wanted:
                of.setdefault(leaf.strategy.plan or strategies.plan, []).append(i)
        for plan, here in of.items():
            for i, x in zip(here, parts.gather([nodes[i] for i in here], plan), strict=True):
                nodes[i] = x
        if not keys:
            return jax.tree.unflatten(tree, nodes)
        return {path: x for path, x in zip(paths, nodes, strict=True) if path in wanted}

    def push(
        self, grads: Any, *, tokens: Any = None, participates: Any = None, reduced: bool = False
    ) -> "ServerState":
        """The state after these gradients of this rank, reduced as declared. Inside a step.

        ``grads``: like the parameters; or a dict of some of them by path, and only these are updated.
        What the optimizer counts for all of them, such as Adam's steps or a schedule's, each push
        counts: two pushes of one half each are two steps to it, and no push of all.
        Gradients of ``state.params`` themselves, from ``collc.all_gather``, are reduced already.
        ``tokens``, ``participates``: as ``Strategies.reduce`` takes them. ``reduced``: all gradients
        are what ``value_and_grad`` or ``reduce`` of the strategies returned, and are only applied.
        Where a gradient is not finite on any rank, nothing is updated and ``skipped`` counts it.

        Raises StepError for other trees and shapes, for whole gradients that ``reduced`` says are at
        their servers, and for pushes that the consistency cannot delay.
        """
        strategies = self._here("push")
        given = Given(grads, self.params, {"tokens": tokens, "participates": participates}, reduced)
        given.check_tree()
        if given.by_path:
            check_counters(self.opt)
        if self.waiting is not None:
            given.check_delayed(self.server.consistency, strategies)
            return self._exchanged(*jax.tree.flatten(grads), strategies)
        given.check_counts(strategies)
        means = grads
        if not reduced:
            means = strategies.reduce(grads, tokens, participates, partial=given.by_path)
        return self._applied_to(means) if given.by_path else self._applied(means)

    def flush(self) -> "ServerState":
        """The state once all that waits has taken effect. Inside a step."""
        consistency, now, strategies = self.server.consistency, self, self._here("flush")
        if self.waiting is None:
            return self
        due, _, _ = consistency.exchange(self.waiting, None)
        nothing = Ranked(jax.tree.map(jnp.zeros_like, due.value), self.server.plan.axes)
        if consistency.late < 1:
            raise StepError(
                f"state.flush: something waits, but late of {consistency} says {consistency.late}. "
                "Let it say how many pushes wait."
            )
        for _ in range(consistency.late):
            now = now._exchanged(nothing.value, structure(self.params), strategies)
        return replace(now, waiting=consistency.start(nothing))

    def _exchanged(self, leaves: Sequence[Any], tree: Any, by: Strategies) -> "ServerState":
        """The state after the push that is due, while this one waits."""
        mine = Ranked(list(leaves), self.server.plan.axes)
        due, ready, waiting = self.server.consistency.exchange(self.waiting, mine)
        new = self._applied(by.reduce(jax.tree.unflatten(tree, due.value)))
        if ready is not None:
            old = self.params, self.opt
            kept = jax.tree.map(lambda a, b: jnp.where(ready, a, b), (new.params, new.opt), old)
            new = replace(new, params=kept[0], opt=kept[1])
        return replace(new, waiting=waiting)

    def _applied(self, means: Any) -> "ServerState":
        """The state after these means, each where its parameter lies."""
        updates, opt = separable.update(self.server.tx, means, self.opt, self.params)
        return replace(self, params=optax.apply_updates(self.params, updates), opt=opt)

    def _applied_to(self, means: Mapping[str, Any]) -> "ServerState":
        """The state after the means of some parameters by path; others, and what the optimizer keeps
        for them, stay as they are.
        """
        nodes, tree = jax.tree.flatten(self.params, is_leaf=is_shard)
        paths = [path for path, _ in named_leaves(self.params)]
        zeros = [jax.tree.map(jnp.zeros_like, x) for x in nodes]
        every = [means.get(path, zero) for path, zero in zip(paths, zeros, strict=True)]
        new = self._applied(jax.tree.unflatten(tree, every))
        places = owners(self.server.tx, self.params, self.opt)
        return replace(
            new,
            params=_where([path in means for path in paths], new.params, self.params),
            opt=_where([i is None or paths[i] in means for i in places], new.opt, self.opt),
        )

    def _here(self, what: str) -> Strategies:
        """What the step here pulls and pushes by. Raises StepError where it cannot be the step's."""
        server, plan = self.server, context.current()
        if not isinstance(plan, Plan) or plan.axes != server.plan.axes:
            axes = getattr(plan, "axes", None)
            found = f"a step over {' and '.join(axes)}" if axes else "no step"
            raise StepError(
                f"state.{what} runs inside a step over the server's axes, "
                f"{' and '.join(server.plan.axes)}, but here is {found}. Decorate it with "
                "@collc.schedule(plan, ...)."
            )
        if plan == server.plan:
            return server.strategies
        if plan.mesh != server.plan.mesh:
            raise StepError(
                f"state.{what}: the step is over another mesh than the server, {plan} and "
                f"{server.plan}. Decorate it with a plan for the server's mesh."
            )
        if not server.follows:
            raise StepError(
                f"state.{what}: the server's strategies say {server.plan}, but the step is decorated "
                f"with {plan}, which would have no effect. Decorate it with the strategies' plan; or "
                "make the server of a plan, collc.server(plan, tx): then that of the step counts."
            )
        own = tuple((name, replace(s, plan=plan)) for name, s in server.strategies.patterns)
        return replace(server.strategies, patterns=own, plan=plan)


def server(
    by: Plan | Strategies,
    tx: optax.GradientTransformation,
    servers: int | None = None,
    *,
    consistency: Consistency | None = None,
    stacked: str | Sequence[str] = (),
) -> Server:
    """A parameter server on the devices of a plan, each of them worker and server for its part.

    ``by``: a plan, by which all parameters are served, or that of the step if it is another one for the
    same mesh and axes; or strategies, by whose plan each is served, all-reduced or local. ``tx``: an
    optax transformation, which sees a rank's parts: norms are ``collc.clip_by_global_norm``'s, and masks
    and labels by path or size are computed before, of the whole parameters: ``mask=mask(params)``.
    ``servers=k``: the first k ranks hold the parts, as k servers do, 1 is a star; every device gives
    1/k of the memory, since all run one program. ``consistency``: ``collc.consistency.Sync()``, or
    ``Delayed(k)``, whose push overlaps the next k steps. ``stacked``: patterns of parameters whose
    dimension 0 is that of a loop's layers, which is not cut, so that the loop takes a layer's parts.

    Raises StepError for what is none of these, MeshError for a plan that leaves out axes of the mesh.
    """
    follows = isinstance(by, Plan)
    if isinstance(by, Plan):
        by = strategies({"*": strategy.server(by, servers=servers)})
    elif not isinstance(by, Strategies):
        raise StepError(f"collc.server takes a plan or strategies, not {by!r}.")
    elif servers is not None:
        raise StepError(
            "collc.server: servers= has no effect on strategies, each of which says so itself: "
            "strategy.server(plan, servers=...)."
        )
    check_axes(by)
    names = patterns_of(stacked)
    when = Sync() if consistency is None else consistency
    if isinstance(when, type) or not isinstance(when, Consistency):
        raise StepError(f"consistency= is Sync() or Delayed(1) of collc.consistency, not {when!r}.")
    return Server(replace(by, stacked=names), skip_nonfinite(tx), when, follows)


def _chosen(keys: Sequence[str], paths: Sequence[str]) -> set[str]:
    """The paths that keys name. Raises StepError for a key that names none."""
    for key in keys:
        if not isinstance(key, str):
            raise StepError(
                f"state.pull: {key!r} is no path. Give paths or patterns one by one, as in "
                f"state.pull({', '.join(map(repr, paths[:2]))})."
            )
        if not any(matches(key, path) for path in paths):
            raise StepError(f"state.pull: {key!r} names no parameter. {nearest(key, paths)}")
    return {path for path in paths if any(matches(key, path) for key in keys)}


def _where(chosen: Sequence[bool], new: Any, old: Any) -> Any:
    """The new leaves that are chosen, and the old others."""
    leaves, tree = jax.tree.flatten(new)
    pairs = zip(chosen, leaves, jax.tree.leaves(old), strict=True)
    return jax.tree.unflatten(tree, [a if yes else b for yes, a, b in pairs])
