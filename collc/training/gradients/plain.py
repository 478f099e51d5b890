"""``collc.value_and_grad``: ``jax.value_and_grad`` over a plan, under plain ``jit``."""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from collc.errors import StepError
from collc.lowering.collectives import pmean
from collc.planning.plan import Plan, check_plan
from collc.training.gradients.loss import check_microbatches, loss_of
from collc.training.gradients.pieces import Pieces
from collc.training.step import Step


def value_and_grad(
    loss_fn: Callable[..., Any],
    plan: Plan,
    *,
    argnums: Any = 0,
    has_aux: bool = False,
    batch: str | Sequence[str] | None = None,
    microbatches: int = 1,
    specs: Any = None,
) -> Callable[..., Any]:
    """A drop-in for ``jax.value_and_grad`` (``nnx.value_and_grad`` where it is given a module).

    ``loss_fn`` is the loss of one device's part of the batch, a mean over its examples; the value
    and the gradients come back as means over all devices. Only the plan's axes are manual, so axes
    for tensor parallelism and FSDP stay with XLA.

    ``argnums``: the positions to differentiate, integers from 0 (negative ones count from the last
    positional argument that ``loss_fn`` has), or ``nnx.DiffState`` for modules.
    ``batch``: names of the arguments that are split on dimension 0; by default all that are not
    differentiated. ``microbatches=k`` takes each device's part in k pieces, adds up their gradients
    in at least float32, and reduces once: in the backward of the last piece what passes one
    ``collc.sync``, all else at the end. What ``has_aux`` returns is stacked, [k, ...], but
    ``collc.Batch`` is put together again. ``specs``: the sharding of the differentiated arguments
    over automatic axes, a pytree of PartitionSpec like them, where types or Flax metadata do not
    say it.

    Auxiliary results have to be the same on all ranks: reduce them inside, or mark them with
    ``collc.Batch``. Raises StepError where they are not, DataError for batches that do not divide.
    """
    check_plan(plan, "collc.value_and_grad")
    loss = loss_of(loss_fn, argnums, has_aux, batch)
    check_microbatches(microbatches)
    if specs is not None and not _partial(plan):
        raise StepError("specs= has no effect: the plan takes all axes of the mesh. Drop it.")

    @functools.wraps(loss_fn)
    def step(*args: Any, **kwargs: Any) -> Any:
        values, split = loss.bound(args, kwargs)

        def local(*args: Any) -> Any:
            return loss.call(dict(zip(values, args, strict=True)))

        def grad_of(function: Callable[..., Any]) -> Callable[..., Any]:
            return loss.grad(function, values)

        if microbatches == 1:
            out, grads = grad_of(local)(*values.values())
        else:
            pieces = Pieces(values, split, microbatches, has_aux)
            out, grads = pieces.gradient(local, grad_of, loss.wrt)
        value, aux = loss.unpacked(out)
        known = specs if specs is not None else metadata(grads)
        sharded = (PartitionSpec(), known) if known is not None and _partial(plan) else None
        value, grads = pmean((value, grads), specs=sharded)
        return loss.packed(value, aux), grads

    called = {"[0][0]": "value", "[0][1]": "aux"} if has_aux else {"[0]": "value"}
    named = {**called, "[1]": "grads"}
    return Step(step, plan, loss.batches, named=batch is not None, called=named)


def _partial(plan: Plan) -> bool:
    """Whether some axes of the mesh stay with XLA."""
    return any(n > 1 for axis, n in plan.sizes if axis not in plan.axes)


def metadata(grads: Any) -> Any:
    """The PartitionSpecs that Flax keeps beside values, as a pytree like the gradients; or None."""
    nnx, linen = sys.modules.get("flax.nnx"), sys.modules.get("flax.linen")

    def boxed(x: Any) -> bool:
        return (nnx is not None and isinstance(x, nnx.Variable)) or (
            linen is not None and isinstance(x, linen.Partitioned)
        )

    found = False

    def spec(x: Any) -> Any:
        nonlocal found
        names: Any = None
        if linen is not None and isinstance(x, linen.Partitioned):
            names = x.names
        elif boxed(x):
            data = x.get_metadata()
            keys = ("out_sharding", "sharding_names", "sharding")
            names = next((data[k] for k in keys if data.get(k)), None)
        found = found or names is not None
        one = PartitionSpec(*names) if names is not None else PartitionSpec()
        return jax.tree.map(lambda _: one, x)

    specs = jax.tree.map(spec, grads, is_leaf=boxed)
    return specs if found else None
