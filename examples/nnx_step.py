"""A Flax NNX step: the module and the optimizer are changed in place, batch statistics are ranked."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import collc

mesh = jax.make_mesh((2, 4), ("host", "gpu"))
plan = collc.plan(mesh, {"gpu": "ring", "host": "tree"})


class Model(nnx.Module):
    """One hidden layer, normalised."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(3, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.outer = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        return self.outer(jnp.tanh(self.norm(self.inner(x))))[:, 0]


def loss_fn(model, x, y):
    """The mean over this device's examples."""
    return jnp.mean((model(x) - y) ** 2)


@nnx.jit
@collc.schedule(plan, batch=("x", "y"))
def train_step(model, optimizer, x, y):
    """Changes the model and the optimizer; returns the mean loss."""
    loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
    optimizer.update(model, collc.pmean(grads))
    return collc.pmean(loss)


model = Model(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(0.02), wrt=nnx.Param)
collc.ranked(model, plan, of=nnx.BatchStat)  # every device keeps statistics of its own batches

x = jax.random.normal(jax.random.key(1), (512, 3))
y = jnp.sin(x.sum(axis=1))
for step in range(101):
    loss = train_step(model, optimizer, x, y)
    if step % 25 == 0:
        print(f"step {step:3d}  loss {loss:.4f}")
print("statistics:", model.norm.mean.get_value().shape)  # [host, gpu, feature]
assert loss < 0.15 and model.norm.mean.get_value().shape == (2, 4, 16)
