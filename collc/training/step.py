"""A train step written per device, made one of the whole mesh, and checked when it is traced."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

from collc.errors import DataError, StepError, nearest
from collc.lowering import context
from collc.planning.plan import Plan
from collc.training.check import check
from collc.training.kinds import Batch, Ranked
from collc.training.modules import Modules, is_module

Args = ParamSpec("Args")
Result = TypeVar("Result")
Axes = tuple[str, ...]


def schedule(
    plan: Plan, *, batch: str | Sequence[str] = ()
) -> Callable[[Callable[Args, Result]], "Step[Args, Result]"]:
    """Decorates a step that is written per device, to run on the plan's mesh under ``jit``.

    ``batch``: the names of the arguments that are split on dimension 0 over the plan's axes. All
    others are replicated, but for ``collc.Ranked`` nodes. Results are replicated, but for
    ``Ranked`` and ``Batch`` nodes. Inside, ``collc.pmean`` and its siblings use the plan; axes that
    the plan does not name stay with XLA.

    Raises StepError when traced, with the path of the output and the line, if a result that is
    returned as replicated differs between ranks, or if what is the same already is summed again.
    """
    if not isinstance(plan, Plan):
        raise StepError(f"@collc.schedule takes a plan, not {plan!r}. See collc.plan.")
    names = (batch,) if isinstance(batch, str) else tuple(batch)

    def decorate(step: Callable[Args, Result]) -> Step[Args, Result]:
        return Step(step, plan, names)

    return decorate


@dataclass(frozen=True)
class _Leaf:
    """A leaf of the arguments: where it came from and how it is laid out over the plan's axes."""

    path: str
    kind: str  # "replicated", "batch" or "ranked"
    axes: Axes  # those over which it differs

    @property
    def spec(self) -> P:
        if self.kind == "ranked":
            return P(*self.axes)
        return P(self.axes) if self.axes else P()


@dataclass
class _Traced:
    """What tracing the body found out, for use after it: the form of the results."""

    tree: Any = None
    leaves: list[_Leaf] = field(default_factory=list)
    modules: Any = None


class Step(Generic[Args, Result]):
    """A decorated step. Call it under ``jax.jit`` or ``nnx.jit``, with global arrays."""

    def __init__(self, function: Callable[Args, Result], plan: Plan, batch: Sequence[str]) -> None:
        functools.update_wrapper(self, function)
        self.function, self.plan, self.batch = function, plan, tuple(batch)
        self.signature = inspect.signature(function)
        self.notes: tuple[str, ...] = ()
        known = self.signature.parameters
        for name in self.batch:
            if name not in known:
                raise StepError(
                    f"{self.name} has no argument {name!r} to be a batch. {nearest(name, known)}"
                )

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", "step")

    def explain(self) -> str:
        """The plan, and what was noted when the step was last traced."""
        return "\n".join([self.plan.explain(), *self.notes])

    def __call__(self, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        bound = self.signature.bind(*args, **kwargs)
        modules = Modules(bound.arguments)
        plain = {k: v for k, v in bound.arguments.items() if k not in modules.objects}
        values, leaves, rebuild = self._leaves(plain, modules)
        body, traced = self._body(bound, modules, values, leaves, rebuild)
        ranked = _subsets(self.plan.axes)
        run = jax.shard_map(
            body,
            mesh=self.plan.mesh,
            in_specs=(tuple(leaf.spec for leaf in leaves),),
            out_specs=(P(), P(self.plan.axes), tuple(P(*axes) for axes in ranked)),
            axis_names=set(self.plan.axes),
            check_vma=False,
        )
        replicated, batch, by_axes = run(tuple(self._resharded(values, leaves)))
        pools: dict[tuple[str, Axes], list[Any]] = {("replicated", ()): list(replicated)}
        pools["batch", self.plan.axes] = list(batch)
        for axes, pool in zip(ranked, by_axes, strict=True):
            pools["ranked", axes] = list(pool)
        results = [pools[leaf.kind, leaf.axes].pop(0) for leaf in traced.leaves]
        result, state = jax.tree.unflatten(traced.tree, results)
        modules.update(state)
        return _unwrapped(result, modules)

    def _leaves(
        self, plain: dict[str, Any], modules: Modules
    ) -> tuple[list[Any], list[_Leaf], Any]:
        """The arrays among the arguments, their layouts, and the way back from arrays."""
        is_ranked = lambda x: isinstance(x, Ranked)  # noqa: E731
        flat, tree = jax.tree.flatten(plain)
        layouts: list[_Leaf] = []
        for name, value in plain.items():
            for path, node in jax.tree_util.tree_flatten_with_path(value, is_leaf=is_ranked)[0]:
                own = f"{name}{jax.tree_util.keystr(path)}"
                ranked = isinstance(node, Ranked)
                for leaf in jax.tree.leaves(node):
                    if ranked:
                        layouts.append(self._ranked(own, leaf, node.axes))
                    elif name in self.batch:
                        layouts.append(self._split(own, leaf))
                    else:
                        layouts.append(_Leaf(own, "replicated", ()))
        state, state_tree = jax.tree.flatten(modules.state)
        paths = jax.tree_util.tree_flatten_with_path(modules.state)[0]
        for (path, leaf), axes in zip(paths, modules.axes(), strict=True):
            own = jax.tree_util.keystr(path)
            layouts.append(self._ranked(own, leaf, axes) if axes else _Leaf(own, "replicated", ()))
        # What is no array is a constant of the program, such as a flag or a name.
        everything = [*flat, *state]
        arrays = [isinstance(x, jax.Array | np.ndarray | np.generic) for x in everything]
        constants = [None if a else x for a, x in zip(arrays, everything, strict=True)]
        count = len(flat)

        def rebuild(values: Sequence[Any]) -> tuple[dict[str, Any], Any]:
            it = iter(values)
            full = [next(it) if a else c for a, c in zip(arrays, constants, strict=True)]
            return (
                jax.tree.unflatten(tree, full[:count]),
                jax.tree.unflatten(state_tree, full[count:]),
            )

        chosen = [i for i, a in enumerate(arrays) if a]
        return [everything[i] for i in chosen], [layouts[i] for i in chosen], rebuild

    def _split(self, path: str, leaf: Any) -> _Leaf:
        shape, ranks = np.shape(leaf), self.plan.ranks
        if not shape or shape[0] % ranks:
            size = f"its dimension 0 is {shape[0]}" if shape else "it is a scalar"
            raise DataError(
                f"{self.name}: {path} has shape {shape}: as a batch it is split on dimension 0 over "
                f"{ranks} devices ({' x '.join(self.plan.axes)}), but {size}. "
                + (
                    f"Make it a multiple of {ranks}, or do not name it in batch=."
                    if shape
                    else "Pass it as an argument that is not named in batch=."
                )
            )
        return _Leaf(path, "batch", self.plan.axes)

    def _ranked(self, path: str, leaf: Any, axes: Axes) -> _Leaf:
        sizes = tuple(dict(self.plan.sizes).get(a, 0) for a in axes)
        if axes not in _subsets(self.plan.axes) or np.shape(leaf)[: len(axes)] != sizes:
            raise DataError(
                f"{self.name}: {path} is ranked over {axes}, so its shape has to begin with {sizes}, "
                f"the sizes of axes of the plan; it is {np.shape(leaf)}. Make it with collc.ranked."
            )
        return _Leaf(path, "ranked", axes)

    def _resharded(self, values: list[Any], leaves: list[_Leaf]) -> list[Any]:
        """On an Explicit mesh arrays have their sharding in their type: brought to the step's."""
        mesh = self.plan.mesh
        explicit = set(getattr(mesh, "explicit_axes", ())) & set(self.plan.axes)
        if not explicit:
            return values
        return [
            _reshard(jnp.asarray(v), leaf, self.plan)
            for v, leaf in zip(values, leaves, strict=True)
        ]

    def _body(
        self,
        bound: inspect.BoundArguments,
        modules: Modules,
        values: list[Any],
        leaves: list[_Leaf],
        rebuild: Callable[[Sequence[Any]], tuple[dict[str, Any], Any]],
    ) -> tuple[Callable[..., Any], _Traced]:
        traced = _Traced()
        plan, ranked = self.plan, _subsets(self.plan.axes)

        def user(*values: Any) -> list[Any]:
            plain, state = rebuild(values)
            merged = modules.merge(state)
            call = inspect.BoundArguments(self.signature, bound.arguments | plain | merged)  # type: ignore[arg-type]
            result = self.function(*call.args, **call.kwargs)
            result = _marked(result, merged)
            out = (result, modules.after(merged))
            flat, traced.tree = jax.tree.flatten(out)
            traced.leaves = self._results(out, modules)
            return flat

        def body(values: tuple[Any, ...]) -> Any:
            own = [
                v.reshape(v.shape[len(leaf.axes) :]) if leaf.kind == "ranked" else v
                for v, leaf in zip(values, leaves, strict=True)
            ]
            with context.using(plan):
                closed = jax.make_jaxpr(user)(*own)
            sizes = dict(plan.sizes)
            checked = check(
                closed, [frozenset(leaf.axes) for leaf in leaves], {a: sizes[a] for a in plan.axes}
            )
            self.notes = checked.notes
            for leaf, varying, chain in zip(
                traced.leaves, checked.varying, checked.chains, strict=True
            ):
                self._refuse(leaf, varying, chain)
            outs = jaxpr_as_fun(checked.jaxpr)(*own)
            replicated: list[Any] = []
            batch: list[Any] = []
            by_axes: dict[Axes, list[Any]] = {axes: [] for axes in ranked}
            for leaf, y in zip(traced.leaves, outs, strict=True):
                if leaf.kind == "ranked":
                    by_axes[leaf.axes].append(y.reshape((1,) * len(leaf.axes) + y.shape))
                elif leaf.kind == "batch":
                    batch.append(y)
                else:
                    replicated.append(y)
            return replicated, batch, tuple(by_axes[axes] for axes in ranked)

        return body, traced

    def _results(self, out: Any, modules: Modules) -> list[_Leaf]:
        """The layouts of the results, in the order of their leaves."""
        result, state = out
        marks = lambda x: isinstance(x, Ranked | Batch)  # noqa: E731
        found: list[_Leaf] = []
        for path, node in jax.tree_util.tree_flatten_with_path(result, is_leaf=marks)[0]:
            own = f"result{jax.tree_util.keystr(path)}"
            for leaf in jax.tree.leaves(node):
                match node:
                    case Ranked(axes=axes):
                        if axes not in _subsets(self.plan.axes):
                            raise StepError(
                                f"{self.name}: {own} is ranked over {axes}, which are not axes of the "
                                f"plan in mesh order ({', '.join(self.plan.axes)})."
                            )
                        found.append(_Leaf(own, "ranked", axes))
                    case Batch():
                        if not np.shape(leaf):
                            raise StepError(
                                f"{self.name}: {own} is marked as a batch, but it is a scalar. "
                                "Reduce it with collc.pmean instead."
                            )
                        found.append(_Leaf(own, "batch", self.plan.axes))
                    case _:
                        found.append(_Leaf(own, "replicated", ()))
        paths = jax.tree_util.tree_flatten_with_path(state)[0]
        for (path, _), axes in zip(paths, modules.axes(), strict=True):
            own = jax.tree_util.keystr(path)
            found.append(_Leaf(own, "ranked", axes) if axes else _Leaf(own, "replicated", ()))
        return found

    def _refuse(self, leaf: _Leaf, varying: frozenset[str], chain: Sequence[str]) -> None:
        extra = [a for a in self.plan.axes if a in varying - set(leaf.axes)]
        if not extra:
            return
        over = " and ".join(extra)
        seen = "".join(f"\n  {line}" for line in dict.fromkeys(chain))
        remedy = (
            "Reduce it, as in collc.pmean(...), before you return it or use it in the state; or "
            "return it as collc.Batch(...) if it is per example, collc.Ranked(...) if each rank has "
            "its own."
            if leaf.kind == "replicated"
            else f"Its ranks are those of {leaf.axes} only: reduce it over {over}."
        )
        raise StepError(
            f"{self.name}: {leaf.path} is returned as {leaf.kind}, but it differs between the ranks "
            f"of {over}.{seen}\n{remedy}"
        )


def _subsets(axes: Axes) -> list[Axes]:
    """All subsets of the axes, in their order."""
    found: list[Axes] = [()]
    for axis in axes:
        found += [(*some, axis) for some in found]
    return found


def _reshard(x: Any, leaf: _Leaf, plan: Plan) -> Any:
    """The array with the plan's axes where the step wants them, and other axes where they are."""
    typed = list(jax.typeof(x).sharding.spec)
    typed += [None] * (x.ndim - len(typed))
    rest = []
    for entry in typed:
        names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        rest.append(tuple(a for a in names if a not in plan.axes))
    for d, entry in enumerate(leaf.spec):
        names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        rest[d] = (*names, *rest[d])
    spec = P(*(names[0] if len(names) == 1 else names or None for names in rest))
    mesh = plan.mesh
    return jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, spec))


class _Itself:
    """Stands for a module of the arguments among the results."""

    def __init__(self, name: str) -> None:
        self.name = name


jax.tree_util.register_pytree_node(_Itself, lambda x: ((), x.name), lambda name, _: _Itself(name))


def _marked(result: Any, merged: dict[str, Any]) -> Any:
    def mark(x: Any) -> Any:
        if not is_module(x):
            return x
        for name, module in merged.items():
            if x is module:
                return _Itself(name)
        raise StepError(
            f"the step returns a {type(x).__name__} that is none of its arguments. Change the "
            "arguments in place, or return arrays (nnx.state)."
        )

    return jax.tree.map(mark, result, is_leaf=is_module)


def _unwrapped(result: Any, modules: Modules) -> Any:
    stands = lambda x: isinstance(x, Batch | _Itself)  # noqa: E731

    def unwrap(x: Any) -> Any:
        if isinstance(x, Batch):
            return x.value
        return modules.objects[x.name] if isinstance(x, _Itself) else x

    return jax.tree.map(unwrap, result, is_leaf=stands)
