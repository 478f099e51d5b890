"""collc.sync with micro-batches: the last one reduces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import collc

from .asked import collectives
from .losses import LAYERS, LOSSES, W, X, equal, same, scanned, whole


def whole_sync(loss):
    """The head and the layers in syncs of their own."""

    def synced(w, batch):
        return loss({**w, "head": collc.sync(w["head"])}, batch, collc.sync)

    return synced


@pytest.mark.parametrize(
    ("name", "k"),
    [("scan", 4), *((name, 2) for name in LOSSES if name not in ("inner vmap", "vmap"))],
)
def test_of_micro_batches_only_the_last_reduces(plan, name, k):
    grad = collc.value_and_grad(whole_sync(LOSSES[name]), plan, microbatches=k)
    equal(jax.jit(grad)(W, X), whole(name))
    asked = list(collectives(jax.make_jaxpr(grad)(W, X)))
    assert sum(size * times for _, size, times in asked) == 27 + 9 + 3 + 1  # once, and the loss
    assert len(asked) > 2  # and not at the end


def test_sums_are_kept_wide(plan):
    """On each device 1, then 7 times 1/256: in bfloat16 the small ones vanish one by one."""
    x = np.tile(np.array([1.0] + [2.0**-8] * 7), 8).astype(jnp.bfloat16)

    def loss(w, batch):
        return (collc.sync(w) * batch).sum()

    grad = collc.value_and_grad(loss, plan, microbatches=8)
    _, found = jax.jit(grad)(jnp.bfloat16(1), x)
    assert found.dtype == jnp.bfloat16
    assert float(found) == float(jnp.bfloat16((1 + 7 * 2.0**-8) / 8))
    assert ("bfloat16", 1, 1) in list(collectives(jax.make_jaxpr(grad)(jnp.bfloat16(1), x)))


def twice(w, batch):
    """Tied weights: two syncs of one parameter, to which a sum is not to be added twice."""
    return (batch @ collc.sync(w["layers"]["w"][0]) @ collc.sync(w["layers"]["w"][0])).sum(1).mean()


def beside(w, batch):
    """A parameter that is used beside its sync."""
    decay = sum((leaf**2).sum() for leaf in jax.tree.leaves(w))
    return scanned(w, batch, collc.sync) + decay


def shared(w, batch):
    """One parameter in every iteration."""

    def layer(x, _):
        return x @ collc.sync(w["layers"]["w"][1]), None

    return lax.scan(layer, batch, length=2)[0].sum(1).mean()


def scaled(w, batch):
    """What is synced is not the parameter itself."""
    return (batch @ collc.sync(w["head"] * 2)).mean()


def overlapping(w, batch):
    stack = w["layers"]["w"]
    return (batch @ collc.sync(stack[:2]).sum(0) @ collc.sync(stack[1:]).sum(0)).sum(1).mean()


def in_a_branch(w, batch):
    return lax.cond(w["head"][0] > 0, lambda v: (batch @ collc.sync(v)).mean(), jnp.sum, w["head"])


def in_aux_too(w, batch):
    """A metric takes the layers through a sync of its own."""
    metric = collc.pmean(lax.stop_gradient(scanned(w, batch, collc.sync)))
    return scanned(w, batch, collc.sync), metric


@pytest.mark.parametrize(
    "loss", [twice, beside, shared, scaled, overlapping, in_a_branch, in_aux_too]
)
def test_other_uses_are_right_too(plan, loss):
    def bare(w, batch):
        return loss(w, batch)

    aux = loss is in_aux_too
    found = jax.jit(collc.value_and_grad(bare, plan, microbatches=4, has_aux=aux))(W, X)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collc, "sync", same, raising=False)
        patch.setattr(collc, "pmean", same, raising=False)
        expected = jax.jit(jax.value_and_grad(bare, has_aux=aux))(W, X)
    equal(found[1], expected[1])
    equal(found[0][0] if aux else found[0], expected[0][0] if aux else expected[0])


def test_parts_and_casts_of_a_parameter(plan):
    def loss(w, batch, sync=same):
        q, k = jnp.split(w["qk"], 2)
        first, second = (sync(x.astype(jnp.bfloat16)).astype(jnp.float32) for x in (q, k.T))
        return ((batch @ first) * (batch @ second)).sum() + (
            batch @ sync(w["b"].reshape(3, 1))
        ).sum()

    w = {"qk": np.ones((6, 3), np.float32), "b": np.ones(3, np.float32)}
    x = np.where(np.arange(32)[:, None] == 5, X, 0)  # exact in bfloat16: one rank has data
    grad = collc.value_and_grad(lambda w, b: loss(w, b, collc.sync), plan, microbatches=2)
    equal(jax.jit(grad)(w, x), jax.jit(collc.value_and_grad(loss, plan, microbatches=2))(w, x))
    asked = sorted(collectives(jax.make_jaxpr(grad)(w, x)))
    assert asked == [("bfloat16", 9, 1)] * 2 + [("float32", 1, 1), ("float32", 3, 1)]


def test_several_arguments_and_auxiliary_results(plan):
    def loss(head, layers, batch, sync=same):
        y = scanned({"layers": layers, "head": sync(head)}, batch, sync)
        return y, {"each": collc.Batch(batch[:, 0]), "most": lax.stop_gradient(y)}

    def synced(head, layers, batch):
        y, aux = loss(head, layers, batch, collc.sync)
        return y, aux | {"most": collc.pmax(aux["most"])}

    args = W["head"], W["layers"], X
    grad = collc.value_and_grad(synced, plan, argnums=(1, 0), has_aux=True, microbatches=2)
    (value, aux), grads = jax.jit(grad)(*args)
    expected = jax.jit(jax.value_and_grad(loss, argnums=(1, 0), has_aux=True))(*args)
    equal((value, grads), (expected[0][0], expected[1]))
    equal(aux["each"], X[:, 0])
    assert aux["most"].shape == (2,)
    asked = list(collectives(jax.make_jaxpr(grad)(*args)))
    assert sum(size * times for _, size, times in asked) == 39 + 1 + 2  # and pmax of each piece


def test_a_loop_written_by_hand(plan):
    @jax.jit
    @collc.schedule(plan, batch="batch")
    def step(w, batch):
        first, last = jnp.split(batch, 2)
        so_far = jax.grad(scanned)(w, first)

        def loss(w):
            return scanned(collc.sync(w, add=so_far), last)

        return jax.grad(loss)(w)

    equal(step(W, X), jax.tree.map(lambda g: 2 * g, whole()[1]))


def test_sums_are_sliced_beside_their_parameters(plan):
    @jax.jit
    @collc.schedule(plan, batch="batch")
    def step(layers, batch):
        sums = jax.tree.map(jnp.ones_like, layers)

        def loss(layers, sums):
            w = {"layers": (layers, sums), "head": jnp.ones(3)}
            return scanned(w, batch, lambda pair: collc.sync(pair[0], add=pair[1]))

        stacked = jax.vmap(lambda p, s: collc.sync(p, add=s)["w"] * 2)
        both = jax.grad(lambda p: stacked(p, sums).sum())(layers)
        return jax.grad(loss)(layers, sums), both

    found, both = step(W["layers"], X)
    expected = jax.jit(jax.grad(scanned))(W | {"head": np.ones(3, np.float32)}, X)["layers"]
    equal(found, jax.tree.map(lambda g: g + 1, expected))
    equal(both, {"w": np.full((LAYERS, 3, 3), 3.0), "b": np.ones((LAYERS, 3))})
