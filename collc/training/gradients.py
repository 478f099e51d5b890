"""``collc.value_and_grad``: ``jax.value_and_grad`` over a plan, under plain ``jit``."""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from collc.errors import DataError, StepError
from collc.lowering.collectives import pmean
from collc.planning.plan import Plan
from collc.training.modules import is_module
from collc.training.step import Step


def value_and_grad(
    loss_fn: Callable[..., Any],
    plan: Plan,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    batch: str | Sequence[str] | None = None,
    microbatches: int = 1,
    specs: Any = None,
) -> Callable[..., Any]:
    """A drop-in for ``jax.value_and_grad`` (``nnx.value_and_grad`` where it is given a module).

    ``loss_fn`` is the loss of one device's part of the batch, a mean over its examples; the value
    and the gradients come back as means over all devices. Only the plan's axes are manual, so axes
    for tensor parallelism and FSDP stay with XLA.

    ``batch``: names of the arguments that are split on dimension 0; by default all that are not
    differentiated. ``microbatches=k`` takes each device's part in k pieces, adds up their gradients
    in at least float32, and reduces once; what ``has_aux`` returns is stacked, [k, ...]. ``specs``:
    the sharding of the differentiated arguments over automatic axes, a pytree of PartitionSpec like
    them, where types or Flax metadata do not say it.

    Auxiliary results have to be the same on all ranks: reduce them inside, or mark them with
    ``collc.Batch``. Raises StepError where they are not, DataError for batches that do not divide.
    """
    signature = inspect.signature(loss_fn)
    names = list(signature.parameters)
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if not numbers or any(not -len(names) <= i < len(names) for i in numbers):
        raise StepError(f"argnums={argnums!r}: {loss_fn} has {len(names)} arguments")
    differentiated = [names[i] for i in numbers]
    if batch is None:
        batch = [name for name in names if name not in differentiated]
    batches = (batch,) if isinstance(batch, str) else tuple(batch)
    if specs is not None and not _partial(plan):
        raise StepError("specs= has no effect: the plan takes all axes of the mesh. Drop it.")
    if not isinstance(microbatches, int) or microbatches < 1:
        raise DataError(f"microbatches is a positive integer, not {microbatches!r}")

    @functools.wraps(loss_fn)
    def step(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        values = bound.arguments
        leads = differentiated[0]
        nnx = sys.modules.get("flax.nnx") if is_module(values[leads]) else None

        def local(*args: Any) -> Any:
            return loss_fn(*inspect.BoundArguments(signature, _bound(bound, args)).args)

        grad_of = (nnx or jax).value_and_grad  # type: ignore[union-attr]
        grad = grad_of(local, argnums=argnums, has_aux=has_aux)
        ordered = [values[name] for name in values]
        if microbatches == 1:
            out, grads = grad(*ordered)
        else:
            out, grads = _accumulated(grad, bound, batches, microbatches, has_aux)
        value, aux = out if has_aux else (out, None)
        known = specs if specs is not None else metadata(grads)
        sharded = (PartitionSpec(), known) if known is not None and _partial(plan) else None
        value, grads = pmean((value, grads), specs=sharded)
        return ((value, aux) if has_aux else value), grads

    return Step(step, plan, batches)


def _bound(bound: inspect.BoundArguments, args: Sequence[Any]) -> Any:
    return type(bound.arguments)(zip(bound.arguments, args, strict=True))


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
        if linen is not None and isinstance(x, linen.Partitioned):
            names: Any = x.names
        elif boxed(x):
            data = x.get_metadata()
            names = next(
                (data[k] for k in ("out_sharding", "sharding_names", "sharding") if data.get(k)),
                None,
            )
        else:
            return None
        found = found or names is not None
        one = PartitionSpec(*names) if names is not None else PartitionSpec()
        return [one] * len(jax.tree.leaves(x))

    specs = jax.tree.map(spec, grads, is_leaf=boxed)
    return specs if found else None


def _accumulated(
    grad: Callable[..., Any],
    bound: inspect.BoundArguments,
    batches: Sequence[str],
    k: int,
    has_aux: bool,
) -> tuple[Any, Any]:
    """The mean of value and gradients over k pieces of this device's batch."""
    names = list(bound.arguments)
    pieces: dict[str, Any] = {}
    for name in batches:
        if name not in bound.arguments:
            continue

        def split(x: Any, name: str = name) -> Any:
            if x.shape[0] % k:
                raise DataError(
                    f"{name}: a device's part of the batch is {x.shape[0]}, which does not divide in "
                    f"microbatches={k} pieces."
                )
            return x.reshape(k, x.shape[0] // k, *x.shape[1:])

        pieces[name] = jax.tree.map(split, bound.arguments[name])
    modules = {n: v for n, v in bound.arguments.items() if is_module(v)}
    graph: Any = None
    state: Any = None
    if modules:
        from flax import nnx

        graph, state = nnx.split(modules)

    def one(state: Any, piece: dict[str, Any]) -> tuple[Any, Any, Any]:
        own = dict(modules)
        if modules:
            from flax import nnx

            own = nnx.merge(graph, state)
        args = [{**bound.arguments, **own, **piece}[name] for name in names]
        out, grads = grad(*args)
        if modules:
            from flax import nnx

            state = nnx.split(own)[1]
        return state, out, grads

    first = {name: jax.tree.map(lambda x: x[0], piece) for name, piece in pieces.items()}
    _, out, grads = jax.eval_shape(one, state, first)
    loss = out[0] if has_aux else out
    wide = jax.tree.map(lambda x: jnp.zeros(x.shape, _wide(x.dtype)), (loss, grads))

    def body(carry: Any, piece: dict[str, Any]) -> Any:
        state, sums = carry
        state, out, grads = one(state, piece)
        loss, aux = out if has_aux else (out, None)
        sums = jax.tree.map(lambda s, x: s + x.astype(s.dtype), sums, (loss, grads))
        return (state, sums), aux

    (state, sums), aux = lax.scan(body, (state, wide), pieces, length=k)
    if modules:
        from flax import nnx

        nnx.update(modules, state)
    value, total = jax.tree.map(lambda s, x: (s / k).astype(x.dtype), sums, (loss, grads))
    return ((value, aux) if has_aux else value), total


def _wide(dtype: Any) -> Any:
    """At least float32, in which gradients are added up."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
