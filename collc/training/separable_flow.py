"""What becomes of shards in an optimizer's update, equation by equation.

Element by element a shard stays one. Its sum is partial: it may be added up and scaled until a psum
over the shard's axes makes it a number that all ranks have. Nothing else of a shard is what it is of
a whole.

    a = mul g g            g: a shard      -->   a: a shard
    b = reduce_sum a                       -->   b: partial
    c = sqrt b                             -->   refused: of one shard only
    c = psum[host gpu] b; d = sqrt c       -->   c, d: the same on all ranks
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from collc.lowering.shards import UNPADDED
from collc.training.check.rules import SAME, collective
from collc.training.check.values import CALLS, Where, opened, scan_split
from collc.training.separable_refusals import refuse

# What a value is: the same number in all places, a value for each place of no shard, a shard, or
# what still has to be reduced over its axes.
UNIFORM, WHOLE, SHARD, PARTIAL = "uniform", "whole", "shard", "partial"

_ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp clz complex conj "
    "convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor "
    "ge gt igamma igammac imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne "
    "neg nextafter not optimization_barrier or pcast population_count pow pvary real "
    "reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh sqrt square sub tan tanh xor".split()
)
SHAPES = frozenset({"reshape", "squeeze", "expand_dims", "broadcast_in_dim"})
REDUCTIONS = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_or": "max",
    "reduce_min": "min",
    "reduce_and": "min",
}
# What adds partial values up, by what reduces them in the end.
_COMBINE = {"sum": {"add", "add_any", "sub"}, "max": {"max", "or"}, "min": {"min", "and"}}


@dataclass(frozen=True)
class Value:
    """What is known of a value.

    axes: over which it differs between ranks, as shards do, and what is ``Ranked``. parts: of how
    many shards. op: the reduction that a partial one lacks, since the equation at ``since``.
    """

    kind: str
    axes: frozenset[str] = frozenset()
    parts: int = 0
    op: str = ""
    since: Where | None = None

    @property
    def plain(self) -> bool:
        return self.kind in (UNIFORM, WHOLE)


_PLAIN = Value(UNIFORM)


class Follow:
    """Follows values through an update, on axes of these sizes."""

    def __init__(self, sizes: dict[str, int]):
        self.sizes = sizes

    def run(self, jaxpr: Any, ins: Sequence[Value], outer: Where | None) -> list[Value]:
        inner = opened(jaxpr)
        known = dict(zip(inner.invars, ins, strict=True))
        known |= zip(inner.constvars, map(uniform, getattr(jaxpr, "consts", ())))

        def value(atom: Any) -> Value:
            return _PLAIN if hasattr(atom, "val") else known.get(atom, Value(WHOLE))

        for eqn in inner.eqns:
            outs = self.equation(eqn, [value(a) for a in eqn.invars], Where(eqn, outer))
            known.update(zip(eqn.outvars, outs, strict=True))
        return [value(a) for a in inner.outvars]

    def equation(self, eqn: Any, ins: list[Value], where: Where) -> list[Value]:
        name, params = eqn.primitive.name, eqn.params
        if params.get("name") == UNPADDED:  # zeros in a shard's padding, however they get there
            return ins
        if name in CALLS:
            return self.run(params[CALLS[name]], ins, where)
        if name == "cond":
            self.decided(ins[1:], ins[0], where)
            each = [self.run(branch, ins[1:], where) for branch in params["branches"]]
            return [self.joined(values, where) for values in zip(*each, strict=True)]
        if name == "while":
            a, b = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
            carry = self.settled(params["body_jaxpr"], ins[a:b], ins[b:], [], where)[0]
            (by,) = self.run(params["cond_jaxpr"], [*ins[:a], *carry], where)
            self.decided(carry, by, where)
            return carry
        if name == "scan":
            a, carried = scan_split(params)
            xs = ins[a + carried :]
            for x in (x for x in xs if not x.plain):
                _refuse(where, x)
            carry, ys = self.settled(params["jaxpr"], ins[:a], ins[a : a + carried], xs, where)
            for y in (y for y in ys if not y.plain):
                _refuse(where, y)
            return [*carry, *(Value(WHOLE) for _ in ys)]
        if name == "axis_index":
            return [Value(UNIFORM, frozenset(self.sizes))]
        what = collective(eqn, self.sizes)
        if what is not None and len(ins) == len(eqn.outvars):
            return [self.reduced(v, what, where) for v in ins]
        if all(v.plain for v in ins):
            same = name in _ELEMENTWISE | SHAPES and all(v.kind == UNIFORM for v in ins)
            axes = frozenset[str]().union(*(v.axes for v in ins))
            kinds = [UNIFORM if same or _is_scalar(out) else WHOLE for out in eqn.outvars]
            return [Value(kind, axes) for kind in kinds]
        if any(v.kind == PARTIAL for v in ins):
            return [self.partial(eqn, ins, where)] * len(eqn.outvars)
        return self.elements(eqn, ins, where)

    def elements(self, eqn: Any, ins: list[Value], where: Where) -> list[Value]:
        """An equation on shards."""
        name = eqn.primitive.name
        shard = next(v for v in ins if v.kind == SHARD)
        if name == "optimization_barrier":
            return ins
        for other in ins:
            if other.kind == WHOLE:
                what = "values that differ from place to place, as random bits do,"
                _refuse(where, shard, f"{name} of {what}")
            if other.kind == UNIFORM and other.axes:
                _refuse(where, shard, f"{name} of what differs between ranks")
            if other.kind == SHARD and other != shard:
                _refuse(where, shard, f"{name} with another parameter's shard")
        aval, out = eqn.invars[ins.index(shard)].aval, eqn.outvars[0].aval
        if name in _ELEMENTWISE:
            return [shard]
        if name in SHAPES and _longer(aval.shape) == _longer(out.shape):
            return [shard]
        if name in REDUCTIONS and len(eqn.params["axes"]) == aval.ndim:
            return [replace(shard, kind=PARTIAL, op=REDUCTIONS[name], since=where)]
        _refuse(where, shard)

    def partial(self, eqn: Any, ins: list[Value], where: Where) -> Value:
        """An equation on values that are partial still."""
        name = eqn.primitive.name
        lacking = [v for v in ins if v.kind == PARTIAL]
        first = lacking[0]
        others = [(v, a) for v, a in zip(ins, eqn.invars, strict=True) if v.kind != PARTIAL]
        same = all((v.op, v.axes) == (first.op, first.axes) for v in lacking)
        if not same or any(not v.plain for v, _ in others):
            _refuse(first.since, first)
        # A number that all ranks have would be added once by each of them; in a maximum it is safe.
        alike = first.op != "sum" or all(first.axes <= v.axes or _is_zero(a) for v, a in others)
        passes = name in SHAPES or name == "concatenate" or _keeps_order(eqn)
        combines = name in _COMBINE[first.op] or REDUCTIONS.get(name) == first.op
        scales = name == "neg" or (len(lacking) == 1 and name in ("mul", "div"))
        scales = scales and first.op == "sum" and not any(v.axes for v, _ in others)
        scales = scales and not (name == "div" and ins[0].plain)
        if scales or (alike and (passes or combines)):
            return first
        _refuse(first.since, first)

    def reduced(self, value: Value, what: Any, where: Where) -> Value:
        """An operand of a collective."""
        rest = value.axes - set(what.axes)
        if value.plain and what.effect == SAME and not what.groups:
            return replace(value, axes=rest)
        if value.plain:
            return Value(WHOLE, value.axes | set(what.axes))
        op = "sum" if what.op == "mean" else what.op
        if value.kind == SHARD or what.effect != SAME or op != value.op or what.groups:
            _refuse(value.since or where, value)
        return replace(value, axes=rest) if rest else _PLAIN

    def decided(self, ins: Sequence[Value], by: Value, where: Where) -> None:
        """Of a branch or a loop: what decides about shards is the same on all ranks."""
        shard = next((v for v in ins if not v.plain), None)
        if not by.plain or (shard and by.axes):
            _refuse(by.since or where, shard or by)

    def joined(self, values: Sequence[Value], where: Where) -> Value:
        """One of several."""
        first = next((v for v in values if not v.plain), None)
        if first is None:
            whole = any(v.kind == WHOLE for v in values)
            axes = frozenset[str]().union(*(v.axes for v in values))
            return Value(WHOLE if whole else UNIFORM, axes)
        either = (first, _PLAIN) if first.kind == SHARD else (first,)
        if any(v not in either for v in values):
            _refuse(first.since or where, first)
        return first

    def settled(
        self, body: Any, consts: list[Value], carry: list[Value], xs: list[Value], where: Where
    ) -> tuple[list[Value], list[Value]]:
        """What a loop carries in the end, and what one turn returns besides."""
        while True:
            outs = self.run(body, [*consts, *carry, *xs], where)
            grown = [
                self.joined(pair, where) for pair in zip(carry, outs[: len(carry)], strict=True)
            ]
            if grown == carry:
                return carry, outs[len(carry) :]
            carry = grown


# ---- small questions ------------------------------------------------------------------------------


def uniform(x: Any) -> Value:
    """Of an array that lies on all ranks: whether it is the same in all places."""
    return Value(UNIFORM if np.size(x) == 1 else WHOLE)


def _is_scalar(atom: Any) -> bool:
    return not getattr(atom.aval, "shape", ())


def _is_zero(atom: Any) -> bool:
    return hasattr(atom, "val") and np.ndim(atom.val) == 0 and atom.val == 0


def _longer(shape: Sequence[int]) -> list[int]:
    """The dimensions longer than 1, which alone say where an element is."""
    return [size for size in shape if size != 1]


def _keeps_order(eqn: Any) -> bool:
    """Whether a cast commutes with sums and maxima: not one that rounds to integers or bool."""
    name = eqn.primitive.name
    if name != "convert_element_type":
        return name in ("copy", "copy_p", "pcast", "pvary")
    old, new = (np.dtype(v.aval.dtype) for v in (eqn.invars[0], eqn.outvars[0]))
    real = np.issubdtype(old, np.inexact)
    return np.issubdtype(new, np.inexact) or (not real and new.kind != "b")


def _refuse(where: Where | None, value: Value, found: str = "") -> NoReturn:
    refuse(where, value.parts, found)
