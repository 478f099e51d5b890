"""What decorated steps refuse: results that differ between ranks, and bad input."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import collc
from collc.errors import DataError, PlanError, StepError

from .steps import BOTH, W, X, line, loss_fn, planned, refused

# -- what differs between ranks -------------------------------------------------------------------


def test_refuses_gradients_that_are_not_reduced(plan):
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["w"], batch)
        return {"w": jax.tree.map(jnp.subtract, state["w"], grads)}, collc.pmean(loss)

    message = refused(plan, step, {"w": W}, X)
    assert message.startswith(
        "step: result[0]['w']['a'] is returned as replicated, but it differs between the ranks of "
        f"host and gpu.\n  {line(loss_fn, 1)}\n"
    )
    assert line(step, 2) in message and "Reduce it, as in collc.pmean(...)" in message


def test_refuses_a_metric_that_is_not_reduced(plan):
    def step(w, batch):
        loss, grads = jax.value_and_grad(loss_fn)(w, batch)
        return collc.pmean(grads), {"loss": loss}

    message = refused(plan, step, W, X)
    assert "step: result[1]['loss'] is returned as replicated, but" in message
    assert line(loss_fn, 1) in message


def test_refuses_what_is_reduced_on_one_axis_only(plan):
    message = refused(plan, lambda batch: collc.psum(batch.sum(), "gpu"), X)
    assert "result is returned as replicated, but it differs between the ranks of host." in message


def test_refuses_a_second_sum(plan):
    def step(w, batch):
        grads = collc.pmean(jax.grad(loss_fn)(w, batch))
        return collc.psum(grads)

    message = refused(plan, step, W, X)
    assert message.startswith(f"{line(step, 2)}: collc.psum sums over")
    assert "already the same on all ranks" in message and "multiplies it by 8" in message


def test_refuses_a_loss_reduced_inside_grad(plan):
    def step(w, batch):
        return collc.pmean(jax.grad(lambda w: collc.pmean(loss_fn(w, batch)))(w))

    assert "Differentiate the local loss, reduce after" in refused(plan, step, W, X)


def test_refuses_a_folded_key_in_the_state(plan):
    def step(key, batch):
        key = collc.rank_key(key)
        return {"key": key}, collc.pmean(batch.sum() + jax.random.uniform(key))

    message = refused(plan, step, jax.random.key(0), X)
    assert "result[0]['key'] is returned as replicated" in message and line(step, 1) in message


class Norm(nn.Module):
    axes: tuple[str, ...] | None = None

    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False, axis_name=self.axes)(x)


def norm_step(model):
    def step(variables, batch):
        y, new = model.apply(variables, batch, mutable=["batch_stats"])
        return new, collc.pmean(y.sum())

    return step


def test_batch_statistics_of_linen(plan):
    variables = Norm().init(jax.random.key(0), X)
    message = refused(plan, norm_step(Norm()), variables, X)
    assert "result[0]['batch_stats']['BatchNorm_0']['mean'] is returned as replicated" in message
    new, _ = planned(plan, norm_step(Norm(BOTH)))(variables, X)
    mean = new["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(mean, 0.01 * X.mean(0), rtol=1e-5)


def test_refuses_to_be_called_inside_a_step(plan):
    inner = collc.schedule(plan, batch="batch")(lambda batch: collc.psum(batch.sum()))
    message = refused(plan, lambda batch: inner(batch), X)
    assert message.startswith("<lambda> is called inside a decorated step, but it splits")
    grad = collc.value_and_grad(loss_fn, plan)
    message = refused(plan, lambda w, batch: grad(w, batch), W, X)
    assert "take jax.value_and_grad and collc.pmean there" in message
    with pytest.raises(StepError, match="called inside a shard_map over host and gpu"):
        jax.eval_shape(jax.shard_map(inner, mesh=plan.mesh, in_specs=P(BOTH), out_specs=P()), X)


# -- bad input ------------------------------------------------------------------------------------


def test_a_batch_that_does_not_divide(plan):
    message = refused(plan, lambda batch: None, {"x": X[:12]}, error=DataError)
    assert message == (
        "<lambda>: batch['x'] has shape (12, 3): as a batch it is split on dimension 0 over 8 "
        "devices (host x gpu), but its dimension 0 is 12. Make it a multiple of 8, or do not name "
        "it in batch=."
    )
    message = refused(plan, lambda batch: None, np.float32(1), error=DataError)
    assert message.endswith("but it is a scalar. Name in batch= only arguments that are split.")


@pytest.mark.parametrize("batch", [None, (), {"x": []}])
def test_a_batch_of_nothing(plan, batch):
    with pytest.raises(DataError, match="<lambda>: batch holds no array, but batch= names it"):
        collc.schedule(plan, batch="batch")(lambda batch: batch)(batch)


@pytest.mark.parametrize("batch", ["abc", 3.0, X.tolist(), {"x": X, "name": "a"}])
def test_a_batch_that_is_no_array(plan, batch):
    with pytest.raises(
        DataError, match=r"<lambda>: batch\S* is a (str|float), but what batch= names"
    ):
        collc.schedule(plan, batch="batch")(lambda batch: batch)(batch)


def test_an_empty_batch(plan):
    message = refused(plan, lambda batch: None, X[:0], error=DataError)
    assert message == "<lambda>: batch has shape (0, 3): the batch is empty."


@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")
@pytest.mark.parametrize(
    "step, found",
    [
        (lambda batch: {"x": "abc"}, r"result\['x'\] is a str"),
        (lambda batch: [object()], r"result\[0\] is a object"),
        (lambda batch: (x for x in batch), "result is a generator"),
        (lambda batch: batch.sum, "result is a (method|function)"),
        (lambda batch: np.array(["a"]), "result is a ndarray"),
    ],
)
def test_results_that_are_no_arrays(plan, step, found):
    message = refused(plan, step, X)
    assert re.match(f"<lambda>: {found}, but a step is a plain function that", message)


def test_names_that_are_not_known(plan):
    with pytest.raises(
        StepError, match=r"<lambda> has no argument 'bacth' .* Did you mean batch\?"
    ):
        collc.schedule(plan, batch="bacth")(lambda batch: None)
    with pytest.raises(StepError, match=re.escape("takes a plan, not 'ring'")):
        collc.schedule("ring")
    with pytest.raises(StepError, match="takes a plan, not None"):
        collc.schedule()
    with pytest.raises(StepError, match="decorates a function, not 3"):
        collc.schedule(plan)(3)
    assert "Did you mean gpu?" in refused(
        plan, lambda batch: collc.psum(batch, "gpus"), X, error=PlanError
    )


def test_batch_marks_results_that_have_examples(plan):
    message = refused(plan, lambda batch: {"y": collc.Batch(batch.sum())}, X)
    assert "result['y'] is marked as a batch, but it is a scalar." in message
    message = refused(plan, lambda batch, y: y.value, X, {"b": collc.Batch(X)})
    assert "y['b'] is in a collc.Batch, which marks results." in message


def test_a_forgotten_batch_is_refused(plan):
    def loss(w, x):
        return collc.pmean((w * x).sum())

    w, x = jnp.ones(3), jnp.ones((8, 3))
    with pytest.raises(StepError, match=r"none of its arguments is a batch: all 8 devices"):
        jax.jit(collc.schedule(plan)(loss))(w, x)
    assert jax.jit(collc.schedule(plan, batch=())(loss))(w, x) == 24
    assert jax.jit(collc.schedule(plan, batch="x")(loss))(w, x) == 3
