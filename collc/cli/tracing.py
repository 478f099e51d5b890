"""A step of a file, decorated, jitted and traced for a mesh of GPUs that are not there."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from collc.cli.steps import Source, blamed, called
from collc.errors import DataError, PlanError, StepError, nearest
from collc.planning.plan import Plan
from collc.training.kinds import differs, rank_axes
from collc.training.modules import is_module
from collc.training.step import schedule


def traced(
    source: Source,
    given: Mapping[str, Any],
    mesh: Mesh,
    plan: Plan | None,
    *,
    split: Sequence[str] = (),
    donate: Sequence[str] = (),
) -> Any:
    """What ``jax.jit(step).trace(...)`` returns, or that of ``nnx.jit`` where there are modules.

    ``given``: arguments by name, placed as they say themselves. Under a plan, what says nothing is
    replicated, and what ``split`` names is split over the plan's axes. Raises StepError where the
    step does not trace, with the user's line.
    """
    for option, names in (("--split", split), ("--donate", donate)):
        for name in names:
            if name not in given:
                raise DataError(
                    f"{option} names {name!r}, which is no argument of {source}. {nearest(name, given)}"
                )
    placed = {
        name: _abstract(source, name, value, mesh, plan, name in split)
        for name, value in given.items()
    }
    run = _jitted(source, placed, plan, split, donate)
    args, kwargs = called(source, placed)
    try:
        with blamed(source.path, f"{source.name} does not trace"), jax.set_mesh(mesh):
            return run.trace(*args, **kwargs)
    except PlanError as e:
        if plan is not None:
            raise
        raise PlanError(f"{e} Here a plan is given as --plan gpu=ring,host=tree.") from e


def refuse_decorated(source: Source, plan: bool) -> None:
    """A step with a plan of its own, or jitted where a plan has yet to be put under the jit."""
    if isinstance(getattr(source.function, "plan", None), Plan):
        raise StepError(
            f"{source} has a plan already, for its own mesh. Give the plain function, and its plan "
            "with --plan."
        )
    if plan and hasattr(source.function, "trace"):
        raise StepError(
            f"{source} is jitted already, and --plan has to go below that. Give the plain function."
        )


def _jitted(
    source: Source,
    placed: Mapping[str, Any],
    plan: Plan | None,
    split: Sequence[str],
    donate: Sequence[str],
) -> Any:
    function: Any = source.function
    if hasattr(function, "trace"):
        if donate:
            raise StepError(
                f"--donate has no effect: {source} is jitted already. Say donate_argnames= there."
            )
        return function
    if plan is not None:
        function = schedule(plan, batch=tuple(split))(function)
    jit: Any = jax.jit
    if any(is_module(x) for x in jax.tree.leaves(list(placed.values()), is_leaf=is_module)):
        from flax import nnx

        jit = nnx.jit
    positional, _ = called(source, placed)
    names = list(source.signature.parameters)[: len(positional)]
    numbers = tuple(names.index(name) for name in donate if name in names)
    keywords = tuple(name for name in donate if name not in names)
    return jit(function, donate_argnums=numbers or None, donate_argnames=keywords or None)


# ---- placing --------------------------------------------------------------------------------------


def _abstract(
    source: Source, name: str, value: Any, mesh: Mesh, plan: Plan | None, split: bool
) -> Any:
    """The argument as shapes with shardings; an nnx module keeps its identity."""
    axes = plan.axes if plan is not None else ()
    usual = NamedSharding(mesh, PartitionSpec(axes) if split else PartitionSpec())

    def one(path: Any, x: Any) -> Any:
        here = f"{source.path}: {name}{jax.tree_util.keystr(path)}"
        own = rank_axes(x)
        if is_module(x):
            from flax import nnx

            state = nnx.state(x)
            nnx.update(x, jax.tree_util.tree_map_with_path(one, state, is_leaf=differs))
            return x
        if own is not None:
            ranked = NamedSharding(mesh, PartitionSpec(*(own or axes)))
            return jax.tree.map(lambda y: _placed(here, y, mesh, ranked), x)
        return _placed(here, x, mesh, usual if plan is not None else None)

    def whole(x: Any) -> bool:
        return is_module(x) or differs(x)

    return jax.tree_util.tree_map_with_path(one, value, is_leaf=whole)


def _placed(where: str, x: Any, mesh: Mesh, usual: NamedSharding | None) -> Any:
    if isinstance(x, bool | int | float | complex):
        return x
    if not isinstance(x, jax.ShapeDtypeStruct | jax.Array | np.ndarray | np.generic):
        raise DataError(
            f"{where} is a {type(x).__name__}. Arguments are jax.ShapeDtypeStructs, arrays, numbers, "
            "nnx modules, and pytrees of them."
        )
    try:
        sharding = getattr(x, "sharding", None)
    except TypeError:  # jax looks up the mesh only now
        raise DataError(
            f"{where} is sharded by a PartitionSpec alone, which names no mesh. Let the factory take "
            "the mesh as its argument, and write NamedSharding(mesh, spec)."
        ) from None
    if isinstance(sharding, NamedSharding):
        own = sharding.mesh
        if not isinstance(own, Mesh):  # made where only the axes are known
            sharding = NamedSharding(mesh, sharding.spec)
        elif own != mesh and set(own.devices.flat) != set(mesh.devices.flat):
            raise DataError(
                f"{where} is sharded over another mesh. Let the factory take the mesh of the pod as its "
                "argument, and shard over that."
            )
    else:
        sharding = usual
    if sharding is usual and usual is not None and len(usual.spec) > len(x.shape):
        sharding = NamedSharding(mesh, PartitionSpec())  # the step itself refuses such a batch
    weak = getattr(x, "weak_type", False)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=weak)
