"""The rules of the replication check for collectives: jax's own, and collc's one primitive."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax

from collc.errors import StepError
from collc.lowering import sync
from collc.lowering.primitive import OURS
from collc.training.check.values import (
    Value,
    Where,
    constant,
    holds_jaxpr,
    is_cotangent,
    scalar_of,
    union,
)

# After a collective all ranks hold the same, or each its own part, or what another one had.
SAME, DIFFERS, PERMUTES = "same", "differs", "permutes"

# By the name that jax binds: public function, parameter with the axes, operation, effect.
_LAX = {
    "psum": ("psum", "axes", "sum", SAME),
    "psum_invariant": ("psum", "axes", "sum", SAME),  # psum under check_vma=True
    "pmax": ("pmax", "axes", "max", SAME),
    "pmin": ("pmin", "axes", "min", SAME),
    "all_gather": ("all_gather", "axis_name", None, SAME),
    "all_gather_invariant": ("all_gather", "axis_name", None, SAME),
    "pbroadcast": ("pbroadcast", "axis_name", None, SAME),
    "reduce_scatter": ("psum_scatter", "axis_name", "sum", DIFFERS),
    "all_to_all": ("all_to_all", "axis_name", None, DIFFERS),
    "ragged_all_to_all": ("ragged_all_to_all", "axis_name", None, DIFFERS),
    "ppermute": ("ppermute", "axis_name", None, PERMUTES),  # pshuffle too
}
_KINDS = {
    "all_reduce": (True, SAME),
    "reduce_scatter": (True, DIFFERS),
    "reduce": (True, DIFFERS),
    "all_gather": (False, SAME),
    "broadcast": (False, SAME),
    "all_to_all": (False, DIFFERS),
    "gather": (False, DIFFERS),
    "scatter": (False, DIFFERS),
}
_PUBLIC = {
    ("all_reduce", "sum"): "psum",
    ("all_reduce", "mean"): "pmean",
    ("all_reduce", "max"): "pmax",
    ("all_reduce", "min"): "pmin",
    ("reduce_scatter", "sum"): "psum_scatter",
    ("broadcast", "sum"): "pbroadcast",
}

# Their jaxprs combine two scalars (add, max): no more than a word for the operation.
_COMBINE = frozenset(
    "reduce reduce_window select_and_scatter scatter scatter-add scatter_add scatter-sub "
    "scatter_sub scatter-mul scatter_mul scatter-min scatter_min scatter-max scatter_max".split()
)
_REFS = frozenset({"new_ref", "get", "swap", "addupdate", "run_state", "ref_get", "ref_set"})
_UNKNOWN_CALL = "calls a function in a way that the replication check does not know"

# From the key in the first operands (so many of them) these draw random bits.
DRAWS = {"random_bits": 1, "random_gamma": 1, "rng_bit_generator": 1, "threefry2x32": 2}


class Context(NamedTuple):
    """What surrounds an equation: the call that it is in, the predicates that lead to it."""

    outer: Where | None = None
    cotangent: bool = False
    predicate: Value = Value(constant=True)
    control: Where | None = None  # the cond or while of that predicate


class Scope:
    """The variables of one jaxpr: their uses and definitions, found when first asked for, what is
    known of them so far, and what stands for those that were elided.
    """

    def __init__(self, jaxpr: Any):
        self.jaxpr = jaxpr
        self.known: dict[Any, Value] = {}
        self.instead: dict[Any, Any] = {}

    def value(self, atom: Any) -> Value:
        return constant(atom.val) if hasattr(atom, "val") else self.known.get(atom, Value())

    def renamed(self, atoms: Sequence[Any]) -> list[Any]:
        return [a if hasattr(a, "val") else self.instead.get(a, a) for a in atoms]

    @cached_property
    def uses(self) -> dict[Any, list[Any]]:
        uses = defaultdict(list)
        for eqn in self.jaxpr.eqns:
            for var in {v for v in eqn.invars if not hasattr(v, "val")}:
                uses[var].append(eqn)
        for var in (v for v in self.jaxpr.outvars if not hasattr(v, "val")):
            uses[var].append(None)  # leaves the jaxpr
        return uses

    @cached_property
    def definitions(self) -> dict[Any, Any]:
        return {var: eqn for eqn in self.jaxpr.eqns for var in eqn.outvars}

    def scalar(self, atom: Any) -> Any:
        """The number that an atom is known to be, else None."""
        if hasattr(atom, "val"):
            return scalar_of(atom.val)
        eqn = self.definitions.get(atom)
        return self.scalar(eqn.invars[0]) if eqn and eqn.primitive.name in _CASTS else None

    def only_divided(self, var: Any, n: int) -> bool:
        """Whether nothing but var / n is ever used: what lax.pmean binds after its psum."""
        return all(self._divides(eqn, var, n) for eqn in self.uses[var])

    def _divides(self, eqn: Any, var: Any, n: int) -> bool:
        name = eqn.primitive.name if eqn else ""
        if name in _CASTS:
            return self.only_divided(eqn.outvars[0], n)
        if name == "div" and eqn.invars[0] is var:
            return self.scalar(eqn.invars[1]) == n
        if name == "mul":
            others = [self.scalar(v) for v in eqn.invars if v is not var]
            factor = others[0] if len(others) == 1 else None
            return factor is not None and math.isclose(factor * n, 1, rel_tol=1e-6)
        return False


_CASTS = frozenset({"convert_element_type", "broadcast_in_dim", "reshape", "pvary", "copy"})


@dataclass(frozen=True)
class Collective:
    """One equation that communicates. groups: axis_index_groups were given."""

    name: str
    axes: tuple[str, ...]  # those that are manual in the step
    all_axes: tuple[Any, ...]  # also axes of an inner vmap, as jax gives them: numbers
    axes_param: str
    op: str | None
    effect: str
    groups: Any = None

    def size(self, sizes: dict[str, int], shape: Sequence[int]) -> int:
        """How many operands meet; shape: of one of them, as axes of a vmap are dimensions."""
        if self.groups:
            return len(self.groups[0])
        by_name = (sizes.get(a, 0) for a in self.all_axes if not isinstance(a, int))
        return math.prod(by_name) * math.prod(shape[a] for a in self.all_axes if isinstance(a, int))


def named_axes(param: Any) -> tuple[Any, ...]:
    """The axes in a parameter: a name, or several."""
    return tuple(param) if isinstance(param, tuple | list | frozenset | set) else (param,)


def collective(eqn: Any, sizes: dict[str, int]) -> Collective | None:
    """What an equation communicates, None if it does not."""
    name, params = eqn.primitive.name, eqn.params
    if name == OURS:
        kind, op = params["kind"], params["op"]
        if kind not in _KINDS:
            raise StepError(f"{OURS} of kind {kind!r} is not known to the replication check")
        reduces, effect = _KINDS[kind]
        public = f"collc.{_PUBLIC.get((kind, op), kind)}"
        axes = named_axes(params["axes"])
        inside = tuple(a for a in axes if a in sizes)
        return Collective(public, inside, axes, "axes", op if reduces else None, effect)
    if name not in _LAX:
        return None
    public, param, op, effect = _LAX[name]
    axes = named_axes(params[param])
    inside = tuple(a for a in axes if a in sizes)
    groups = params.get("axis_index_groups")
    return Collective(f"lax.{public}", inside, axes, param, op, effect, groups)


def ranks_of(axes: Iterable[str]) -> str:
    """How messages name axes.

    >>> ranks_of(["host", "gpu"])
    'host and gpu'
    """
    return " and ".join(axes)


def check_sum(
    what: Collective,
    eqn: Any,
    index: int,
    value: Value,
    where: Where,
    context: Context,
    scope: Scope,
    sizes: dict[str, int],
) -> str | None:
    """Refuses a sum of what is already the same; returns a note where it is a mean in truth."""
    same = [a for a in what.axes if a not in value.axes]
    if not same or value.zero or what.op not in ("sum", "mean"):
        return None
    shape = eqn.invars[index].aval.shape
    axes, times = ranks_of(same), math.prod(sizes[a] for a in same)
    if what.op == "mean" and is_sync(eqn):  # a gradient that does not depend on the batch
        return None
    if is_cotangent(eqn, context.cotangent):
        raise StepError(
            f"{where}: loss reduced inside grad. The derivative of {what.name} reduces a cotangent "
            f"that is the same on all ranks of {axes}: gradients can come out {times} times too "
            "large. Differentiate the local loss, reduce after: pmean gradients and loss outside "
            "of grad."
        )
    if what.op == "mean" or value.constant:
        return None
    if what.effect == SAME:
        var = eqn.outvars[index]
        if not scope.uses[var]:  # never used: what differentiation leaves behind
            return None
        if scope.only_divided(var, what.size(sizes, shape)):
            return f"mean over {axes} of what is already the same there: right, but not free"
    times = what.size(sizes, shape) if what.groups else times
    raise StepError(
        f"{where}: {what.name} sums over {ranks_of(what.axes)}, but its operand is already the "
        f"same on all ranks of {axes}: the sum multiplies it by {times}. Drop the second "
        "reduction, or use pmean."
    )


def is_sync(eqn: Any) -> bool:
    """Whether an equation is the reduction of a ``collc.sync``."""
    return any(entry.name == sync.SCOPE for entry in eqn.source_info.name_stack.stack)


def check_hang(what: Collective, where: Where, context: Context) -> None:
    """Refuses a collective that some of its ranks may never reach.

    A grouped collective of XLA waits for its own group, a permute (and so every schedule) for all
    devices, whoever sends to whom: tried on CPU, where it never ends.
    """
    permutes = what.effect == PERMUTES or what.name.startswith("collc.")
    split = sorted(a for a in context.predicate.axes if permutes or a in what.axes)
    if not split:
        return
    control = context.control
    name = control.eqn.primitive.name if control else "cond"
    at = f" at {control.line()}" if control and control.line() else ""
    raise StepError(
        f"{where}: {what.name} over {ranks_of(what.axes)} stands inside a {name}{at} whose "
        f"predicate differs between the ranks of {ranks_of(split)} (since "
        f"{context.predicate.chain()[0]}): ranks would wait for each other for ever. Reduce the "
        f"predicate first (pmax of it), or move the collective out of the {name}, for example "
        "with jnp.where."
    )


def result(what: Collective, eqn: Any, value: Value, where: Where, sizes: dict[str, int]) -> Value:
    """What one operand becomes."""
    axes = frozenset(what.axes)
    if what.effect == SAME:
        after = value.axes if what.groups else value.axes - axes
    elif what.effect == PERMUTES and not value.axes & axes:
        reached = {target for _, target in eqn.params["perm"]}
        # Who receives nothing gets zeros, unlike the others.
        everyone = what.size(sizes, eqn.invars[0].aval.shape)
        after = value.axes if len(reached) == everyone else value.axes | axes
    else:
        after = value.axes | axes
    plain = union([value], where)
    return plain.over(after, where)


def elide(what: Collective, eqn: Any, values: Sequence[Value]) -> tuple[list[Any], dict[Any, Any]]:
    """The equations that remain, and what stands for the results of the others.

    The mean, maximum or minimum of what is the same everywhere is itself:

        b c = collc_collective[op=mean] a x   -->   c = collc_collective[op=mean] x, and a for b
        b = pmax[axes=(host, gpu)] a          -->   b = pmax[axes=(gpu,)] a, as a varies over gpu
    """
    only_ours = len(what.axes) == len(what.all_axes)
    if what.op not in ("mean", "max", "min") or what.effect != SAME or not only_ours:
        return [eqn], {}
    axes = frozenset(what.axes)
    instead, kept = {}, []
    for i, (value, operand, out) in enumerate(zip(values, eqn.invars, eqn.outvars)):
        if value.axes & axes or not _same_type(operand.aval, out.aval):
            kept.append(i)
        else:
            instead[out] = operand
    if not kept:
        return [], instead
    changes: dict[str, Any] = {}
    if instead:
        changes["invars"] = [eqn.invars[i] for i in kept]
        changes["outvars"] = [eqn.outvars[i] for i in kept]
    varying = frozenset().union(*(values[i].axes for i in kept))
    remaining = tuple(a for a in what.all_axes if a in varying)
    if eqn.primitive.name in _LAX and not what.groups and 0 < len(remaining) < len(what.axes):
        changes["params"] = eqn.params | {what.axes_param: remaining}
    return [eqn.replace(**changes) if changes else eqn], instead


def _same_type(a: Any, b: Any) -> bool:
    """Where a mean changes the type (of integers), or its weakness, the equation has to stay."""
    weak = getattr(a, "weak_type", False), getattr(b, "weak_type", False)
    return a.shape == b.shape and a.dtype == b.dtype and weak[0] == weak[1]


def unknown_axes(eqn: Any, sizes: dict[str, int]) -> Iterator[str]:
    """The manual axes that an equation without a rule mentions."""
    for key, param in eqn.params.items():
        if "axis" in key or "axes" in key:
            yield from (a for a in named_axes(param) if isinstance(a, str) and a in sizes)
    for effect in eqn.effects:
        if type(effect).__name__ == "NamedAxisEffect" and effect.name in sizes:
            yield effect.name


# -- what is not known ----------------------------------------------------------------------------


def refusal(
    where: Where, found: str, remedy: str = "Move it out of the step, or report it to collc"
) -> StepError:
    """The error for what the check does not follow."""
    return StepError(f"{where}: {found}. {remedy}.")


def refuse_references(eqn: Any, where: Where) -> None:
    """Refuses mutable references: what one equation writes, another reads."""
    name, kinds = eqn.primitive.name, {type(v.aval).__name__ for v in eqn.invars}
    if name in _REFS or "AbstractRef" in kinds:
        found = f"{name!r} uses a mutable reference, which the replication check cannot follow"
        raise refusal(where, found, "Use plain values in the step (jax.lax.scan, x.at[i].set)")


def refuse_unknown(eqn: Any, where: Where, sizes: dict[str, int]) -> None:
    """Refuses an equation without a rule that calls a function, or that communicates."""
    name = eqn.primitive.name
    higher = any(holds_jaxpr(p) for p in eqn.params.values()) and name not in _COMBINE
    if higher or name.startswith("call_hi_primitive"):
        raise refusal(where, f"{name!r} {_UNKNOWN_CALL}")
    axes = ranks_of(sorted(set(unknown_axes(eqn, sizes))))
    if axes:
        found = f"{name!r} works over {axes} in a way that the replication check does not know"
        remedy = f"Use one of {', '.join(dict.fromkeys(_PUBLIC.values()))}, all_gather, all_to_all"
        raise refusal(where, found, remedy)


def expand(hidden: Any, eqn: Any, where: Where) -> Any:
    """The jaxpr of a primitive that jax.experimental.hijax defines, such as jnp.searchsorted's."""

    def flat(*args):
        return hidden.expand(*jax.tree.unflatten(hidden.in_tree, args))

    try:
        args = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    except AttributeError:  # a type of its own, not an array
        raise refusal(where, f"{type(hidden).__name__!r} {_UNKNOWN_CALL}") from None
    return jax.make_jaxpr(flat)(*args)
