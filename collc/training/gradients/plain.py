"""``collc.value_and_grad``: ``jax.value_and_grad`` over a plan, under plain ``jit``."""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from collc.errors import DataError, StepError
from collc.lowering.collectives import pmean
from collc.planning.plan import Plan, check_plan
from collc.training.gradients.pieces import Pieces
from collc.training.modules import is_module
from collc.training.step import Step, argument_names


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
    if not callable(loss_fn):
        raise StepError(f"collc.value_and_grad takes a loss function, not {loss_fn!r}.")
    signature = inspect.signature(loss_fn)
    names = list(signature.parameters)
    argnums, positions = positions_of(argnums, loss_fn, signature)
    differentiated = [names[i] for i in positions]
    rest = tuple(name for name in names if name not in differentiated)
    batches = rest if batch is None else argument_names(batch)
    for name in batches:
        if name in differentiated:
            raise StepError(f"batch={name!r} is differentiated (argnums={argnums!r}): not both.")
    if specs is not None and not _partial(plan):
        raise StepError("specs= has no effect: the plan takes all axes of the mesh. Drop it.")
    if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
        raise DataError(f"microbatches is a positive integer, not {microbatches!r}")

    @functools.wraps(loss_fn)
    def step(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        split = [
            name for name, x in bound.arguments.items() if name in batches and not is_module(x)
        ]
        bound.apply_defaults()  # so that positions are those of the signature
        values = bound.arguments
        nnx = sys.modules.get("flax.nnx") if is_module(values[differentiated[0]]) else None

        def local(*args: Any) -> Any:
            here: Any = dict(zip(values, args, strict=True))
            call = inspect.BoundArguments(signature, here)
            return loss_fn(*call.args, **call.kwargs)

        def grad_of(loss: Callable[..., Any]) -> Callable[..., Any]:
            return (nnx or jax).value_and_grad(loss, argnums=argnums, has_aux=has_aux)

        if microbatches == 1:
            out, grads = grad_of(local)(*values.values())
        else:
            wrt = differentiated if isinstance(argnums, tuple) else differentiated[0]
            out, grads = Pieces(values, split, microbatches, has_aux).gradient(local, grad_of, wrt)
        value, aux = out if has_aux else (out, None)
        known = specs if specs is not None else metadata(grads)
        sharded = (PartitionSpec(), known) if known is not None and _partial(plan) else None
        value, grads = pmean((value, grads), specs=sharded)
        return ((value, aux) if has_aux else value), grads

    called = {"[0][0]": "value", "[0][1]": "aux"} if has_aux else {"[0]": "value"}
    return Step(step, plan, batches, named=batch is not None, called={**called, "[1]": "grads"})


def positions_of(
    argnums: Any, loss_fn: Callable[..., Any], signature: inspect.Signature
) -> tuple[Any, list[int]]:
    """argnums without negative numbers, and its positions among the arguments that have one."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    count = sum(p.kind in positional for p in signature.parameters.values())
    each = argnums if isinstance(argnums, list | tuple) else (argnums,)
    numbers = [getattr(x, "argnum", x) for x in each]  # nnx.DiffState has one
    numbers = [i + count if type(i) is int and -count <= i < 0 else i for i in numbers]
    name = getattr(loss_fn, "__name__", "the loss")
    if not numbers or not all(type(i) is int and 0 <= i < count for i in numbers):
        last = f"0 to {count - 1}" if count else "none, it has no positional arguments"
        raise StepError(f"argnums={argnums!r}: the positions of {name}'s arguments are {last}.")
    if len(set(numbers)) < len(numbers):
        raise StepError(f"argnums={argnums!r} names an argument twice.")
    pairs = zip(each, numbers, strict=True)
    same = [dataclasses.replace(x, argnum=i) if hasattr(x, "argnum") else i for x, i in pairs]
    return (tuple(same) if isinstance(argnums, list | tuple) else same[0]), numbers


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
