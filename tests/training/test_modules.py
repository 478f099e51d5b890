"""Flax NNX modules in decorated steps: changed in place, under nnx.jit and under plain jit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import collc
from collc.errors import StepError
from collc.training.modules import is_module

BOTH = ("host", "gpu")
X = np.arange(48, dtype=np.float32).reshape(16, 3) / 48


class Model(nnx.Module):
    def __init__(self, rngs, norm=None, rate=0.0):
        self.blocks = nnx.List([nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)])
        self.norm = norm or (lambda x: x)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return self.blocks[1](self.dropout(self.norm(nnx.relu(self.blocks[0](x)))))


def loss_fn(model, batch):
    return jnp.mean((model(batch) - 1) ** 2)


def make(**options):
    model = Model(nnx.Rngs(0), **options)
    return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def train_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, collc.pmean(grads))
    return collc.pmean(loss)


def decorated(plan, step=train_step):
    return collc.schedule(plan, batch="batch")(step)


def whole(model, optimizer, batch):
    """The same step over the whole batch, on one device."""
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss


def assert_same_state(a, b, **how):
    how = how or {"rtol": 1e-4, "atol": 1e-6}
    states = [nnx.state(m, nnx.Not(nnx.RngState)) for m in (a, b)]
    for x, y in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(x, y, **how)


def test_changes_in_place_are_kept(either_mesh):
    plan = collc.plan(either_mesh, {"gpu": "ring", "host": "tree"})
    (model, optimizer), (model2, optimizer2) = make(), make()
    step, expected = nnx.jit(decorated(plan)), nnx.jit(whole)
    for _ in range(2):
        np.testing.assert_allclose(
            step(model, optimizer, X), expected(model2, optimizer2, X), rtol=1e-5
        )
    assert_same_state(model, model2)
    assert_same_state(optimizer, optimizer2)
    assert int(optimizer.step.get_value()) == 2


def test_whole_numbers_equal_exactly(plan):
    def model():
        return nnx.Linear(3, 1, rngs=nnx.Rngs(0), kernel_init=nnx.initializers.constant(2.0))

    a, b = model(), model()
    x = np.arange(48, dtype=np.float32).reshape(16, 3) % 7
    both = [nnx.Optimizer(m, optax.sgd(0.5), wrt=nnx.Param) for m in (a, b)]
    loss, expected = nnx.jit(decorated(plan))(a, both[0], x), nnx.jit(whole)(b, both[1], x)
    assert loss == expected
    assert_same_state(a, b, rtol=0, atol=0)


def test_split_and_merge_by_hand(plan):
    (model, optimizer), (model2, optimizer2) = make(), make()
    graph, state = nnx.split((model, optimizer))
    step = decorated(plan)

    @jax.jit
    def run(state, batch):
        model, optimizer = nnx.merge(graph, state)
        loss = step(model, optimizer, batch)
        return nnx.state((model, optimizer)), loss

    state, _ = run(state, X)
    nnx.update((model, optimizer), state)
    nnx.jit(whole)(model2, optimizer2, X)
    assert_same_state(model, model2)


def test_a_module_among_the_results(plan):
    model, _ = make()

    def step(model, batch):
        model.blocks[1].bias.set_value(collc.pmean(batch.mean(0)[:1]))
        return {"model": model, "same": (model,)}

    found = nnx.jit(decorated(plan, step))(model, X)
    np.testing.assert_allclose(found["model"].blocks[1].bias.get_value(), X.mean(0)[:1], rtol=1e-6)
    assert found["model"] is found["same"][0]
    np.testing.assert_array_equal(
        model.blocks[1].bias.get_value(), found["model"].blocks[1].bias.get_value()
    )
    with pytest.raises(StepError, match="returns a Linear that is none of its arguments"):
        nnx.jit(decorated(plan, lambda model, batch: model.blocks[0]))(model, X)


def test_modes_set_inside_are_kept(plan):
    model, _ = make(rate=0.5)

    def step(model, batch):
        model.eval()
        return collc.pmean(loss_fn(model, batch))

    nnx.jit(decorated(plan, step))(model, X)
    assert model.dropout.deterministic
    model.train()
    decorated(plan, step)(model, X)  # without jit
    assert model.dropout.deterministic


def test_attributes_set_inside_are_kept(plan):
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    before = np.asarray(model.kernel.get_value())

    def step(one, same, batch):
        assert one is same
        one.note, one.tag = [1, {"a": 2}], "seen"
        one.kernel.set_value(2 * one.kernel.get_value())
        return collc.psum(batch.sum())

    nnx.jit(decorated(plan, step))(model, model, X)
    assert model.note == [1, {"a": 2}] and model.tag == "seen"
    np.testing.assert_array_equal(model.kernel.get_value(), 2 * before)


def test_metrics_are_kept(plan):
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average())

    def step(metrics, batch):
        metrics.update(values=collc.pmean(batch.mean()))

    step = nnx.jit(decorated(plan, step))
    step(metrics, X)
    step(metrics, 3 * X)
    np.testing.assert_allclose(metrics.compute()["loss"], 2 * X.mean(), rtol=1e-6)


def test_dropout_counts_on_and_is_noted(plan):
    model, optimizer = make(rate=0.5)
    step = nnx.jit(decorated(plan))
    step(model, optimizer, X)
    step(model, optimizer, X)
    assert int(model.dropout.rngs.count.get_value()) == 2
    assert "test_modules.py" in step.explain() and "one dropout mask for all" in step.explain()


# -- refused --------------------------------------------------------------------------------------


def test_refuses_gradients_that_are_not_reduced(plan):
    model, optimizer = make()

    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return collc.pmean(loss)

    with pytest.raises(StepError) as caught:
        nnx.jit(decorated(plan, step))(model, optimizer, X)
    message = str(caught.value)
    assert message.startswith(
        "step: model.blocks[0].bias is returned as replicated, but it differs"
    )
    assert f"test_modules.py:{step.__code__.co_firstlineno + 2} in step" in message
    assert message.endswith(
        "Reduce the gradients: collc.pmean(grads)."  # weights of their own would only diverge
    )
    assert int(optimizer.step.get_value()) == 0


def test_refuses_a_changed_structure(plan):
    def step(model, batch):
        model.extra = nnx.Param(jnp.zeros(3))
        return collc.psum(batch.sum())

    with pytest.raises(StepError, match=r"adds or removes variables of a module: model\.extra\."):
        nnx.jit(decorated(plan, step))(make()[0], X)


def test_refuses_modules_inside_pytrees(plan):
    step = collc.schedule(plan)(lambda state: None)
    with pytest.raises(StepError, match="argument 'state' holds an nnx module inside a pytree"):
        step({"model": make()[0]})


def test_a_module_is_no_batch(plan):
    step = collc.schedule(plan, batch=("model", "batch"))(lambda model, batch: None)
    with pytest.raises(StepError, match="batch='model' names an nnx module, which is no batch"):
        step(make()[0], X)


# -- let pass -------------------------------------------------------------------------------------


def norm_step(model, batch):
    return collc.pmean(jnp.sum(model(batch)))


def test_batch_statistics(plan):
    def norm(axes=None):
        return nnx.BatchNorm(3, axis_name=axes, momentum=0.0, rngs=nnx.Rngs(0))

    step = nnx.jit(decorated(plan, norm_step))
    with pytest.raises(StepError, match=r"model\.mean is returned .*(?s:.)*of=nnx\.BatchStat") as e:
        step(norm(), X)
    assert "(give nnx.BatchNorm axis_name=('host', 'gpu'))" in str(e.value)
    own = collc.ranked(norm(), plan, of=nnx.BatchStat)
    step(own, X)
    np.testing.assert_allclose(
        own.mean.get_value(), X.reshape(2, 4, 2, 3).mean(2), rtol=1e-5, atol=1e-6
    )
    assert own.mean.get_value().sharding.spec[:2] == tuple(P("host", "gpu"))
    shared = norm(BOTH)
    step(shared, X)
    np.testing.assert_allclose(shared.mean.get_value(), X.mean(0), rtol=1e-5)


def test_ranked_variables_in_a_state(plan):
    model = nnx.BatchNorm(3, momentum=0.0, rngs=nnx.Rngs(0))
    graph, state = nnx.split(collc.ranked(model, plan, ["gpu"], of=nnx.BatchStat))

    @jax.jit
    @collc.schedule(plan, batch="batch")
    def step(state, batch):
        model = nnx.merge(graph, state)
        norm_step(model, lax.all_gather(batch, "host", tiled=True))
        return nnx.state(model)

    new = step(state, X)
    expected = X.reshape(2, 4, 2, 3).mean((0, 2))
    np.testing.assert_allclose(new["mean"].get_value(), expected, rtol=1e-5, atol=1e-6)


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        self.rnn = nnx.RNN(nnx.LSTMCell(3, 2, rngs=rngs))

    def __call__(self, x):
        return self.rnn(x[:, None]).mean()


def test_lets_an_lstm_and_remat_pass(plan):
    def loss(model, batch):
        return nnx.remat(lambda m, b: m(b))(model, batch)

    def step(model, batch):
        return collc.pmean(nnx.grad(loss)(model, batch))

    model = Recurrent(nnx.Rngs(0))
    grads = nnx.jit(decorated(plan, step))(model, X)
    expected = nnx.jit(nnx.grad(lambda model, batch: model(batch)))(model, X)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_what_is_a_module():
    model, optimizer = make()
    assert all(
        map(is_module, (model, optimizer, nnx.Rngs(0), nnx.MultiMetric(a=nnx.metrics.Average())))
    )
    assert not any(map(is_module, (nnx.state(model), nnx.Param(1.0), {"a": 1}, jnp.ones(2))))
