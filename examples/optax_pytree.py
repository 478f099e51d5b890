"""A train step on a plain pytree with optax: 2 hosts × 4 gpus, virtual, on the CPU."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import optax

import collc

mesh = jax.make_mesh((2, 4), ("host", "gpu"))
plan = collc.plan(mesh, {"gpu": "ring", "host": "tree"})
adam = optax.adam(0.05)


def loss_fn(params, batch):
    """The mean over this device's examples."""
    hidden = jnp.tanh(batch["x"] @ params["in"])
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


@jax.jit
@collc.schedule(plan, batch="batch")
def train_step(params, opt_state, batch):
    """The new parameters and optimizer state, and the mean loss."""
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)  # per device, as ever
    updates, opt_state = adam.update(collc.pmean(grads), opt_state, params)
    return optax.apply_updates(params, updates), opt_state, collc.pmean(loss)


key_x, key_in, key_out = jax.random.split(jax.random.key(0), 3)
x = jax.random.normal(key_x, (64, 3))
batch = {"x": x, "y": jnp.sin(x.sum(axis=1))}
params = {"in": jax.random.normal(key_in, (3, 16)), "out": jax.random.normal(key_out, (16,)) / 4}
opt_state = adam.init(params)

print(plan.explain())
for step in range(201):
    params, opt_state, loss = train_step(params, opt_state, batch)
    if step % 50 == 0:
        print(f"step {step:3d}  loss {loss:.4f}")
assert loss < 0.05
