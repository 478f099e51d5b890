"""collc.sync on nnx modules: in nnx.scan and nnx.remat, with micro-batches, with shared weights."""

import jax
import numpy as np
import pytest
from flax import nnx

import collc
from collc.errors import StepError

from .asked import collectives

BOTH = ("host", "gpu")
LAYERS = 3
X = (np.arange(96, dtype=np.float32).reshape(32, 3) % 5) - 2


def same(p):
    return p


class Block(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, axis_name=BOTH, rngs=rngs)

    def __call__(self, x):
        return x + self.norm(self.dense(x))


class Stack(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return Block(rngs)

        self.blocks = make(rngs)
        self.head = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x, sync=same, remat=False):
        def layer(x, block):
            return sync(block)(x)

        layer = nnx.remat(layer) if remat else layer
        run = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return sync(self.head)(run(x, self.blocks))


def model_loss(model, batch):
    return (model(batch) ** 2).mean()


def model_synced(model, batch):
    return (model(batch, collc.sync, remat=True) ** 2).mean()


@pytest.mark.parametrize("k", [1, 2])
def test_modules_in_nnx_scan_and_remat(plan, k):
    a, b = Stack(nnx.Rngs(0)), Stack(nnx.Rngs(0))
    found = nnx.jit(collc.value_and_grad(model_synced, plan, microbatches=k))(a, X)
    expected = nnx.jit(collc.value_and_grad(model_loss, plan, microbatches=k))(b, X)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    # Batch statistics move in the copy as in the module.
    stats = [jax.tree.leaves(nnx.state(m, nnx.BatchStat)) for m in (a, b)]
    assert np.abs(stats[0][0]).max() > 0
    for x, y in zip(*stats, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    # Each parameter is reduced once: 3 blocks of 9 + 3 + 3 + 3, then the head's 3 + 1.
    graph, state = nnx.split(a)

    def run(state, x):
        grad = collc.value_and_grad(model_synced, plan, microbatches=k)
        return grad(nnx.merge(graph, state), x)[1]

    asked = list(collectives(jax.make_jaxpr(run)(state, X)))
    assert ("float32", 18, LAYERS) in asked and ("float32", 4, 1) in asked
    assert sum(size * times for _, size, times in asked) == 3 * 18 + 4 + 1


def test_a_step_on_a_module_with_shared_weights(plan):
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.first = self.second = nnx.Linear(3, 3, rngs=rngs)

        def __call__(self, x):
            return self.second(self.first(x))

    def step(model, batch):
        grads = nnx.grad(lambda m: collc.sync(m)(batch).mean())(model)
        return collc.pmean(grads), nnx.grad(lambda m: m(batch).mean())(model)

    def reduced_after(model, batch):
        one, other = step(model, batch)
        return one, collc.pmean(other)

    model = Tied(nnx.Rngs(0))
    one, other = nnx.jit(collc.schedule(plan, batch="batch")(reduced_after))(model, X)
    for x, y in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


def test_a_module_that_is_no_pytree(plan):
    class Opaque(nnx.Module, pytree=False):
        def __init__(self, rngs):
            self.dense = nnx.Linear(3, 1, rngs=rngs)

    step = collc.schedule(plan, batch="batch")(lambda m, batch: collc.sync(m).dense(batch).mean())
    with pytest.raises(StepError, match="Opaque is no pytree, so it cannot be copied"):
        nnx.eval_shape(step, Opaque(nnx.Rngs(0)), X)
