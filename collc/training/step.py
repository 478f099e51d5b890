"""A train step written per device, made one of the whole mesh, and checked when it is traced."""

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

from collc.errors import StepError, nearest
from collc.lowering import context
from collc.planning.plan import Plan, check_plan
from collc.training.check.replication import check
from collc.training.kinds import Batch
from collc.training.layouts import Arguments, Axes, Leaf, is_constant, results, subsets
from collc.training.modules import Modules, is_module

Args = ParamSpec("Args")
Result = TypeVar("Result")


def schedule(
    plan: Plan = None,  # pyright: ignore[reportArgumentType] -- so that a missing one is explained
    *,
    batch: str | Sequence[str] | None = None,
) -> Callable[[Callable[Args, Result]], "Step[Args, Result]"]:
    """Decorates a step that is written per device, to run on the plan's mesh under ``jit``.

    ``batch``: the names of the arguments that are split on dimension 0 over the plan's axes. All
    others are replicated, but for ``collc.Ranked`` nodes. Results are replicated, but for
    ``Ranked`` and ``Batch`` nodes. Inside, ``collc.pmean`` and its siblings use the plan; axes that
    the plan does not name stay with XLA.

    Raises StepError when traced, with the path of the output and the line, if a result that is
    returned as replicated differs between ranks, or if what is the same already is summed again;
    DataError for a batch that does not divide.
    """
    check_plan(plan, "@collc.schedule")
    names = argument_names(() if batch is None else batch)

    def decorate(step: Callable[Args, Result]) -> Step[Args, Result]:
        if not callable(step):
            raise StepError(f"@collc.schedule(...) decorates a function, not {step!r}.")
        return Step(step, plan, names, named=batch is not None)

    return decorate


def argument_names(batch: Any) -> tuple[str, ...]:
    """What ``batch=`` names. Raises StepError."""
    names = (batch,) if isinstance(batch, str) else batch
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise StepError(f"batch= takes the name of an argument, or several, not {batch!r}")
    return tuple(names)


@dataclass
class _Traced:
    """What tracing the body found out, for use after it: the form of the results."""

    tree: Any = None
    leaves: list[Leaf] = field(default_factory=list)


class Step(Generic[Args, Result]):
    """A decorated step. Call it under ``jax.jit`` or ``nnx.jit``, with global arrays.

    ``named``: whether the user named the batch; where not, it may hold modules and constants.
    ``called``: what messages call parts of the result, by the beginning of their paths.
    """

    def __init__(
        self,
        function: Callable[Args, Result],
        plan: Plan,
        batch: Sequence[str],
        *,
        named: bool = True,
        called: Mapping[str, str] = types.MappingProxyType({}),
    ) -> None:
        functools.update_wrapper(self, function)
        self.function, self.plan, self.batch, self.named = function, plan, tuple(batch), named
        self.called = called
        self.signature = inspect.signature(function)
        self.notes: list[str] = []  # of the last trace
        # jit copies a function's attributes, not its class: step.explain() is to work there, too.
        self.__dict__["explain"] = self.explain
        known = self.signature.parameters
        for name in self.batch:
            if name not in known:
                raise StepError(
                    f"{self.name} has no argument {name!r} to be a batch. {nearest(name, known)}"
                )

    @property
    def name(self) -> str:
        """The function's name, which messages begin with."""
        return getattr(self.function, "__name__", "step")

    def __repr__(self) -> str:
        return f"<step {self.name} over {self.plan}>"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A decorated method is one of its object, as any function is."""
        return self if instance is None else functools.partial(self, instance)

    def explain(self) -> str:
        """The plan, and what was noted when the step was last traced."""
        return "\n".join([self.plan.explain(), *self.notes])

    def __call__(self, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        self._refuse_inside()
        bound = self.signature.bind(*args, **kwargs)
        modules = Modules(bound.arguments)
        plain = {k: v for k, v in bound.arguments.items() if k not in modules.objects}
        batches = self._batches(bound.arguments, modules)
        arguments = Arguments(self.name, self.plan, plain, modules, batches)
        body, traced = self._body(bound, modules, arguments)
        ranked = subsets(self.plan.axes)
        run = jax.shard_map(
            body,
            mesh=self.plan.mesh,
            in_specs=(tuple(leaf.spec for leaf in arguments.leaves),),
            out_specs=(P(), P(self.plan.axes), tuple(P(*axes) for axes in ranked)),
            axis_names=set(self.plan.axes),
            check_vma=False,
        )
        if len(self.plan.axes) < len(self.plan.mesh.axis_names):
            run = jax.jit(run, inline=True)  # outside jit, jax takes no partly manual shard_map
        replicated, batch, by_axes = run(tuple(arguments.resharded()))
        pools = {("ranked", axes): iter(pool) for axes, pool in zip(ranked, by_axes, strict=True)}
        pools |= {("replicated", ()): iter(replicated), ("batch", self.plan.axes): iter(batch)}
        flat = [next(pools[leaf.kind, leaf.axes]) for leaf in traced.leaves]
        result, state = jax.tree.unflatten(traced.tree, flat)
        modules.update(state)
        return _unwrapped(result, modules)

    def _batches(self, given: Mapping[str, Any], modules: Modules) -> list[str]:
        """The arguments of a call that are split; one that was left at None is not there."""
        found = []
        for name in self.batch:
            if name in modules.objects and self.named:
                raise StepError(
                    f"{self.name}: batch={name!r} names an nnx module, which is no batch: its "
                    "variables are replicated, or ranked (collc.ranked). Name arguments of arrays."
                )
            if name not in given or name in modules.objects:
                continue
            absent = given[name] is None and self.signature.parameters[name].default is None
            if not absent and (self.named or not is_constant(given[name])):
                found.append(name)
        return found

    def _refuse_inside(self) -> None:
        manual = jax.sharding.get_abstract_mesh().manual_axes
        taken = [axis for axis in self.plan.axes if axis in manual]
        if context.current() is not None or taken:
            decorated = context.current() is not None
            where = "a decorated step" if decorated else f"a shard_map over {' and '.join(taken)}"
            raise StepError(
                f"{self.name} is called inside {where}, but it splits its arguments over "
                f"{' and '.join(self.plan.axes)} itself. Call the function that it decorates; "
                "instead of collc.value_and_grad take jax.value_and_grad and collc.pmean there."
            )

    def _body(
        self, bound: inspect.BoundArguments, modules: Modules, arguments: Arguments
    ) -> tuple[Callable[..., Any], _Traced]:
        traced = _Traced()
        leaves, plan = arguments.leaves, self.plan
        sizes = {axis: n for axis, n in plan.sizes if axis in plan.axes}

        def user(*values: Any) -> list[Any]:
            plain, state = arguments.rebuild(values)
            merged = modules.merge(state)
            full: Any = bound.arguments | plain | merged
            call = inspect.BoundArguments(self.signature, full)
            result = _marked(self.function(*call.args, **call.kwargs), merged)
            flat, traced.tree = jax.tree.flatten((result, modules.after(merged)))
            of_state = [
                Leaf(path, "ranked" if axes else "replicated", axes, variable)
                for path, variable, axes in modules.leaves()
            ]
            traced.leaves = [*results(self.name, plan, result, self.called), *of_state]
            return flat

        def body(values: tuple[Any, ...]) -> Any:
            own = [
                v.reshape(v.shape[len(leaf.axes) :]) if leaf.kind == "ranked" else v
                for v, leaf in zip(values, leaves, strict=True)
            ]
            with context.using(plan):
                closed = jax.make_jaxpr(user)(*own)
            checked = check(closed, [frozenset(leaf.axes) for leaf in leaves], sizes)
            elided = checked.jaxpr is not closed
            if elided and not self.named and not any(leaf.axes for leaf in leaves):
                raise StepError(
                    f"{self.name} reduces what is the same on all ranks, and none of its arguments is "
                    f"a batch: all {plan.ranks} devices would compute all of it. Name what is to be "
                    'split, as in batch="batch"; or say batch=() if that is meant.'
                )
            self.notes[:] = checked.notes
            found = zip(traced.leaves, checked.varying, checked.chains, strict=True)
            for leaf, varying, chain in found:
                self._refuse(leaf, varying, chain)
            replicated: list[Any] = []
            batch: list[Any] = []
            by_axes: dict[Axes, list[Any]] = {axes: [] for axes in subsets(plan.axes)}
            outs = jaxpr_as_fun(checked.jaxpr)(*own)
            for leaf, y in zip(traced.leaves, outs, strict=True):
                if leaf.kind == "ranked":
                    by_axes[leaf.axes].append(y.reshape((1,) * len(leaf.axes) + y.shape))
                else:
                    (batch if leaf.kind == "batch" else replicated).append(y)
            return replicated, batch, tuple(by_axes.values())

        return body, traced

    def _refuse(self, leaf: Leaf, varying: frozenset[str], chain: Sequence[str]) -> None:
        extra = [a for a in self.plan.axes if a in varying - set(leaf.axes)]
        if not extra:
            return
        over = " and ".join(extra)
        seen = "".join(f"\n  {line}" for line in dict.fromkeys(chain))
        if leaf.kind != "replicated":
            remedy = f"It is ranked over {' and '.join(leaf.axes)} only: reduce it over {over}."
        elif leaf.variable:
            remedy = self._remedy(leaf)
        else:
            remedy = (
                "Reduce it, as in collc.pmean(...), before you return it or use it in the state; or "
                "return it as collc.Batch(...) if it is per example, collc.Ranked(...) if each rank "
                "has its own."
            )
        raise StepError(
            f"{self.name}: {leaf.path} is returned as {leaf.kind}, but it differs between the ranks "
            f"of {over}.{seen}\n{remedy}"
        )

    def _remedy(self, leaf: Leaf) -> str:
        """What to do about a variable that differs. Weights of their own would only drift apart."""
        if leaf.variable.endswith("Param") or leaf.variable.startswith("nnx.Opt"):
            return "Reduce the gradients: collc.pmean(grads)."
        module = leaf.path.partition(".")[0].partition("[")[0]
        reduce = "Reduce what it is computed from"
        if leaf.variable == "nnx.BatchStat":
            first, *more = self.plan.axes
            axes = self.plan.axes if more else first
            reduce += f" (give nnx.BatchNorm axis_name={axes!r})"
        return (
            f"{reduce}; or, if each rank has its own, say so before the step: "
            f"collc.ranked({module}, plan, of={leaf.variable})."
        )


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
    def stands(x: Any) -> bool:
        return isinstance(x, Batch | _Itself)

    def unwrap(x: Any) -> Any:
        if isinstance(x, Batch):
            return x.value
        return modules.objects[x.name] if isinstance(x, _Itself) else x

    return jax.tree.map(unwrap, result, is_leaf=stands)
