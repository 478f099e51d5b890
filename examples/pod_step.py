"""A step that is compiled for a pod on a laptop, and trained on what is there.

    collc compile examples/pod_step.py:train_step --pod h100:64x8 --plan gpu=ring,host=tree

`train_step_shapes` says which arguments it takes, without making any.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp

import collc

LAYERS, WIDTH, BATCH = 4, 256, 32  # examples of one device


def loss_fn(params, batch):
    """How far a residual network is from the identity, on average."""

    def layer(x, w):
        return x + jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(layer, batch, params)
    return jnp.mean((x - batch) ** 2, dtype=jnp.float32)


def train_step(params, batch):
    """The new parameters, and the mean loss: on one device, with its share of the batch."""
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    grads = collc.pmean(grads)
    return jax.tree.map(lambda w, g: w - g, params, grads), collc.pmean(loss)


def train_step_shapes(mesh):
    """The arguments by name, for all devices of the mesh together. Nothing is allocated."""
    return {
        "params": jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.bfloat16),
        "batch": jax.ShapeDtypeStruct((mesh.size * BATCH, WIDTH), jnp.bfloat16),
    }


if __name__ == "__main__":
    mesh = jax.make_mesh((2, 4), ("host", "gpu"))
    plan = collc.plan(mesh, {"gpu": "ring", "host": "tree"})
    step = jax.jit(collc.schedule(plan, batch="batch")(train_step))
    shapes = train_step_shapes(mesh)
    keys = dict(zip(shapes, jax.random.split(jax.random.key(0))))
    values = {k: 0.1 * jax.random.normal(keys[k], s.shape, s.dtype) for k, s in shapes.items()}
    params, first = step(**values)
    for _ in range(20):
        params, loss = step(params, values["batch"])
    print(f"loss {first:.5f} -> {loss:.5f}")
    assert loss < first
