"""The last micro-batch: sums of gradients are handed to the ``collc.sync`` of each parameter.

``collc.sync`` adds a sum to a cotangent and reduces both. Which part of a sum a sync inside a loop
wants is read off the loss's jaxpr: the sum follows its parameter through slices, scans and remat.
That is right only where every element of the parameter passes exactly one sync, and is used nowhere
else; of any other parameter the syncs do nothing, and it is reduced at the end.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from collc.lowering import sync
from collc.training.check.scope import Scope
from collc.training.check.values import (
    PLAIN_CALLS,
    REMAT,
    holds_jaxpr,
    is_literal,
    opened,
    scan_split,
)

# They move the elements of their operand about, each to one place.
_MOVES = frozenset("reshape squeeze transpose rev copy copy_p".split())
_CASTS = frozenset({"convert_element_type"})  # of the value alone: sums stay as wide as they are
_PARTS = frozenset({"unstack", "split"})
_CALLS = PLAIN_CALLS | REMAT


def binds_sync(jaxpr: Any) -> bool:
    """Whether a jaxpr, or one inside it, has a sync."""

    def inside(param: Any) -> bool:
        if isinstance(param, tuple | list):
            return any(map(inside, param))
        return holds_jaxpr(param) and binds_sync(param)

    eqns = opened(jaxpr).eqns
    return any(e.primitive is sync.sync_p or any(map(inside, e.params.values())) for e in eqns)


def passing_one_sync(
    jaxpr: Any, positions: Iterable[int], kept: frozenset[int] = frozenset()
) -> frozenset[int]:
    """The arguments all of which passes exactly one sync, and is used nowhere else.

    ``kept``: the positions of results that nothing is differentiated by, so that an argument may
    leave as it came there, as the variables of modules do.
    """
    inner = opened(jaxpr)
    uses = _Uses(inner, kept)
    return frozenset(i for i in positions if _passes(inner.invars[i], uses))


class _Uses:
    def __init__(self, jaxpr: Any, kept: frozenset[int]):
        self.scope, self.jaxpr, self.kept = Scope(jaxpr), jaxpr, kept

    def of(self, var: Any) -> list[Any]:
        """The equations that use a variable; None for a result that counts."""
        found = [eqn for eqn in self.scope.uses[var] if eqn is not None]
        counts = [i for i, v in enumerate(self.jaxpr.outvars) if v is var and i not in self.kept]
        return [*found, *([None] if counts else [])]

    def idle(self, eqn: Any) -> frozenset[int]:
        """The results of an equation that are only kept."""
        return frozenset(i for i, v in enumerate(eqn.outvars) if not self.of(v))


def _passes(var: Any, uses: _Uses) -> bool:
    eqns = uses.of(var)
    if len(eqns) == 1 and eqns[0] is not None:
        eqn = eqns[0]
        if sum(a is var for a in eqn.invars) != 1:
            return False
        at, name = [a is var for a in eqn.invars].index(True), eqn.primitive.name
        if eqn.primitive is sync.sync_p:
            return True
        if name in _CASTS and not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
            return False
        if name in _MOVES or name in _CASTS or name in _PARTS:
            return all(_passes(out, uses) for out in eqn.outvars)
        if name in _CALLS:
            inner = eqn.params[_CALLS[name]]
            return bool(passing_one_sync(inner, [at], uses.idle(eqn)))
        if name == "scan":
            consts, carry = scan_split(eqn.params)
            kept = frozenset(i for i in uses.idle(eqn) if i >= carry)
            sliced = at >= consts + carry
            return sliced and bool(passing_one_sync(eqn.params["jaxpr"], [at], kept))
    return _divides(var, eqns) and all(_passes(eqn.outvars[0], uses) for eqn in eqns)


def _divides(var: Any, eqns: Sequence[Any]) -> bool:
    """Whether slices take it apart along one dimension, without gaps or overlaps."""
    if not eqns or any(eqn is None or eqn.primitive.name != "slice" for eqn in eqns):
        return False
    if any(set(eqn.params["strides"] or (1,)) != {1} for eqn in eqns):
        return False
    keys = "start_indices", "limit_indices"
    boxes = [tuple(zip(*(eqn.params[key] for key in keys), strict=True)) for eqn in eqns]
    whole = tuple((0, size) for size in var.aval.shape)
    for d, (_, size) in enumerate(whole):
        along = sorted(box[d] for box in boxes)
        chained = [0, *(end for _, end in along)] == [*(start for start, _ in along), size]
        if chained and all(box[:d] + box[d + 1 :] == whole[:d] + whole[d + 1 :] for box in boxes):
            return True
    return False


# ---- evaluation with sums -------------------------------------------------------------------------


def run(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], sums: dict[int, Any], pieces: int
) -> list[Any]:
    """The results of a jaxpr, whose syncs of the arguments that have sums add and reduce these.

    ``sums``: by the position of the argument, which are ``passing_one_sync``.
    """
    return _Run(opened(jaxpr), pieces).run(consts, args, sums)


class _Run:
    def __init__(self, jaxpr: Any, pieces: int):
        self.jaxpr, self.pieces = jaxpr, pieces
        self.values: dict[Any, Any] = {}
        self.sums: dict[Any, Any] = {}

    @cached_property
    def last_use(self) -> dict[Any, int]:
        found = {v: i for i, e in enumerate(self.jaxpr.eqns) for v in e.invars if _is_var(v)}
        end = len(self.jaxpr.eqns)
        return found | {v: end for v in self.jaxpr.outvars if _is_var(v)}

    def value(self, atom: Any) -> Any:
        return self.values[atom] if _is_var(atom) else atom.val

    def run(self, consts: Sequence[Any], args: Sequence[Any], sums: dict[int, Any]) -> list[Any]:
        jaxpr = self.jaxpr
        self.values |= zip(jaxpr.constvars, consts, strict=True)
        self.values |= zip(jaxpr.invars, args, strict=True)
        self.sums |= {jaxpr.invars[i]: s for i, s in sums.items()}
        start = 0
        for i, eqn in enumerate(jaxpr.eqns):
            if not any(_is_var(a) and a in self.sums for a in eqn.invars):
                continue
            self.stretch(start, i)
            start = i + 1
            outs = self.equation(eqn, [self.value(a) for a in eqn.invars])
            self.values |= zip(eqn.outvars, outs, strict=True)
        self.stretch(start, len(jaxpr.eqns))
        return [self.value(v) for v in jaxpr.outvars]

    def stretch(self, start: int, end: int) -> None:
        """Equations that no sum meets run as they are, with their source lines."""
        eqns = self.jaxpr.eqns[start:end]
        if not eqns:
            return
        made = {v for e in eqns for v in e.outvars}
        needed = {v: None for e in eqns for v in e.invars if _is_var(v) and v not in made}
        outs = [v for v in made if self.last_use.get(v, -1) >= end]
        # The names of its arguments and results are not those of a part.
        about = self.jaxpr.debug_info._replace(arg_names=None, result_paths=None)
        part = self.jaxpr.replace(
            constvars=[], invars=[*needed], outvars=outs, eqns=eqns, debug_info=about
        )
        done = jaxpr_as_fun(ClosedJaxpr(part, ()))(*(self.values[v] for v in needed))
        self.values |= zip(outs, done, strict=True)

    def equation(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        name, params = eqn.primitive.name, eqn.params
        sums = {i: self.sums[a] for i, a in enumerate(eqn.invars) if _is_var(a) and a in self.sums}
        if eqn.primitive is sync.sync_p:
            each = [sums.get(i) for i in range(len(values))]
            return sync.resumed(eqn, values, each, self.pieces)
        if name in _MOVES or name in _CASTS or name in _PARTS or name == "slice":
            return self.view(eqn, values[0], sums[0])
        if name in _CALLS:
            inner = params[_CALLS[name]]

            def body(values: list[Any], sums: dict[int, Any]) -> list[Any]:
                return run(inner, getattr(inner, "consts", ()), values, sums, self.pieces)

            if name in REMAT:
                body = jax.checkpoint(
                    body, prevent_cse=params["prevent_cse"], policy=params["policy"]
                )
            return body(values, sums)
        if name == "scan":
            return self.scan(eqn, values, sums)
        raise AssertionError(f"a sum meets {name}, which passing_one_sync refuses")

    def view(self, eqn: Any, value: Any, total: Any) -> list[Any]:
        bound = eqn.primitive.bind(value, **eqn.params)
        moved = total if eqn.primitive.name in _CASTS else eqn.primitive.bind(total, **eqn.params)
        if not eqn.primitive.multiple_results:
            bound, moved = [bound], [moved]
        self.sums |= zip(eqn.outvars, moved, strict=True)
        return bound

    def scan(self, eqn: Any, values: list[Any], sums: dict[int, Any]) -> Sequence[Any]:
        params, inner = eqn.params, eqn.params["jaxpr"]
        n_consts, n_carry = scan_split(params)
        consts, carry = values[:n_consts], values[n_consts : n_consts + n_carry]

        def body(carry: list[Any], x: tuple[list[Any], dict[int, Any]]) -> tuple[list[Any], Any]:
            args = [*consts, *carry, *x[0]]
            outs = run(inner, getattr(inner, "consts", ()), args, x[1], self.pieces)
            return outs[:n_carry], outs[n_carry:]

        carry, ys = lax.scan(
            body,
            [jnp.asarray(c) for c in carry],
            (values[n_consts + n_carry :], sums),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *ys]


def _is_var(atom: Any) -> bool:
    return not is_literal(atom)
