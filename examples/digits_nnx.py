"""Handwritten digits with Flax NNX: the parameters are on every device, the batch is split."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import collc
from collc.models import mlp

BATCH, EPOCHS = 64, 15

mesh = jax.make_mesh((2, 4), ("host", "gpu"))
plan = collc.plan(mesh, {"gpu": "ring", "host": "tree"})
s = collc.strategies({"*": collc.strategy.all_reduce(plan)})


@nnx.jit
@collc.schedule(plan, batch=("x", "label"))
def train_step(model, optimizer, x, label):
    """Changes the model and the optimizer; returns the mean loss."""
    loss, grads = nnx.value_and_grad(mlp.loss)(model, x, label)
    optimizer.update(model, s.reduce(grads))
    return collc.pmean(loss)


@nnx.jit
@collc.schedule(plan, batch=("x", "label"))
def accuracy(model, x, label):
    """The share of the digits that are recognised; each device looks at its own."""
    return collc.pmean(mlp.accuracy(model, x, label))


pixels, labels = load_digits(return_X_y=True)  # 1797 images of 8 x 8, from 0 to 16
pixels = (pixels / 16).astype(np.float32)
x, held_x, label, held_label = train_test_split(
    pixels, labels.astype(np.int32), test_size=0.2, random_state=0
)
usable = len(x) // BATCH * BATCH  # the last batch of an epoch is short: it is left out

model = mlp.MLP(rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
print(s.explain(nnx.state(model, nnx.Param)))

order = np.random.default_rng(0)
for epoch in range(EPOCHS):
    losses = []
    for rows in order.permutation(len(x))[:usable].reshape(-1, BATCH):
        # float waits: virtual devices are threads, which too many steps in flight can lock up.
        losses.append(float(train_step(model, optimizer, x[rows], label[rows])))
    print(f"epoch {epoch:2d}  loss {np.mean(losses):.4f}")

recognised = float(accuracy(model, held_x, held_label))
print(f"held-out accuracy {recognised:.1%} of {len(held_x)} digits")
assert recognised >= 0.95
