"""A model's train step and its arguments as shapes alone: what is compiled for a pod, on a laptop."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from collc.errors import DataError, nearest
from collc.models import transformer
from collc.planning.plan import Plan
from collc.training.lm.compare import Step
from collc.training.lm.steps import lax_step, planned_step
from collc.training.lm.train import model_config

FAMILIES = ("transformer",)
BATCH, SEQ = 8, 1024  # of one device: examples, and tokens that an example predicts


def abstract_step(
    name: str, by: Plan | Mesh, *, batch: int = BATCH, seq: int = SEQ
) -> tuple[Step, tuple[transformer.Transformer, nnx.Optimizer, jax.ShapeDtypeStruct]]:
    """A train step with AdamW and its (model, optimizer, batch), for ``step.trace(*arguments)``.

    No array is made: what stands in model and optimizer are ``jax.ShapeDtypeStruct``s, replicated,
    and the batch [batch * devices, seq + 1] is split over all axes of the mesh. Model and optimizer
    are donated, as one who trains does. ``name``: as in "transformer:medium". ``by``: the plan that
    reduces; or a mesh, where plain JAX does, without collc. Raises DataError.
    """
    config = model_config(_size(name))
    for what, value in (("batch", batch), ("seq", seq)):
        if value < 1:
            raise DataError(f"{what} is {value}, but it is at least 1.")
    mesh = by.mesh if isinstance(by, Plan) else by
    step = planned_step(by, donate=True) if isinstance(by, Plan) else lax_step(by, donate=True)

    def fresh() -> tuple[transformer.Transformer, nnx.Optimizer]:
        model = transformer.Transformer(config, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(3e-4, b2=0.95), wrt=nnx.Param)

    model, optimizer = nnx.eval_shape(fresh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    nnx.update(
        (model, optimizer),
        jax.tree.map(lambda x: _placed(x, everywhere), nnx.state((model, optimizer))),
    )
    text = jax.ShapeDtypeStruct(
        (batch * mesh.size, seq + 1),
        jnp.uint8 if config.vocabulary <= 256 else jnp.int32,
        sharding=NamedSharding(mesh, PartitionSpec(mesh.axis_names)),
    )
    return step, (model, optimizer, text)


def _size(name: str) -> str:
    """The size in "transformer:size"."""
    family, colon, size = name.partition(":")
    if not colon:
        raise DataError(f"{name!r} names no model with its size. Write it as transformer:medium.")
    if family not in FAMILIES:
        raise DataError(f"There is no model {family!r}. {nearest(family, FAMILIES)}")
    return size


def _placed(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
