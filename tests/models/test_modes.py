"""The language model on 8 devices: all gradients reduced in the backward, and all parameters shards."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import collc
from collc.lowering.shards import is_shard
from collc.models import transformer
from collc.models.transformer import SIZES, Transformer

TEXT = np.random.default_rng(0).integers(256, size=(16, 9), dtype=np.uint8)
FORMS = [(scan, remat) for scan in (False, True) for remat in (False, True)]


@functools.cache
def plan() -> collc.Plan:
    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("host", "gpu"), kinds, devices=jax.devices()[:8])
    return collc.plan(mesh, {"gpu": "native", "host": "native"})


@functools.cache
def form(scan: bool, remat: bool):
    """(graph, parameters) of two layers, none of whose weights is zero."""
    config = dataclasses.replace(SIZES["tiny"], layers=2, scan=scan, remat=remat)
    graph, params = nnx.split(Transformer(config, rngs=nnx.Rngs(0)))

    def moved(x):
        return x + jnp.asarray(
            np.random.default_rng(x.size).normal(scale=0.1, size=x.shape), x.dtype
        )

    return graph, jax.tree.map(moved, params)


def loss_of(graph, params, text, **given):
    return transformer.loss(nnx.merge(graph, params), text, **given)


@functools.cache
def plain(scan: bool):
    """The loss of all the text and its gradients, on one device."""
    graph, params = form(scan, False)
    return jax.jit(jax.value_and_grad(lambda p: loss_of(graph, p, TEXT)))(params)


def agree(scan, loss, grads):
    expected, tree = plain(scan)[1], jax.tree.structure(grads)
    assert tree == jax.tree.structure(expected) and tree.num_leaves > 5
    np.testing.assert_allclose(loss, plain(scan)[0], rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, expected
    )


@pytest.mark.newest_only
@pytest.mark.parametrize(("scan", "remat"), FORMS)
def test_sync_reduces_all_gradients_in_the_backward(scan, remat):
    graph, params = form(scan, remat)

    @jax.jit
    @collc.schedule(plan(), batch="text")
    def step(params, text):
        of = functools.partial(loss_of, graph, text=text, on_layer=collc.sync)
        loss, grads = jax.value_and_grad(of)(params)
        return collc.pmean(loss), grads  # which is refused where one is not reduced

    agree(scan, *step(params, TEXT))


@pytest.mark.newest_only
@pytest.mark.parametrize(("scan", "remat"), FORMS)
def test_all_gather_takes_all_parameters_in_shards(scan, remat):
    graph, params = form(scan, remat)
    server = collc.server(plan(), optax.sgd(0.1), stacked="blocks/*" if scan else ())

    @jax.jit
    @collc.schedule(plan(), batch="text")
    def step(state, text):
        of = functools.partial(loss_of, graph, text=text, on_layer=collc.all_gather)
        loss, grads = jax.value_and_grad(of)(state.params)
        assert all(map(is_shard, jax.tree.leaves(grads, is_leaf=is_shard)))
        return collc.pmean(loss), collc.all_gather(grads)

    agree(scan, *step(server.init(params), TEXT))
