"""What happens to the gradients of a parameter: a mean over all ranks or some, or one at a server.

``collc.strategies`` gives each parameter one of these.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from collc.errors import DataError, MeshError, StepError, nearest
from collc.lowering.collectives import floating
from collc.planning.plan import Plan, check_plan

# What a sum of gradients is divided by. Of weighted ones each rank says how much it counts.
MEANS = ("ranks", "world", "tokens", "participants")
WEIGHTED = ("tokens", "participants")


@dataclass(frozen=True)
class Strategy:
    """Made by ``all_reduce``, ``local`` and ``server``.

    ``dropped``: the axes over which nothing is reduced. ``accumulate``: the least dtype in which sums
    are kept, None for the gradients' own.
    """

    kind: str
    mean: str = "ranks"
    plan: Plan | None = None
    dropped: tuple[str, ...] = ()
    accumulate: str | None = "float32"
    wire: Any = None
    servers: int | None = None
    given: str = field(default="", compare=False)  # what the user wrote, but for the plan

    def axes(self, plan: Plan) -> tuple[str, ...]:
        """The axes of a plan over which gradients are reduced."""
        return tuple(a for a in plan.axes if a not in self.dropped)

    def divisor(self, plan: Plan) -> int:
        """How many ranks the sum over ``axes`` is divided by, where ranks are what counts."""
        sizes = dict(plan.sizes)
        return math.prod(sizes[a] for a in (plan.axes if self.mean == "world" else self.axes(plan)))

    def __str__(self) -> str:
        return f"{self.kind}({self.given})"


def all_reduce(
    plan: Plan, mean: str = "ranks", *, accumulate: Any = "float32", wire: Any = None
) -> Strategy:
    """Gradients are reduced over all of the plan's axes, by its schedules.

    ``mean``: what their sum is divided by. "ranks": how many are reduced over; "world": all ranks of
    the plan. "tokens": each rank's gradient counts as often as it has tokens, a mean over all tokens
    and not one of means. "participants": only ranks that have data count. ``accumulate``: sums of
    narrower gradients are kept in this dtype, or in their own where None; ``wire`` as in
    ``collc.pmean``. Raises StepError and DataError for what is none of these.
    """
    check_plan(plan, "strategy.all_reduce")
    _check_mean(mean)
    wide = None if accumulate is None else floating("strategy", "accumulate", accumulate)
    given = _given(mean, accumulate=None if wide == "float32" else repr(wide), wire=wire)
    return Strategy("all_reduce", mean, plan, accumulate=wide, wire=wire, given=given)


def local(*axes: str, mean: str = "ranks", plan: Plan | None = None) -> Strategy:
    """Each rank of these axes keeps gradients of its own; over the plan's others they are reduced.

    ``mean`` as for ``all_reduce``: experts that get examples from all ranks (``all_to_all``) want
    "world". ``plan``: needed where no other strategy has one. Raises StepError without axes,
    MeshError for axes that are none of the plan's.
    """
    if not axes or not all(isinstance(a, str) for a in axes) or len(set(axes)) < len(axes):
        raise StepError(
            f"strategy.local takes the axes whose ranks keep their own, not {axes!r}. Name each once, "
            'as in strategy.local("gpu").'
        )
    _check_mean(mean)
    if plan is not None:
        check_plan(plan, "strategy.local")
        check_axes(axes, plan)
    given = ", ".join([*map(repr, axes), *filter(None, [_given(mean)])])
    return Strategy("local", mean, plan, axes, given=given)


def server(plan: Plan, servers: int | None = None, mean: str = "ranks") -> Strategy:
    """Gradients are reduced to where the parameter's server is: each rank gets its ``Shard``.

    ``servers``: how many of the ranks hold a part, by default all. ``mean`` as for ``all_reduce``.
    Raises DataError for servers that the plan does not have ranks for.
    """
    check_plan(plan, "strategy.server")
    _check_mean(mean)
    if servers is not None and (type(servers) is not int or not 1 <= servers <= plan.ranks):
        raise DataError(
            f"strategy.server: servers is 1 to {plan.ranks}, the plan's ranks, not {servers!r}. "
            "Leave it out for all of them."
        )
    return Strategy("server", mean, plan, servers=servers, given=_given(mean, servers=servers))


def check_axes(axes: Sequence[str], plan: Plan) -> None:
    """Raises MeshError for axes that are none of the plan's."""
    for axis in axes:
        if axis not in plan.axes:
            raise MeshError(
                f"strategy.local({axis!r}): the plan has no axis {axis!r}. "
                f"{nearest(axis, plan.axes)}"
            )


def _check_mean(mean: Any) -> None:
    if mean not in MEANS:
        raise StepError(f"mean= is {', '.join(MEANS)}, not {mean!r}. {nearest(str(mean), MEANS)}")


def _given(mean: str, **options: Any) -> str:
    words = [f'mean="{mean}"'] if mean != "ranks" else []
    return ", ".join([*words, *(f"{k}={x}" for k, x in options.items() if x is not None)])
