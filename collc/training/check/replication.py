"""The replication check: which values of a step differ between ranks, and what cannot be right.

JAX's own checker (check_vma=True) refuses everyday code, so decorated steps run without it, and
their one traced jaxpr is interpreted here instead. Every variable gets the set of manual axes over
which its value varies. Variation begins at arguments (the batch) and at `axis_index`; an ordinary
equation varies wherever an operand does; a reduction or gather over an axis removes it. Loops run
to their fixpoint, and what is found before that is dropped. What is not known is refused.

    b = mul a x      a: {}, x: {host, gpu}    -->   b: {host, gpu}
    c = psum[gpu] b                           -->   c: {host}
    d = psum[gpu] c                           -->   refused: c is the same on all ranks of gpu
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jax.core import Tracer
from jax.extend.core import ClosedJaxpr

from collc.errors import StepError
from collc.lowering import sync
from collc.training.check import refusals, rules
from collc.training.check.control import CONTROL, changed_in, within
from collc.training.check.parts import elide_parts
from collc.training.check.rules import Context
from collc.training.check.scope import Scope
from collc.training.check.values import (
    CALLS,
    Value,
    Where,
    constant,
    is_literal,
    opened,
    rebuilt,
    union,
)

# Results are the operands, one by one.
_ONE_BY_ONE = frozenset({"optimization_barrier", "device_put"})
_OUTSIDE = frozenset({"pure_callback", "io_callback", "infeed", "outfeed"})

Outcome = tuple[list[Value], list[Any], dict[Any, Any]]


@dataclass(frozen=True)
class Checked:
    """A step that has been checked.

    jaxpr: what shall run, the same but for elided collectives. varying: for each output, the manual
    axes over which it differs between ranks. chains: for each output, the first and last user line
    of that variation ("file.py:12 in f"). notes: what is right but worth knowing.
    """

    jaxpr: ClosedJaxpr
    varying: tuple[frozenset[str], ...]
    chains: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def check(
    closed_jaxpr: ClosedJaxpr, in_varying: Sequence[frozenset[str]], axes: dict[str, int]
) -> Checked:
    """Follow which values vary over which manual axes through a step's jaxpr.

    Args:
      closed_jaxpr: the step, traced by jax.make_jaxpr inside the shard_map body.
      in_varying: for each of its arguments, the manual axes over which ranks hold different values.
      axes: the manual axes and their sizes.

    Raises:
      StepError: a sum of what is already the same on all ranks, a collective that only some ranks
        would reach, or something of which the check does not know whether it communicates. Varying
        outputs raise nothing here.
    """
    jaxpr = opened(closed_jaxpr)
    if len(in_varying) != len(jaxpr.invars):
        raise StepError(f"the step has {len(jaxpr.invars)} arguments, not {len(in_varying)}")
    checker = _Checker(dict(axes))
    ins = [Value(axes=frozenset(a).intersection(axes)) for a in in_varying]
    outs, checked = checker.run(closed_jaxpr, ins, Context())
    return Checked(
        checked,
        tuple(v.axes for v in outs),
        tuple(v.chain() for v in outs),
        tuple(checker.notes),
    )


class _Checker:
    def __init__(self, axes: dict[str, int]):
        self.axes = axes
        self.notes: dict[str, None] = {}  # an ordered set
        self.quiet = 0  # inside iterations that have not converged
        self.known: dict[Any, list[Value]] = {}
        self.expanded: dict[int, Any] = {}

    def run(self, jaxpr: Any, ins: Sequence[Value], context: Context) -> tuple[list[Value], Any]:
        """The values of a jaxpr's results, and the jaxpr to run.

        An unchanged one keeps its identity, for jit's caches. Nested loops would meet the same
        question again in each iteration, so those that have not converged are remembered.
        """
        if not self.quiet:
            return self.interpret(jaxpr, ins, context)
        key = id(jaxpr), tuple(ins), context
        if key not in self.known:
            self.known[key] = self.interpret(jaxpr, ins, context)[0]
        return list(self.known[key]), jaxpr

    def interpret(
        self, jaxpr: Any, ins: Sequence[Value], context: Context
    ) -> tuple[list[Value], Any]:
        inner = opened(jaxpr)
        scope = Scope(inner)
        if len(ins) != len(inner.invars):
            raise StepError(
                f"a function of {len(inner.invars)} arguments is called with {len(ins)}, in a way "
                "that the replication check does not know. Report it to collc."
            )
        known, instead = scope.known, scope.instead
        known.update(zip(inner.invars, ins))
        consts = getattr(jaxpr, "consts", ())
        for var, const in zip(inner.constvars, consts):
            known[var] = Value() if isinstance(const, Tracer) else constant(const)
        eqns, changed = [], False

        for old in inner.eqns:
            eqn = old
            if instead and any(not is_literal(a) and a in instead for a in old.invars):
                eqn = old.replace(invars=scope.renamed(old.invars))
            where = Where(old, context.outer)
            values = [scope.value(a) for a in old.invars]
            outs, new, elided = self.equation(eqn, values, where, context, scope)
            known.update(zip(old.outvars, outs))
            instead.update(elided)
            eqns += new
            changed |= len(new) != 1 or new[0] is not old
        results = [scope.value(a) for a in inner.outvars]
        if not changed:
            return results, jaxpr
        return results, rebuilt(jaxpr, eqns, scope.renamed(inner.outvars))

    def equation(
        self, eqn: Any, ins: list[Value], where: Where, context: Context, scope: Scope
    ) -> Outcome:
        name = eqn.primitive.name
        refusals.refuse_references(eqn, where)
        if name in CALLS:
            param = CALLS[name]
            outs, jaxpr = self.run(eqn.params[param], ins, within(where, context))
            return outs, [changed_in(eqn, **{param: jaxpr})], {}
        if name in CONTROL:
            outs, params = CONTROL[name](self, eqn, ins, where, context)
            return outs, [changed_in(eqn, **params)], {}
        if name == "call_hi_primitive":
            hidden = eqn.params["_prim"]
            if id(hidden) not in self.expanded:
                self.expanded[id(hidden)] = refusals.expand(hidden, eqn, where)
            outs, _ = self.run(self.expanded[id(hidden)], ins, within(where, context))
            return outs, [eqn], {}
        if name == "shard_map":
            remedy = "Call its body directly: the step is already inside one, over its plan's axes"
            raise refusals.refusal(where, "a shard_map inside a decorated step", remedy)
        if name == sync.NAME:  # an identity; its backward is a collective of its own
            return [union([v], where) for v in ins[: len(eqn.outvars)]], [eqn], {}
        what = rules.collective(eqn, self.axes)
        if what is not None:
            return self.collective(what, eqn, ins, where, context, scope)
        if name == "axis_index":
            axes = [a for a in rules.named_axes(eqn.params["axis_name"]) if a in self.axes]
            return [Value().over(axes, where)], [eqn], {}
        if name in _OUTSIDE:  # each process asks its own outside world
            return [Value().over(self.axes, where) for _ in eqn.outvars], [eqn], {}
        if name in _ONE_BY_ONE and len(ins) == len(eqn.outvars):
            return [union([v], where) for v in ins], [eqn], {}
        if name not in ("pvary", "pcast"):  # they change a type, no value
            refusals.refuse_unknown(eqn, where, self.axes)
        if name in rules.DRAWS:
            self.note_draw(ins[: rules.DRAWS[name]], where)
        return [union(ins, where)] * len(eqn.outvars), [eqn], {}

    # -- collectives --

    def collective(
        self,
        what: rules.Collective,
        eqn: Any,
        ins: list[Value],
        where: Where,
        context: Context,
        scope: Scope,
    ) -> Outcome:
        if what.effect == rules.DIFFERS and len(ins) != len(eqn.outvars):
            ins = [union(ins, where)] * len(eqn.outvars)
        outs = [rules.result(what, eqn, v, where, self.axes) for v in ins]
        if self.quiet:
            return outs, [eqn], {}
        for i, value in enumerate(ins):
            note = rules.check_sum(what, where.eqn, i, value, where, context, scope, self.axes)
            if note:
                self.note(where, note)
        new, elided = rules.elide(what, eqn, ins)
        if new and new[0] is eqn:
            new, elided = elide_parts(what, eqn, where.eqn, scope) or (new, elided)
        if new:
            rules.check_hang(what, where, context)
        if not new or new[0] is not eqn:
            part = " in part" if new else ""
            said = rules.said_of_sums(ins, what.axes, self.axes) if what.op == "mean" else ""
            self.note(
                where,
                f"{what.name} over {' and '.join(what.axes)} is elided{part}: "
                f"its operand is already the same on all ranks{said and ','}{said}",
            )
        return outs, new, elided

    def note_draw(self, keys: Sequence[Value], where: Where) -> None:
        varying = frozenset().union(*(k.axes for k in keys))
        same = [a for a in self.axes if a not in varying]
        if same and not self.quiet:
            self.note(
                where,
                f"random bits from a key that is the same on all ranks of {' and '.join(same)}, "
                "so these draw the same ones (one dropout mask for all). If they shall differ: "
                "collc.rank_key(key)",
            )

    def note(self, where: Where, text: str) -> None:
        self.notes[f"{where}: {text}"] = None

    @contextmanager
    def not_converged(self) -> Iterator[None]:
        """While a loop's iterations still differ, what is found is dropped."""
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1
