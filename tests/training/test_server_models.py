"""A server for the parameters of NNX modules and of Linen models."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import collc
from collc.training.paths import named_leaves


def test_nnx_state(plan):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(3, 5, rngs=rngs)
            self.tied = self.first.kernel  # one variable under two names
            self.last = nnx.Linear(5, 1, rngs=rngs)

        def __call__(self, x):
            return self.last(
                jnp.tanh(self.first(x)) @ self.tied.get_value().T @ self.tied.get_value()
            )

    model = Model(nnx.Rngs(0))
    graph, params = nnx.split(model, nnx.Param)
    assert [path for path, _ in named_leaves(params)] == [
        "first/bias",
        "first/kernel",
        "last/bias",
        "last/kernel",
    ]

    def loss(params, batch):
        return jnp.mean((nnx.merge(graph, params)(batch) - 1) ** 2)

    tx = optax.adam(0.1)
    state = collc.server(plan, tx).init(params)

    @jax.jit
    @collc.schedule(plan, batch="batch")
    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state.pull(), batch)
        return state.push(grads), collc.pmean(value)

    @jax.jit
    @collc.schedule(plan, batch="batch")
    def gathered_inside(state, batch):
        grads = jax.grad(lambda p: loss(collc.all_gather(p), batch))(state.params)
        return state.push(grads)

    batch = jax.random.normal(jax.random.key(1), (16, 3))
    updates, _ = tx.update(jax.grad(loss)(params, batch), tx.init(params), params)
    expected = optax.apply_updates(params, updates)
    for new in (step(state, batch)[0], gathered_inside(state, batch)):
        got = jax.jit(collc.schedule(plan)(lambda state: state.pull()))(new)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), got, expected)


def test_linen_params(plan):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            boxed = nn.with_partitioning(nn.initializers.lecun_normal(), (None, None))
            return nn.Dense(1)(jnp.tanh(nn.Dense(5, kernel_init=boxed)(x)))

    model = Model()
    batch = jax.random.normal(jax.random.key(1), (16, 3))
    params = model.init(jax.random.key(0), batch)["params"]

    def loss(params, batch):
        return jnp.mean((model.apply({"params": params}, batch) - 1) ** 2)

    tx = optax.adam(0.1)
    chosen = collc.strategies(
        {
            "Dense_0/*": collc.strategy.server(plan),
            "*": collc.strategy.all_reduce(plan),
        }
    )
    state = collc.server(chosen, tx).init(params)

    @jax.jit
    @collc.schedule(plan, batch="batch")
    def step(state, batch):
        return state.push(jax.grad(loss)(state.pull(), batch))

    updates, _ = tx.update(jax.grad(loss)(params, batch), tx.init(params), params)
    expected = optax.apply_updates(params, updates)
    got = jax.jit(collc.schedule(plan)(lambda state: state.pull()))(step(state, batch))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), got, expected)
