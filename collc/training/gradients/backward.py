"""What the jaxpr of a backward says: when each gradient is ready, and which need not be sent."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr

from collc.errors import StepError
from collc.training.check.replication import check
from collc.training.check.values import PLAIN_CALLS, REMAT, is_literal, opened
from collc.training.gradients.opened import Opened

_CALLS = PLAIN_CALLS | REMAT

Run = Callable[[Mapping[str, Any]], tuple[Any, Any]]


@dataclass(frozen=True)
class Backward:
    """What a gradient function returned.

    For each leaf of ``grads``: ``ready``, its rank in the order in which they are made, where those
    that come at once count from the last; ``same``: whether it is seen to be so on all ranks.
    """

    out: Any
    grads: Any
    ready: list[int]
    same: list[bool]


def traced(run: Run, values: Mapping[str, Any]) -> Backward:
    """Runs a gradient function of named arguments, modules among them, once it has been looked at.

    ``run`` returns what the loss returns, and gradients.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = {a: mesh.shape[a] for a in mesh.manual_axes}
    if not axes:
        raise StepError(
            "value_and_grad of strategies runs per device, inside a step that is decorated with "
            "@collc.schedule(plan, ...)."
        )

    def gradients_first(values: dict[str, Any]) -> Any:
        out, grads = run(values)
        return grads, out

    seen = Opened(gradients_first, values)
    grads, out = seen.run()
    count = len(jax.tree.leaves(grads))
    ready, same = _ready(seen.closed, count), _same(seen.closed, axes)[:count]
    return Backward(out, grads, ready, same)


def _ready(closed: Any, count: int) -> list[int]:
    """The rank of each of the first results in the order in which equations make them."""
    made: dict[int, dict[Any, tuple[int, int]]] = {}

    def place(jaxpr: Any, atom: Any) -> tuple[int, ...]:
        """The equation that makes a value, and within a call the one inside it."""
        if id(jaxpr) not in made:
            eqns = enumerate(jaxpr.eqns)
            made[id(jaxpr)] = {v: (i, k) for i, e in eqns for k, v in enumerate(e.outvars)}
        if is_literal(atom) or atom not in made[id(jaxpr)]:
            return (-1,)  # an argument, or a constant
        i, k = made[id(jaxpr)][atom]
        eqn = jaxpr.eqns[i]
        if eqn.primitive.name not in _CALLS:
            return (i,)
        inner = opened(eqn.params[_CALLS[eqn.primitive.name]])
        return (i, *place(inner, inner.outvars[k]))

    jaxpr = opened(closed)
    places = [(place(jaxpr, v), -i) for i, v in enumerate(jaxpr.outvars[:count])]
    order = {one: rank for rank, one in enumerate(sorted(places))}
    return [order[one] for one in places]


def _same(closed: Any, axes: dict[str, int]) -> list[bool]:
    """Which results are the same on all ranks even if no argument is, such as zeros."""
    jaxpr, consts = opened(closed), list(getattr(closed, "consts", ()))
    varies = [frozenset(axes) if isinstance(c, Tracer) else frozenset() for c in consts]
    about = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    free = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], debug_info=about)
    every = [*varies, *(frozenset(axes) for _ in jaxpr.invars)]
    checked = check(ClosedJaxpr(free, ()), every, axes)
    return [not varying for varying in checked.varying]
