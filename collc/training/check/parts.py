"""The mean of one buffer of which parts are the same on all ranks already: they stay at home.

``collc.pmean`` sends the leaves of a dtype as one buffer. Where ``collc.sync`` has reduced some of
them, only the others need to travel:

    c = concatenate a b                  c = concatenate a b
    d = collc_collective[op=mean] c      e = collc_collective[op=mean] b     (a: the same on all ranks)
                                         d = concatenate a e
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from collc.lowering.primitive import OURS
from collc.training.check.rules import Collective
from collc.training.check.scope import Scope
from collc.training.check.values import is_literal, opened

Elided = tuple[list[Any], dict[Any, Any]]


def elide_parts(what: Collective, eqn: Any, old: Any, scope: Scope) -> Elided | None:
    """The equations that remain, and what stands for the old result; None where nothing is saved.

    ``eqn`` is the equation ``old`` of the scope, but for names of what was elided before.
    """
    whole = eqn.primitive.name == OURS and eqn.params["kind"] == "all_reduce"
    if not whole or what.op != "mean" or len(eqn.invars) != 1 or is_literal(eqn.invars[0]):
        return None
    axes = frozenset(what.axes)
    parts = [p for p in _parts(old.invars[0], scope) if math.prod(p.aval.shape)]
    same = [not scope.value(part).axes & axes for part in parts]
    if all(same) or not any(same):
        return None

    ends = np.cumsum([math.prod(part.aval.shape) for part in parts]).tolist()
    cuts = list(_cuts(old.outvars[0], scope, dict(zip([0, *ends], ends, strict=False))))

    def run(*values: jax.Array) -> list[jax.Array]:
        flat = [v.reshape(-1) for v in values]
        sent = [v for v, stays in zip(flat, same, strict=True) if not stays]
        (done,) = eqn.primitive.bind(jnp.concatenate(sent), **eqn.params)
        arrived = iter(lax.split(done, [v.size for v in sent]))
        mean = [v if stays else next(arrived) for v, stays in zip(flat, same, strict=True)]
        by_end = dict(zip(ends, mean, strict=True))
        # XLA would not see through the new buffer, so what is cut out of it is taken as it is.
        return [jnp.concatenate(mean), *(by_end[end].reshape(v.aval.shape) for v, end in cuts)]

    atoms = scope.renamed(parts)
    traced = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(p.aval.shape, p.aval.dtype) for p in atoms))
    jaxpr = opened(traced)
    names = dict(zip(jaxpr.invars, atoms, strict=True))

    def named(atom: Any) -> Any:
        return atom if is_literal(atom) else names.get(atom, atom)

    new = [
        inner.replace(invars=[*map(named, inner.invars)], source_info=eqn.source_info)
        for inner in jaxpr.eqns
    ]
    olds = [old.outvars[0], *(var for var, _ in cuts)]
    return new, dict(zip(olds, map(named, jaxpr.outvars), strict=True))


def _cuts(var: Any, scope: Scope, ends: dict[int, int]) -> Iterator[tuple[Any, int]]:
    """What is cut out of a flat buffer along its parts, with where that part ends.

    ``ends``: by where a part starts, where it ends.
    """
    for eqn in scope.uses[var]:
        name = eqn.primitive.name if eqn else ""
        if name == "reshape" and _is_flat(eqn.outvars[0]):
            yield from _cuts(eqn.outvars[0], scope, ends)
        elif name == "slice" and _is_flat(var) and set(eqn.params["strides"] or (1,)) == {1}:
            along = int(np.argmax(var.aval.shape))
            start, end = (eqn.params[key][along] for key in ("start_indices", "limit_indices"))
            if ends.get(start) == end:
                yield eqn.outvars[0], end


def _parts(atom: Any, scope: Scope) -> list[Any]:
    """The values that lie one after another in a flat buffer."""
    eqn = None if is_literal(atom) else scope.definitions.get(atom)
    if eqn is None:
        return [atom]
    if eqn.primitive.name == "reshape" and _is_flat(eqn.invars[0]):
        return _parts(eqn.invars[0], scope)
    if eqn.primitive.name == "concatenate" and _is_flat(atom):
        return [part for operand in eqn.invars for part in _parts(operand, scope)]
    return [atom]


def _is_flat(atom: Any) -> bool:
    """Whether one dimension alone is longer than 1, as in [1, p]."""
    shape = atom.aval.shape
    return max(shape, default=1) == math.prod(shape)
