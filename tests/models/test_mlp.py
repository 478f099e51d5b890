"""The perceptron: shapes and dtypes, its loss and accuracy by hand, and that it learns digits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from sklearn.datasets import load_digits

from collc.models import mlp
from collc.models.mlp import MLP, Config


def test_shapes_and_dtypes():
    dtype = jnp.bfloat16
    config = Config(features=5, hidden=(7, 3), classes=4, dtype=dtype, param_dtype=dtype)
    model = MLP(config, rngs=nnx.Rngs(0))
    logits = model(jnp.ones((2, 6, 5)))
    assert logits.shape == (2, 6, 4) and logits.dtype == jnp.float32
    params = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert {leaf.dtype for leaf in params} == {jnp.dtype(dtype)}
    assert sum(leaf.size for leaf in params) == 5 * 7 + 7 + 7 * 3 + 3 + 3 * 4 + 4


def test_without_hidden_layers_it_is_a_softmax_of_one_product():
    model = MLP(Config(features=2, hidden=(), classes=2), rngs=nnx.Rngs(0))
    model.head.kernel.set_value(jnp.eye(2))
    x, label = jnp.array([[1.0, 0.0], [0.0, 3.0], [2.0, 0.0]]), jnp.array([0, 1, 1])
    # Of two logits that are d apart: ln(1 + e^-d) where the greater one is right.
    expected = np.log1p(np.exp([-1.0, -3.0, 2.0])).mean()
    np.testing.assert_allclose(mlp.loss(model, x, label), expected, rtol=1e-6)
    np.testing.assert_allclose(mlp.accuracy(model, x, label), 2 / 3, rtol=1e-6)


def test_a_negative_input_passes_no_hidden_layer():
    model = MLP(Config(features=1, hidden=(1,), classes=2), rngs=nnx.Rngs(0))
    model.hidden[0].kernel.set_value(jnp.ones((1, 1)))
    model.head.kernel.set_value(jnp.array([[1.0, -1.0]]))
    np.testing.assert_array_equal(model(jnp.array([[-2.0], [3.0]])), [[0, 0], [3, -3]])


def test_it_learns_digits():
    pixels, label = load_digits(return_X_y=True)
    x = jnp.asarray(pixels / 16, jnp.float32)
    shuffled = np.random.default_rng(0).permutation(len(x))
    train, held = shuffled[360:], shuffled[:360]
    model = MLP(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, label):
        loss, grads = nnx.value_and_grad(mlp.loss)(model, x, label)
        optimizer.update(model, grads)
        return loss

    first = step(model, optimizer, x[train], label[train])
    assert abs(float(first) - np.log(10)) < 0.5  # a fresh one knows nothing
    for _ in range(60):
        last = step(model, optimizer, x[train], label[train])
    assert float(last) < 0.1
    assert mlp.accuracy(model, x[held], label[held]) >= 0.95


@pytest.mark.parametrize("bad", [{"features": 0}, {"classes": 0}, {"hidden": (3, 0)}])
def test_bad_sizes_are_refused(bad: dict[str, Any]):
    with pytest.raises(ValueError, match="at least 1"):
        Config(**bad)
