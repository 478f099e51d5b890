"""The variables of one jaxpr."""

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from collc.training.check.values import Value, constant, is_literal, scalar_of

# They give a number another type or shape.
_CASTS = frozenset({"convert_element_type", "broadcast_in_dim", "reshape", "pvary", "copy"})


class Scope:
    """The variables of one jaxpr: their uses and definitions, found when first asked for, what is
    known of them so far, and what stands for those that were elided.
    """

    def __init__(self, jaxpr: Any):
        self.jaxpr = jaxpr
        self.known: dict[Any, Value] = {}
        self.instead: dict[Any, Any] = {}

    def value(self, atom: Any) -> Value:
        return constant(atom.val) if is_literal(atom) else self.known.get(atom, Value())

    def renamed(self, atoms: Sequence[Any]) -> list[Any]:
        return [a if is_literal(a) else self.instead.get(a, a) for a in atoms]

    @cached_property
    def uses(self) -> dict[Any, list[Any]]:
        uses = defaultdict(list)
        for eqn in self.jaxpr.eqns:
            for var in {v for v in eqn.invars if not is_literal(v)}:
                uses[var].append(eqn)
        for var in (v for v in self.jaxpr.outvars if not is_literal(v)):
            uses[var].append(None)  # leaves the jaxpr
        return uses

    @cached_property
    def definitions(self) -> dict[Any, Any]:
        return {var: eqn for eqn in self.jaxpr.eqns for var in eqn.outvars}

    def scalar(self, atom: Any) -> Any:
        """The number that an atom is known to be, else None."""
        if is_literal(atom):
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
