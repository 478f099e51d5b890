"""A Flax Linen step with TrainState, dropout per rank, and per-example results."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import flax.linen as nn
import jax
import optax
from flax.training.train_state import TrainState

import collc

mesh = jax.make_mesh((2, 4), ("host", "gpu"))
plan = collc.plan(mesh, {"gpu": "ring", "host": "tree"})


class Classifier(nn.Module):
    """Two classes, one hidden layer."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dropout(0.1, deterministic=not train)(nn.relu(nn.Dense(32)(x)))
        return nn.Dense(2)(x)


@jax.jit
@collc.schedule(plan, batch=("x", "label"))
def train_step(state, key, x, label):
    """The new state, the mean loss, and the loss of each example."""

    def loss_fn(params):
        rngs = {"dropout": collc.rank_key(key)}  # another mask on each device
        logits = state.apply_fn({"params": params}, x, train=True, rngs=rngs)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        return each.mean(), each

    (loss, each), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=collc.pmean(grads)), collc.pmean(loss), collc.Batch(each)


model = Classifier()
x = jax.random.normal(jax.random.key(1), (64, 4))
label = (x[:, 0] * x[:, 1] > 0).astype(int)
params = model.init(jax.random.key(0), x, train=False)["params"]
state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.02))

for step in range(101):
    state, loss, each = train_step(state, jax.random.key(step), x, label)
    if step % 25 == 0:
        print(f"step {step:3d}  loss {loss:.4f}  worst example {each.argmax()} ({each.max():.2f})")
assert each.shape == (64,) and loss < 0.3
