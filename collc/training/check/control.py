"""Control flow in the replication check: loops run to their fixpoint, and what a predicate decides
varies as it does.

    c = cond p a b      p: {gpu}, a: {}, b: {host}    -->   c: {host, gpu}
    c = while p c       p: {gpu}, c: {}               -->   c: {gpu}
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from collc.training.check.rules import Context
from collc.training.check.values import Value, Where, is_cotangent, join, scan_split, taint

Outs = tuple[list[Value], dict[str, Any]]  # the values of the results, and the jaxprs to run


class Runner(Protocol):
    """What follows the values through a jaxpr: the check itself."""

    def run(self, jaxpr: Any, ins: Sequence[Value], context: Context) -> tuple[list[Value], Any]:
        """The values of a jaxpr's results, and the jaxpr to run."""
        ...

    def not_converged(self) -> AbstractContextManager[None]:
        """While a loop's iterations still differ, what is found is dropped."""
        ...


def _scan(checker: Runner, eqn: Any, ins: Sequence[Value], where: Where, context: Context) -> Outs:
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    n_consts, n_carry = scan_split(eqn.params)
    consts, carry, xs = _split(ins, n_consts, n_carry)
    context = within(where, context)
    with checker.not_converged():
        converged = False
        while not converged:
            outs, _ = checker.run(body, [*consts, *carry, *xs], context)
            carry, converged = _grown(carry, outs[:n_carry])
    outs, body = checker.run(body, [*consts, *carry, *xs], context)
    if not length:  # no iteration: the carry leaves as it came
        outs = [*carry, *outs[n_carry:]]
    return outs, {"jaxpr": body}


def _while(checker: Runner, eqn: Any, ins: Sequence[Value], where: Where, context: Context) -> Outs:
    test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    test_consts, body_consts, carry = _split(
        ins, eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    )
    context = within(where, context)
    predicate = Value(constant=True)
    with checker.not_converged():
        converged = False
        while not converged:
            (predicate,), _ = checker.run(test, [*test_consts, *carry], context)
            outs, _ = checker.run(body, [*body_consts, *carry], context)
            # Ranks that stop early keep what others go on to change.
            carry, converged = _grown(carry, [taint(v, predicate, where) for v in outs])
    inside = _under(predicate, where, context)
    _, test = checker.run(test, [*test_consts, *carry], inside)
    outs, body = checker.run(body, [*body_consts, *carry], inside)
    outs = [join(c, taint(v, predicate, where)) for c, v in zip(carry, outs)]
    return outs, {"cond_jaxpr": test, "body_jaxpr": body}


def _cond(checker: Runner, eqn: Any, ins: Sequence[Value], where: Where, context: Context) -> Outs:
    predicate, *operands = ins
    inside = _under(predicate, where, within(where, context))
    runs = [checker.run(branch, operands, inside) for branch in eqn.params["branches"]]
    outs = runs[0][0]
    for other, _ in runs[1:]:
        outs = [join(a, b) for a, b in zip(outs, other)]
    outs = [taint(v, predicate, where) for v in outs]
    branches = tuple(jaxpr for _, jaxpr in runs)
    if all(new is old for new, old in zip(branches, eqn.params["branches"])):
        branches = eqn.params["branches"]
    return outs, {"branches": branches}


def _linear_solve(
    checker: Runner, eqn: Any, ins: Sequence[Value], where: Where, context: Context
) -> Outs:
    """Only `solve` runs: the others are there for derivatives, which have been taken."""
    n, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    _, consts, _, b = _split(ins, n.matvec + n.vecmat, n.solve, n.transpose_solve)
    outs, solve = checker.run(jaxprs.solve, [*consts, *b], within(where, context))
    if solve is not jaxprs.solve:
        jaxprs = jaxprs._replace(solve=solve)
    return outs, {"jaxprs": jaxprs}


# By the name that jax binds.
CONTROL: dict[str, Callable[[Runner, Any, Sequence[Value], Where, Context], Outs]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_linear_solve": _linear_solve,
}


def within(where: Where, context: Context) -> Context:
    """What surrounds the equations of a jaxpr that an equation calls."""
    return context._replace(outer=where, cotangent=is_cotangent(where.eqn, context.cotangent))


def changed_in(eqn: Any, **params: Any) -> Any:
    """The equation with these parameters; itself if nothing changes."""
    if all(eqn.params[key] is value for key, value in params.items()):
        return eqn
    return eqn.replace(params=eqn.params | params)


def _under(predicate: Value, where: Where, context: Context) -> Context:
    both = join(predicate, context.predicate)
    return context._replace(predicate=both, control=where if predicate.axes else context.control)


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
