"""What the replication check does not know, it refuses."""

from collections.abc import Iterator
from typing import Any

import jax

from collc.errors import StepError
from collc.training.check.rules import PUBLIC, named_axes
from collc.training.check.values import Where, holds_jaxpr

# Their jaxprs combine two scalars (add, max): no more than a word for the operation.
_COMBINE = frozenset(
    "reduce reduce_window select_and_scatter scatter scatter-add scatter_add scatter-sub "
    "scatter_sub scatter-mul scatter_mul scatter-min scatter_min scatter-max scatter_max".split()
)
_REFS = frozenset({"new_ref", "get", "swap", "addupdate", "run_state", "ref_get", "ref_set"})
_UNKNOWN_CALL = "calls a function in a way that the replication check does not know"


def unknown_axes(eqn: Any, sizes: dict[str, int]) -> Iterator[str]:
    """The manual axes that an equation without a rule mentions."""
    for key, param in eqn.params.items():
        if "axis" in key or "axes" in key:
            yield from (a for a in named_axes(param) if isinstance(a, str) and a in sizes)
    for effect in eqn.effects:
        if type(effect).__name__ == "NamedAxisEffect" and effect.name in sizes:
            yield effect.name


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
    axes = " and ".join(sorted(set(unknown_axes(eqn, sizes))))
    if axes:
        found = f"{name!r} works over {axes} in a way that the replication check does not know"
        remedy = f"Use one of {', '.join(dict.fromkeys(PUBLIC.values()))}, all_gather, all_to_all"
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
