"""The train step of `collc train`, with a plan and in plain JAX, and its evaluation."""

import functools
from collections.abc import Callable

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from collc.lowering.collectives import pmean
from collc.models import transformer
from collc.planning.plan import Plan
from collc.training.lm.compare import Step
from collc.training.step import schedule


def planned_step(plan: Plan, *, donate: bool = False) -> Step:
    """A train step whose gradients and loss the plan reduces: (model, optimizer, batch) to the mean
    loss. `donate`: the new model and optimizer take the memory of the old.
    """

    @functools.partial(nnx.jit, donate_argnums=(0, 1) if donate else ())
    @schedule(plan, batch="batch")
    def train_step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(transformer.loss)(model, batch)
        optimizer.update(model, pmean(grads))
        return pmean(loss)

    return train_step


def lax_step(mesh: jax.sharding.Mesh, *, donate: bool = False) -> Step:
    """The same step in plain JAX, without collc: what XLA's own collectives do."""
    axes = mesh.axis_names

    @functools.partial(nnx.jit, donate_argnums=(0, 1) if donate else ())
    def train_step(model, optimizer, batch):
        graph, state = nnx.split((model, optimizer))

        @functools.partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(axes)),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        def per_device(state, batch):
            model, optimizer = nnx.merge(graph, state)
            loss, grads = nnx.value_and_grad(transformer.loss)(model, batch)
            optimizer.update(model, jax.lax.pmean(grads, axes))
            return jax.lax.pmean(loss, axes), nnx.state((model, optimizer))

        loss, state = per_device(state, batch)
        nnx.update((model, optimizer), state)
        return loss

    return train_step


def evaluation_step(plan: Plan) -> Callable[[nnx.Module, jax.Array], jax.Array]:
    """(model, batch) to the mean loss over all devices."""

    @nnx.jit
    @schedule(plan, batch="batch")
    def evaluate(model, batch):
        return pmean(transformer.loss(model, batch))

    return evaluate
