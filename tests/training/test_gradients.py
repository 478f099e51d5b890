"""collc.value_and_grad: a drop-in for jax's and nnx's, with microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import collc
from collc.errors import DataError, StepError

X = np.arange(96, dtype=np.float32).reshape(32, 3) / 96
WHOLE = np.arange(96, dtype=np.float32).reshape(32, 3) % 7 - 3
W = {"a": np.full((3, 5), 0.5, np.float32), "b": np.full((5,), -0.25, np.float32)}


def loss_fn(w, batch):
    return jnp.mean((jnp.tanh(batch @ w["a"]) @ w["b"] - 1) ** 2)


def linear(w, batch):
    return jnp.mean((batch @ w) ** 2)


def assert_close(a, b, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


@pytest.mark.parametrize("k", [1, pytest.param(2, marks=pytest.mark.newest_only), 4])
def test_equals_jax_on_the_whole_batch_and_reduces_once(either_mesh, permutes, k):
    plan = collc.plan(either_mesh, {"gpu": "ring", "host": "tree"})
    grad = jax.jit(collc.value_and_grad(loss_fn, plan, microbatches=k)).lower(W, X).compile()
    assert_close(grad(W, X), jax.jit(jax.value_and_grad(loss_fn))(W, X))
    assert permutes(grad) == plan.certificate("all_reduce").rounds
    w = np.array([3.0, -2.0, 1.0], np.float32)
    found = jax.jit(collc.value_and_grad(linear, plan, microbatches=k))(w, WHOLE)
    assert_close(found, jax.jit(jax.value_and_grad(linear))(w, WHOLE), rtol=0, atol=0)


def test_narrow_gradients_are_added_up_in_float32(plan):
    # On each device 1, then 7 times 1/256: in bfloat16 the small ones vanish one by one.
    x = np.tile(np.array([1.0] + [2.0**-8] * 7), 8).astype(jnp.bfloat16)

    def loss(w, batch):
        return (w * batch).sum()

    w = jnp.bfloat16(1)
    grad = jax.jit(collc.value_and_grad(loss, plan, microbatches=8))
    _, found = grad(w, x)
    assert found.dtype == jnp.bfloat16
    assert float(found) == float(jnp.bfloat16((1 + 7 * 2.0**-8) / 8))
    text = str(jax.make_jaxpr(grad)(w, x))
    assert "f32[]" in text


def test_argnums_and_keywords(plan):
    def loss(first, batch, second=2.0, *, scale=1.0, mode="mean"):
        y = jnp.mean(batch * first + second) * scale
        return y if mode == "mean" else -y

    m = X.mean()
    one = jax.jit(collc.value_and_grad(loss, plan, batch="batch"), static_argnames="mode")
    assert_close(one(3.0, X), (3 * m + 2, m))
    assert_close(one(3.0, batch=X, scale=2.0, mode=""), (-2 * (3 * m + 2), -2 * m))
    two = jax.jit(collc.value_and_grad(loss, plan, argnums=(2, 0), batch="batch"))
    assert_close(two(3.0, X, 4.0), (3 * m + 4, (1, m)))
    last = collc.value_and_grad(loss, plan, argnums=(-1, -3), batch="batch")
    assert_close(last(3.0, X, 4.0), (3 * m + 4, (1, m)))
    for twice in ((0, 0), (0, -3)):
        with pytest.raises(StepError, match="names an argument twice"):
            collc.value_and_grad(loss, plan, argnums=twice)
    single = jax.jit(collc.value_and_grad(loss, plan, argnums=(0,), batch="batch"))
    assert isinstance(jax.eval_shape(single, 3.0, X)[1], tuple)


def test_flags_are_no_batches(plan):
    def loss(w, batch, negative, name=None, more=()):
        return jnp.mean(batch * w) * (-1 if negative else 1)

    found = jax.jit(collc.value_and_grad(loss, plan, microbatches=2), static_argnums=2)(
        2.0, X, True, None, {}
    )
    assert_close(found, (-2 * X.mean(), -X.mean()))


def test_arguments_that_are_batches_by_default_hold_arrays(plan):
    grad = collc.value_and_grad(lambda w, batch: jnp.mean(jnp.asarray(batch)) * w, plan)
    with pytest.raises(DataError, match=r"batch\[0\]\[0\] is a float, but what batch= names"):
        grad(2.0, X.tolist())
    with pytest.raises(StepError, match="batch= takes the name of an argument, or several, not 3"):
        collc.value_and_grad(loss_fn, plan, batch=3)
    with pytest.raises(StepError, match="takes a loss function, not None"):
        collc.value_and_grad(None, plan)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_some_axes_without_jit(kind):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(getattr(AxisType, kind),) * 2)
    plan = collc.plan(mesh, {"data": "ring"})
    whole = jax.tree.map(lambda _: PartitionSpec(), W)
    found = collc.value_and_grad(loss_fn, plan, specs=whole)(W, X)
    assert_close(found, jax.jit(jax.value_and_grad(loss_fn))(W, X))


def test_auxiliary_results(plan):
    def loss(w, batch):
        y = batch @ w
        return y.mean(), {"each": collc.Batch(y), "most": collc.pmax(lax.stop_gradient(y.max()))}

    w = np.array([3.0, -2.0, 1.0], np.float32)
    grad = jax.jit(collc.value_and_grad(loss, plan, has_aux=True))
    (value, aux), grads = grad(w, WHOLE)
    assert_close(aux, {"each": WHOLE @ w, "most": (WHOLE @ w).max()}, 0, 0)
    assert_close((value, grads), ((WHOLE @ w).mean(), WHOLE.mean(0)))
    (_, aux), _ = jax.jit(collc.value_and_grad(loss, plan, has_aux=True, microbatches=2))(w, WHOLE)
    assert_close(aux["each"], WHOLE @ w, 0, 0)  # in order
    # Of each piece, over all devices: a device has 4 examples, so pieces of 2.
    assert_close(aux["most"], (WHOLE @ w).reshape(8, 2, 2).max((0, 2)), 0, 0)


def test_refuses_auxiliary_results_that_differ(plan):
    grad = collc.value_and_grad(
        lambda w, batch: (batch.mean() * w, batch.sum()), plan, has_aux=True
    )
    with pytest.raises(StepError, match=r": aux is returned as replicated, but"):
        jax.eval_shape(grad, 1.0, X)


def test_sizes_that_do_not_divide(plan):
    with pytest.raises(DataError, match=r"loss_fn: batch has shape \(30, 3\).* over 8 devices"):
        collc.value_and_grad(loss_fn, plan)(W, X[:30])
    with pytest.raises(
        DataError, match=r"batch: a device's part of the batch is 4, .*microbatches=3"
    ):
        collc.value_and_grad(loss_fn, plan, microbatches=3)(W, X)


@pytest.mark.parametrize("k", [0, -1, 1.5, True, None])
def test_microbatches_is_a_count(plan, k):
    with pytest.raises(DataError, match="microbatches is a positive integer"):
        collc.value_and_grad(loss_fn, plan, microbatches=k)


@pytest.mark.parametrize("argnums", [2, -3, (0, 5), (), "w", 0.5, True, (1, False)])
def test_argnums_are_positions(plan, argnums):
    with pytest.raises(StepError, match="the positions of loss_fn's arguments are 0 to 1"):
        collc.value_and_grad(loss_fn, plan, argnums=argnums)


def test_names_and_plans_that_are_not_known(plan):
    with pytest.raises(StepError, match=r"loss_fn has no argument 'bach' .* Did you mean batch\?"):
        collc.value_and_grad(loss_fn, plan, batch="bach")
    with pytest.raises(StepError, match="batch='w' is differentiated"):
        collc.value_and_grad(loss_fn, plan, batch=("w", "batch"))
    with pytest.raises(StepError, match="takes a plan, not 'ring'"):
        collc.value_and_grad(loss_fn, "ring")
    with pytest.raises(StepError, match="specs= has no effect"):
        collc.value_and_grad(loss_fn, plan, specs={})


class Model(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, axis_name=("host", "gpu"), rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.norm(jnp.tanh(self.dense(x))))


def model_loss(model, batch):
    return jnp.mean((model(batch) - 1) ** 2)


@pytest.mark.parametrize("k", [1, 2])
def test_equals_nnx_on_modules(plan, k):
    a, b = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    b.norm.axis_name = None
    found = nnx.jit(collc.value_and_grad(model_loss, plan, microbatches=k))(a, X)
    assert jax.tree.structure(found[1]) == jax.tree.structure(nnx.state(b, nnx.Param))
    if k == 1:
        value, grads = nnx.jit(nnx.value_and_grad(model_loss))(b, X)
        assert_close((found[0], *jax.tree.leaves(found[1])), (value, *jax.tree.leaves(grads)))
        assert_close(a.norm.mean.get_value(), b.norm.mean.get_value())
    else:  # each piece is normalised by itself, and every one moves the statistics
        pieces = X.reshape(8, 2, 2, 3).swapaxes(0, 1).reshape(2, 16, 3)
        grad = nnx.jit(nnx.value_and_grad(model_loss))
        both = [grad(b, piece) for piece in pieces]
        assert_close(found[0], (both[0][0] + both[1][0]) / 2)
        assert_close(a.norm.mean.get_value(), b.norm.mean.get_value())


def test_a_second_module_is_whole_in_every_piece(plan):
    def loss(model, teacher, batch):
        return jnp.mean((model(batch) - teacher(batch)) ** 2)

    model, teacher = (nnx.Linear(3, 3, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    expected = nnx.jit(nnx.value_and_grad(loss))(model, teacher, X)
    for k in (1, 2):
        found = nnx.jit(collc.value_and_grad(loss, plan, microbatches=k))(model, teacher, X)
        assert_close(jax.tree.leaves(found), jax.tree.leaves(expected))


def test_of_some_variables_of_a_module(plan):
    model = Model(nnx.Rngs(0))
    for position in (0, -2):
        only = nnx.DiffState(position, nnx.All(nnx.Param, nnx.PathContains("out")))
        grad = collc.value_and_grad(model_loss, plan, argnums=only)
        _, grads = nnx.eval_shape(grad, model, X)
        assert {path[0] for path, _ in nnx.to_flat_state(grads)} == {"out"}
