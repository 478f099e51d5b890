"""The rules of the replication check for collectives: jax's own, and collc's one primitive."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from collc.errors import StepError
from collc.lowering import sync
from collc.lowering.primitive import OURS
from collc.training.check.scope import Scope
from collc.training.check.values import (
    Value,
    Where,
    is_cotangent,
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
PUBLIC = {
    ("all_reduce", "sum"): "psum",
    ("all_reduce", "mean"): "pmean",
    ("all_reduce", "max"): "pmax",
    ("all_reduce", "min"): "pmin",
    ("reduce_scatter", "sum"): "psum_scatter",
    ("broadcast", "sum"): "pbroadcast",
}

# From the key in the first operands (so many of them) these draw random bits.
DRAWS = {"random_bits": 1, "random_gamma": 1, "rng_bit_generator": 1, "threefry2x32": 2}


class Context(NamedTuple):
    """What surrounds an equation: the call that it is in, the predicates that lead to it."""

    outer: Where | None = None
    cotangent: bool = False
    predicate: Value = Value(constant=True)
    control: Where | None = None  # the cond or while of that predicate


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
        public = f"collc.{PUBLIC.get((kind, op), kind)}"
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
    """Refuses a sum of what is already the same, and what is reduced twice before it is scattered;
    returns a note where a sum is a mean in truth, or a mean one of sums.
    """
    same = [a for a in what.axes if a not in value.axes]
    if not (same or value.summed) or value.zero or what.op not in ("sum", "mean"):
        return None
    shape = eqn.invars[index].aval.shape
    axes, times = " and ".join(same), math.prod(sizes[a] for a in same)
    if what.op == "mean" and is_sync(eqn):  # a gradient that does not depend on the batch
        return None
    if same and is_cotangent(eqn, context.cotangent):
        raise StepError(
            f"{where}: loss reduced inside grad. The derivative of {what.name} reduces a cotangent "
            f"that is the same on all ranks of {axes}: gradients can come out {times} times too "
            "large. Differentiate the local loss, reduce after: pmean gradients and loss outside "
            "of grad."
        )
    if what.op == "mean":
        return _check_mean(what, value, same, where, sizes)
    if not same or value.constant:
        return None
    if what.effect == SAME:
        var = eqn.outvars[index]
        if not scope.uses[var]:  # never used: what differentiation leaves behind
            return None
        if scope.only_divided(var, what.size(sizes, shape)):
            return f"mean over {axes} of what is already the same there: right, but not free"
    times = what.size(sizes, shape) if what.groups else times
    raise StepError(
        f"{where}: {what.name} sums over {' and '.join(what.axes)}, but its operand is already the "
        f"same on all ranks of {axes}: the sum multiplies it by {times}. Drop the second "
        "reduction, or use pmean."
    )


def _check_mean(
    what: Collective, value: Value, same: Sequence[str], where: Where, sizes: dict[str, int]
) -> str | None:
    """Refuses gradients that have been reduced before they are scattered; notes a mean of sums."""
    again = frozenset(what.axes) & (value.summed | value.reduced.intersection(same))
    over = " and ".join(what.axes)
    if what.effect == DIFFERS and again:
        before = " and ".join(a for a in what.axes if a in again)
        raise StepError(
            f"{where}: {what.name} takes the mean over {over} of what has been reduced over {before} "
            "before: it reduces twice. state.push and Strategies.reduce take this rank's gradients. "
            "Drop the first reduction."
        )
    said = said_of_sums([value], same, sizes)
    elided = not value.axes.intersection(what.axes)  # and noted then
    return f"mean over {over} of what is{said}" if said and not elided else None


def said_of_sums(values: Sequence[Value], axes: Iterable[str], sizes: dict[str, int]) -> str:
    """What a mean over some axes makes of sums over them; "" where there are none."""
    over = [a for a in axes if any(a in v.summed for v in values)]
    times = math.prod(sizes[a] for a in over)
    return f" a sum over {' and '.join(over)}, {times} times their mean" if over else ""


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
        f"{where}: {what.name} over {' and '.join(what.axes)} stands inside a {name}{at} whose "
        f"predicate differs between the ranks of {' and '.join(split)} (since "
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
    plain = union([value], where).over(after, where)
    if what.effect != SAME or what.groups or what.op not in ("sum", "mean"):
        return plain
    summed = value.summed | axes if what.op == "sum" else value.summed  # a mean of sums is no mean
    return replace(plain, reduced=value.reduced | axes, summed=summed)


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
