"""Handwritten digits with Flax Linen: parameters and moments live on a sharded server."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import flax.linen as nn
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import collc

mesh = jax.make_mesh((2, 4), ("host", "gpu"))
plan = collc.plan(mesh, {"gpu": "ring", "host": "halving"})


class Classifier(nn.Module):
    """Ten classes, two hidden layers."""

    @nn.compact
    def __call__(self, x):
        for width in (128, 64):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(10)(x)


model = Classifier()


def loss_and_accuracy(params, batch):
    """The means over this device's examples."""
    logits = model.apply({"params": params}, batch["x"])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return each.mean(), (logits.argmax(axis=-1) == batch["label"]).mean()


@jax.jit
@collc.schedule(plan, batch="batch")
def train_step(state, batch):
    """The new state of the server, and means over all devices."""
    grad_fn = jax.value_and_grad(loss_and_accuracy, has_aux=True)
    (loss, accuracy), grads = grad_fn(state.pull(), batch)
    return state.push(grads), collc.pmean({"loss": loss, "accuracy": accuracy})


@jax.jit
@collc.schedule(plan, batch="batch")
def evaluate(state, batch):
    """The loss and the share that is recognised; each device looks at its own digits."""
    loss, accuracy = loss_and_accuracy(state.pull(), batch)
    return collc.pmean({"loss": loss, "accuracy": accuracy})


pixels, labels = load_digits(return_X_y=True)  # 1797 images of 8 x 8, from 0 to 16
pixels = (pixels / 16).astype(np.float32)
x, held_x, label, held_label = train_test_split(
    pixels, labels.astype(np.int32), test_size=0.2, random_state=0
)
data = collc.feed.batches({"x": x, "label": label}, 64, seed=0, short="drop")
held_out = {"x": held_x, "label": held_label}

# Each device keeps an eighth of each parameter and of its two moments.
params = model.init(jax.random.key(0), x[:1])["params"]
state = collc.server(plan, optax.adamw(3e-3, weight_decay=1e-4)).init(params)
done = collc.fit(
    train_step,
    state,
    data,
    steps=15 * data.per_epoch,
    evaluate=lambda state: evaluate(state, held_out),
)
recognised = float(evaluate(done.state, held_out)["accuracy"])
print(f"held-out accuracy {recognised:.1%} of {len(held_x)} digits")
assert recognised >= 0.95
