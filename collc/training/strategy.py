"""What happens to the gradients of a parameter: a mean over all ranks or some, or one at a server.

``collc.strategies`` gives each parameter one of these.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from collc.errors import DataError, MeshError, StepError, nearest
from collc.lowering.use import floating, wire_format
from collc.lowering.wire import Cast
from collc.planning.plan import Plan, check_plan

# What a sum of gradients is divided by. Of weighted ones each rank says how much it counts.
MEANS = ("ranks", "world", "tokens", "participants")
WEIGHTED = ("tokens", "participants")


@dataclass(frozen=True)
class Strategy:
    """Made by ``all_reduce``, ``local`` and ``server``.

    ``dropped``: the axes over which nothing is reduced. ``accumulate``: the least dtype in which sums
    are kept, None for the gradients' own. ``wire``: in what they travel, None for as they are kept.
    """

    kind: str
    mean: str = "ranks"
    plan: Plan | None = None  # ``collc.strategies`` gives one to those that have none
    dropped: tuple[str, ...] = ()
    accumulate: str | None = "float32"
    wire: Any = None
    servers: int | None = None
    given: str = field(default="", compare=False)  # what the user wrote, but for the plan

    @property
    def over(self) -> tuple[str, ...]:
        """The axes over which gradients are reduced."""
        return tuple(a for a in self.placed.axes if a not in self.dropped)

    @property
    def divisor(self) -> int:
        """How many ranks the sum over these axes is divided by, where ranks are what counts."""
        sizes = dict(self.placed.sizes)
        return math.prod(
            sizes[a] for a in (self.placed.axes if self.mean == "world" else self.over)
        )

    @property
    def placed(self) -> Plan:
        """The plan, where it has one."""
        assert self.plan is not None, "collc.strategies gives a plan to each"
        return self.plan

    def __str__(self) -> str:
        return f"{self.kind}({self.given})"


def all_reduce(
    plan: Plan, mean: str = "ranks", *, accumulate: Any = "float32", wire: Any = None
) -> Strategy:
    """Gradients are reduced over all of the plan's axes, by its schedules.

    ``mean``: what their sum is divided by. "ranks": how many are reduced over; "world": all ranks of
    the plan. "tokens": each rank's gradient counts as often as it has tokens, a mean over all tokens
    and not one of means. "participants": only ranks that have data count.

    ``accumulate``: narrower gradients are added in this dtype, and their sums travel in it; None adds
    and sends them in their own. ``wire``: a narrower dtype, in which sums travel: fewer bytes, but
    each rank rounds a sum when it sends it on. Raises StepError and DataError for
    what is none of these.
    """
    check_plan(plan, "strategy.all_reduce")
    _check_mean(mean)
    return Strategy("all_reduce", mean, plan, **_sums("all_reduce", mean, accumulate, wire))


def local(
    *axes: str,
    mean: str = "ranks",
    plan: Plan | None = None,
    accumulate: Any = "float32",
    wire: Any = None,
) -> Strategy:
    """Each rank of these axes keeps gradients of its own; over the plan's others they are reduced.

    The parameters are ``collc.ranked`` over these axes. ``mean``, ``accumulate``, ``wire`` as for
    ``all_reduce``: experts that get examples from all ranks (``all_to_all``) want "world". ``plan``:
    needed where no other strategy has one. Raises StepError without axes, MeshError for axes that are
    none of the plan's, DataError for dtypes.
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
    how = _sums("local", mean, accumulate, wire)
    how["given"] = ", ".join([*map(repr, axes), *filter(None, [how["given"]])])
    return Strategy("local", mean, plan, axes, **how)


def server(
    plan: Plan,
    servers: int | None = None,
    mean: str = "ranks",
    *,
    accumulate: Any = "float32",
    wire: Any = None,
) -> Strategy:
    """Gradients are reduced to where the parameter's server is: each rank gets its ``Shard``.

    ``servers``: how many of the ranks hold a part, by default all. ``mean``, ``accumulate``, ``wire``
    as for ``all_reduce``; k servers get gradients as they are, straight from each rank, and add them
    wide. Parameters are pulled in their own dtype. Raises DataError for servers that
    the plan does not have ranks for, and for dtypes.
    """
    check_plan(plan, "strategy.server")
    _check_mean(mean)
    if servers is not None and (type(servers) is not int or not 1 <= servers <= plan.ranks):
        raise DataError(
            f"strategy.server: servers is 1 to {plan.ranks}, the plan's ranks, not {servers!r}. "
            "Leave it out for all of them."
        )
    if servers is not None and wire is not None:
        raise DataError(
            f"strategy.server: wire= has no effect with servers={servers}: ranks send their gradients "
            "as they are, straight to the server that adds them. Drop it."
        )
    how = _sums("server", mean, accumulate, wire, servers=servers)
    return Strategy("server", mean, plan, servers=servers, **how)


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


def _sums(kind: str, mean: str, accumulate: Any, wire: Any, **options: Any) -> dict[str, Any]:
    """In what sums are kept and travel, by names, and how a table says what was given.

    Raises DataError for what is no floating-point dtype.
    """
    wide = None
    if accumulate is not None:
        wide = floating(f"strategy.{kind}", "accumulate", accumulate)
    if isinstance(form := wire_format(f"strategy.{kind}", wire), Cast):
        wire = form.dtype
    words = [f'mean="{mean}"'] if mean != "ranks" else []
    words += [f"{name}={x}" for name, x in options.items() if x is not None]
    words += [f"accumulate={wide and repr(wide)}"] if wide != "float32" else []
    words += [f"wire={wire!r}"] if wire is not None else []
    return {"accumulate": wide, "wire": wire, "given": ", ".join(words)}
