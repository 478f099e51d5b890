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

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jax.core import Tracer
from jax.extend.core import ClosedJaxpr

from collc.errors import StepError
from collc.lowering import sync
from collc.training.check import refusals, rules
from collc.training.check.parts import elide_parts
from collc.training.check.rules import Context
from collc.training.check.scope import Scope
from collc.training.check.values import (
    CALLS,
    Value,
    Where,
    constant,
    is_cotangent,
    is_literal,
    join,
    opened,
    rebuilt,
    scan_split,
    taint,
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
            outs, jaxpr = self.run(eqn.params[param], ins, self.within(where, context))
            return outs, [_with(eqn, **{param: jaxpr})], {}
        if name in _CONTROL:
            return _CONTROL[name](self, eqn, ins, where, context)
        if name == "call_hi_primitive":
            hidden = eqn.params["_prim"]
            if id(hidden) not in self.expanded:
                self.expanded[id(hidden)] = refusals.expand(hidden, eqn, where)
            outs, _ = self.run(self.expanded[id(hidden)], ins, self.within(where, context))
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

    def within(self, where: Where, context: Context) -> Context:
        return context._replace(outer=where, cotangent=is_cotangent(where.eqn, context.cotangent))

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

    # -- control flow --

    @contextmanager
    def not_converged(self):
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    def _scan(self, eqn: Any, ins: list[Value], where: Where, context: Context) -> Outcome:
        body, length = eqn.params["jaxpr"], eqn.params["length"]
        n_consts, n_carry = scan_split(eqn.params)
        consts, carry, xs = _split(ins, n_consts, n_carry)
        context = self.within(where, context)
        with self.not_converged():
            converged = False
            while not converged:
                outs, _ = self.run(body, [*consts, *carry, *xs], context)
                carry, converged = _grown(carry, outs[:n_carry])
        outs, body = self.run(body, [*consts, *carry, *xs], context)
        if not length:  # no iteration: the carry leaves as it came
            outs = [*carry, *outs[n_carry:]]
        return outs, [_with(eqn, jaxpr=body)], {}

    def _while(self, eqn: Any, ins: list[Value], where: Where, context: Context) -> Outcome:
        test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        test_consts, body_consts, carry = _split(
            ins, eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        )
        context = self.within(where, context)
        predicate = Value(constant=True)
        with self.not_converged():
            converged = False
            while not converged:
                (predicate,), _ = self.run(test, [*test_consts, *carry], context)
                outs, _ = self.run(body, [*body_consts, *carry], context)
                # Ranks that stop early keep what others go on to change.
                carry, converged = _grown(carry, [taint(v, predicate, where) for v in outs])
        inside = self.under(predicate, where, context)
        _, test = self.run(test, [*test_consts, *carry], inside)
        outs, body = self.run(body, [*body_consts, *carry], inside)
        outs = [join(c, taint(v, predicate, where)) for c, v in zip(carry, outs)]
        return outs, [_with(eqn, cond_jaxpr=test, body_jaxpr=body)], {}

    def _cond(self, eqn: Any, ins: list[Value], where: Where, context: Context) -> Outcome:
        predicate, operands = ins[0], ins[1:]
        inside = self.under(predicate, where, self.within(where, context))
        runs = [self.run(branch, operands, inside) for branch in eqn.params["branches"]]
        outs = runs[0][0]
        for other, _ in runs[1:]:
            outs = [join(a, b) for a, b in zip(outs, other)]
        outs = [taint(v, predicate, where) for v in outs]
        branches = tuple(jaxpr for _, jaxpr in runs)
        if all(new is old for new, old in zip(branches, eqn.params["branches"])):
            branches = eqn.params["branches"]
        return outs, [_with(eqn, branches=branches)], {}

    def _linear_solve(self, eqn: Any, ins: list[Value], where: Where, context: Context) -> Outcome:
        """Only `solve` runs: the others are there for derivatives, which have been taken."""
        n, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
        _, consts, _, b = _split(ins, n.matvec + n.vecmat, n.solve, n.transpose_solve)
        outs, solve = self.run(jaxprs.solve, [*consts, *b], self.within(where, context))
        if solve is not jaxprs.solve:
            jaxprs = jaxprs._replace(solve=solve)
        return outs, [_with(eqn, jaxprs=jaxprs)], {}

    def under(self, predicate: Value, where: Where, context: Context) -> Context:
        both = join(predicate, context.predicate)
        return context._replace(
            predicate=both, control=where if predicate.axes else context.control
        )


_CONTROL = {
    "scan": _Checker._scan,
    "while": _Checker._while,
    "cond": _Checker._cond,
    "custom_linear_solve": _Checker._linear_solve,
}


def _with(eqn: Any, **params: Any) -> Any:
    """The equation with these parameters; itself if nothing changes."""
    if all(eqn.params[key] is value for key, value in params.items()):
        return eqn
    return eqn.replace(params=eqn.params | params)


def _split(values: Sequence[Value], *sizes: int) -> list[list[Value]]:
    """Consecutive parts of these sizes, and the rest."""
    parts, at = [], 0
    for size in sizes:
        parts.append(list(values[at : at + size]))
        at += size
    return [*parts, list(values[at:])]


def _grown(carry: Sequence[Value], outs: Sequence[Value]) -> tuple[list[Value], bool]:
    """What is carried after one more iteration, and whether that is no more than before."""
    grown = [join(c, o) for c, o in zip(carry, outs)]
    return grown, all(g.state == c.state for g, c in zip(grown, carry))
