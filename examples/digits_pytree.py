"""Handwritten digits with a plain pytree whose parts are each trained in another way.

The first layer, the largest, is on a sharded server. The second is on every device. Heads there are
four, one for each gpu, each learning from what its own gpu sees; together they vote.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import collc
from collc import strategy

BATCH, EPOCHS = 64, 20

mesh = jax.make_mesh((2, 4), ("host", "gpu"))
plan = collc.plan(mesh, {"gpu": "ring", "host": "halving"})
s = collc.strategies(
    {
        "first/*": strategy.server(plan),
        "heads/*": strategy.local("gpu"),  # a mean over the hosts only
        "*": strategy.all_reduce(plan),
    }
)


def logits_fn(params, x):
    """[batch, 64] to [batch, 10]."""
    x = jax.nn.relu(x @ params["first"]["w"] + params["first"]["b"])
    x = jax.nn.relu(x @ params["second"]["w"] + params["second"]["b"])
    return x @ params["heads"]["w"].value + params["heads"]["b"].value  # this gpu's own


def loss_fn(params, batch):
    """The mean over this device's examples."""
    logits = logits_fn(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


@jax.jit
@collc.schedule(plan, batch="batch")
def train_step(state, batch):
    """The new state, and the mean loss."""
    loss, grads = jax.value_and_grad(loss_fn)(state.pull(), batch)
    return state.push(grads), collc.pmean(loss)


@jax.jit
@collc.schedule(plan)
def accuracy(state, x, label):
    """The share of the digits that the four heads recognise together: x is whole on each device."""
    votes = collc.pmean(jax.nn.softmax(logits_fn(state.pull(), x)))
    return (votes.argmax(axis=-1) == label).mean()


def layer(key, *shape):
    """Weights [..., inputs, outputs] and biases [..., outputs]."""
    w = jax.random.normal(key, shape) * (2 / shape[-2]) ** 0.5
    return {"w": w, "b": jnp.zeros((*shape[:-2], shape[-1]))}


pixels, labels = load_digits(return_X_y=True)  # 1797 images of 8 x 8, from 0 to 16
pixels = (pixels / 16).astype(np.float32)
x, held_x, label, held_label = train_test_split(
    pixels, labels.astype(np.int32), test_size=0.2, random_state=0
)
usable = len(x) // BATCH * BATCH  # the last batch of an epoch is short: it is left out

first, second, heads = jax.random.split(jax.random.key(0), 3)
params = {
    "first": layer(first, 64, 128),
    "second": layer(second, 128, 64),
    "heads": {k: collc.Ranked(v, ("gpu",)) for k, v in layer(heads, 4, 64, 10).items()},
}
print(s.explain(params))

# The norm is that of one model, shards put together and every head counted once.
adam = optax.chain(collc.clip_by_global_norm(1.0), optax.adam(3e-3))
state = collc.server(s, adam).init(params)

order = np.random.default_rng(0)
for epoch in range(EPOCHS):
    losses = []
    for rows in order.permutation(len(x))[:usable].reshape(-1, BATCH):
        state, loss = train_step(state, {"x": x[rows], "label": label[rows]})
        losses.append(float(loss))  # waits: see docs/steps.md, on virtual CPU devices
    print(f"epoch {epoch:2d}  loss {np.mean(losses):.4f}")

recognised = float(accuracy(state, held_x, held_label))
print(
    f"held-out accuracy {recognised:.1%} of {len(held_x)} digits; {int(state.skipped)} steps skipped"
)
assert recognised >= 0.95
