"""Decorated steps on plain pytrees and Linen's TrainState: what they compute, refuse, and let pass."""

import dataclasses
import re
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import PartitionSpec as P

import collc
from collc.errors import DataError, PlanError, StepError

BOTH = ("host", "gpu")
X = np.arange(48, dtype=np.float32).reshape(16, 3) / 48
WHOLE = np.arange(48, dtype=np.float32).reshape(16, 3) % 7 - 3  # whole numbers
W = {"a": np.full((3, 5), 0.5, np.float32), "b": np.full((5,), -0.25, np.float32)}


def lax_step(local, mesh):
    """The same step as plain jax has it."""
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(P(), P(BOTH)), out_specs=P(), check_vma=False)
    )


def planned(plan, step, batch="batch"):
    return jax.jit(collc.schedule(plan, batch=batch)(step))


def loss_fn(w, batch):
    return jnp.mean((jnp.tanh(batch @ w["a"]) @ w["b"] - 1) ** 2)


def assert_close(a, b, **how):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **how), a, b)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


# -- the same as plain jax ------------------------------------------------------------------------


def optax_step(mean, optimizer):
    def step(state, batch):
        w, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(w, batch)
        updates, opt_state = optimizer.update(mean(grads), opt_state, w)
        return (optax.apply_updates(w, updates), opt_state), {"loss": mean(loss)}

    return step


def test_optax_equals_lax(either_mesh):
    plan = collc.plan(either_mesh, {"gpu": "ring", "host": "tree"})
    adam = optax.adam(0.01)
    ours = planned(plan, optax_step(collc.pmean, adam))
    theirs = lax_step(optax_step(partial(lax.pmean, axis_name=BOTH), adam), either_mesh)
    split = jax.device_put(X, jax.NamedSharding(either_mesh, P(BOTH)))
    a = b = W, adam.init(W)
    for _ in range(3):
        (a, loss), (b, expected) = ours(a, X), theirs(b, split)
    assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert_close(loss, expected, rtol=1e-6)
    assert a[0]["a"].sharding.is_fully_replicated


def test_whole_numbers_equal_exactly(either_mesh):
    plan = collc.plan(either_mesh, {"gpu": "ring", "host": "tree"})
    w = np.array([3.0, -2.0, 1.0], np.float32)

    def step(w, batch):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
        return w - collc.pmean(grad), collc.pmean(loss)

    new, loss = planned(plan, step)(w, WHOLE)
    y = WHOLE @ w
    assert_equal(loss, np.float32((y**2).mean()))
    assert_equal(new, w - (2 * y @ WHOLE / 16).astype(np.float32))


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(4)(x)))


def linen_step(mean):
    def step(state, batch):
        def loss(params):
            return jnp.mean((state.apply_fn({"params": params}, batch) - 1) ** 2)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=mean(grads)), mean(value)

    return step


def test_linen_equals_lax(plan, mesh):
    model, x = Mlp(), X
    params = jax.jit(model.init)(jax.random.key(0), x)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.01))
    ours, theirs = (
        planned(plan, linen_step(collc.pmean)),
        linen_step(partial(lax.pmean, axis_name=BOTH)),
    )
    new, loss = ours(state, x)
    expected, expected_loss = lax_step(theirs, mesh)(state, x)
    assert isinstance(new, TrainState) and int(new.step) == 1
    assert_close(new.params, expected.params, rtol=1e-5, atol=1e-6)
    assert_close(loss, expected_loss, rtol=1e-6)


def test_the_plan_is_what_runs(plan, permutes):
    step = planned(plan, lambda w, batch: collc.pmean(jax.grad(loss_fn)(w, batch)))
    assert permutes(step, W, X) == plan.certificate("all_reduce").rounds


# -- refused --------------------------------------------------------------------------------------


def refused(plan, step, *args, error=StepError, batch="batch"):
    with pytest.raises(error) as caught:
        jax.eval_shape(collc.schedule(plan, batch=batch)(step), *args)
    return str(caught.value)


def line(function, offset):
    """What the check names a line of a function, counted from its def."""
    code = function.__code__
    return f"test_step.py:{code.co_firstlineno + offset} in {code.co_name}"


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


# -- let pass -------------------------------------------------------------------------------------


def scanned(w, batch):
    def add(total, row):
        return total + jnp.tanh(row @ w["a"]) @ w["b"], None

    return lax.scan(add, jnp.zeros(()), batch)[0] / len(batch)


def branched(w, batch):
    y = batch @ w["a"]
    return lax.cond(y.sum() > 0, lambda y: y.sum(), lambda y: jnp.zeros(()), y)


def looped(w, batch):
    def more(state):
        i, total = state
        return i + 1, total + jnp.sum(batch[i] @ w["a"]) * 0

    _, total = lax.while_loop(lambda s: s[0] < 2, more, (0, jnp.zeros(())))
    return lax.stop_gradient(total) + loss_fn(w, batch)


def rematerialised(w, batch):
    return jax.checkpoint(loss_fn)(w, batch)


@pytest.mark.parametrize("loss", [scanned, branched, looped, rematerialised])
def test_lets_pass(plan, loss):
    def step(mean, w, batch):
        value, grads = jax.value_and_grad(
            lambda w: loss(w, batch) if loss is not looped else loss_fn(w, batch)
        )(w)
        return mean(grads), mean(value + 0 * loss(w, batch))

    theirs = lax_step(partial(step, partial(lax.pmean, axis_name=BOTH)), plan.mesh)
    ours = planned(plan, lambda w, batch: step(collc.pmean, w, batch))
    assert_close(ours(W, X), theirs(W, X), rtol=1e-5, atol=1e-7)


class Lstm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.RNN(nn.LSTMCell(3))(x)


def test_lets_an_lstm_pass(plan):
    model, x = Lstm(), np.stack([X, 1 - X], axis=1)  # [batch, time, feature]
    params = jax.jit(model.init)(jax.random.key(0), x)

    def loss(p, x):
        return jnp.mean(model.apply(p, x) ** 2)

    grads = planned(plan, lambda p, batch: collc.pmean(jax.grad(loss)(p, batch)))(params, x)
    assert_close(grads, jax.jit(jax.grad(loss))(params, x), rtol=1e-4, atol=1e-6)


def test_dropout_is_noted(plan):
    def step(key, batch):
        kept = jax.random.bernoulli(key, 0.5, batch.shape)
        own = jax.random.bernoulli(collc.rank_key(key), 0.5, batch.shape)
        return collc.Batch((kept, own))

    decorated = collc.schedule(plan, batch="batch")(step)
    jitted = jax.jit(decorated)
    kept, own = jitted(jax.random.key(0), X)
    assert_equal(kept, np.tile(kept[:2], (8, 1)))
    assert len({np.asarray(o).tobytes() for o in np.split(np.asarray(own), 8)}) > 1
    (note,) = decorated.notes
    assert note.startswith(line(step, 1)) and "one dropout mask for all" in note
    assert jitted.explain() == decorated.explain()  # jit copies attributes
    assert decorated.explain().endswith(note)


# -- the step's own plan --------------------------------------------------------------------------


@jax.jit
def shared(x):
    return collc.pmean(x)


@jax.checkpoint
def shared_remat(x):
    return jnp.sin(collc.pmean(x))


def shared_body(total, x):
    return total + collc.pmean(x), None


def everything(batch):
    total, _ = lax.scan(shared_body, jnp.zeros(batch.shape[1:]), batch)
    return shared(batch), shared_remat(batch), total


def test_inner_functions_take_the_plan_of_the_step(plan, permutes):
    other = collc.plan(plan.mesh, {"gpu": "server", "host": "ring"})
    for _ in range(2):  # also after the other has traced them
        for own, not_own in ((plan, other), (other, plan)):
            step = collc.schedule(own, batch="batch")(everything)
            text = str(jax.make_jaxpr(step)(X))
            mine, others = str(own.schedule("all_reduce")), str(not_own.schedule("all_reduce"))
            assert text.count(f"schedule={mine}") == 3 and others not in text
    small = planned(other, lambda batch: shared(batch))
    assert permutes(small, X) == other.certificate("all_reduce").rounds
    small = planned(plan, lambda batch: shared(batch))
    assert permutes(small, X) == plan.certificate("all_reduce").rounds


def test_without_a_step_there_is_no_plan(plan):
    planned(plan, lambda batch: shared(batch))(X)
    with pytest.raises(PlanError, match="no plan here"):
        collc.pmean(jnp.ones(3))


# -- ways to call ---------------------------------------------------------------------------------


def test_arguments_are_found_by_name(plan):
    def step(z, batch, y=2.0, *more, flag=False, mode="sum", **others):
        total = collc.psum(batch.sum()) * y + z
        extra = sum(more) + sum(others.values())
        return -total - extra if flag and mode == "sum" else total + extra

    decorated = collc.schedule(plan, batch="batch")(step)
    total = float(WHOLE.sum())
    assert decorated(1.0, WHOLE) == 2 * total + 1  # without jit
    assert jax.jit(decorated)(1.0, batch=WHOLE) == 2 * total + 1
    static = jax.jit(decorated, static_argnames=("flag", "mode"))  # constants of the program
    assert static(1.0, WHOLE, 3.0, 5.0, 7.0, flag=True, mode="sum", b=1.0, a=2.0) == -3 * total - 16
    assert decorated(np.float32(1), flag=True, batch=WHOLE) == -2 * total - 1


def test_several_batches_and_pytrees_of_them(plan):
    step = collc.schedule(plan, batch=("first", "second"))(
        lambda second, w, first: (collc.psum(jnp.sum(first["x"] * second)) * w, len(second))
    )
    value, size = jax.jit(step)(X, 2.0, {"x": X, "name": None})
    assert value == pytest.approx(2 * (X * X).sum(), rel=1e-6) and size == 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Report:
    loss: jax.Array
    nothing: None
    examples: collc.Batch


def test_results_of_any_form(plan):
    def step(batch):
        total = collc.psum(batch.sum())
        return None, 3, {"r": Report(total, None, collc.Batch(batch * 2))}, ()

    nothing, three, found, empty = planned(plan, step)(X)
    assert nothing is None and three == 3 and empty == ()
    assert_equal(found["r"].examples, X * 2)
    assert found["r"].nothing is None and found["r"].loss.shape == ()
    assert planned(plan, lambda batch: None)(X) is None


@pytest.mark.parametrize("of_step", [True, False])
def test_a_mesh_in_the_context(either_mesh, of_step):
    plan = collc.plan(either_mesh, {"gpu": "ring"})  # host stays with XLA
    step = planned(plan, lambda w, batch: collc.psum(jnp.sum(batch * w)))
    assert plan.ranks == 4
    with jax.set_mesh(either_mesh if of_step else plan.mesh):
        placed = jax.device_put(WHOLE, jax.NamedSharding(either_mesh, P("host")))
        assert step(2.0, placed) == 2 * WHOLE.sum()
        assert step(2.0, WHOLE) == 2 * WHOLE.sum()
    assert step(2.0, placed) == 2 * WHOLE.sum()


def test_donated_buffers_are_reused(plan):
    w = jax.device_put(jnp.ones((64, 64)), jax.NamedSharding(plan.mesh, P()))
    ranked = collc.ranked(jnp.zeros(64), plan)

    def step(w, ranked, batch):
        own = collc.Ranked(ranked.value + batch.sum(), ranked.axes)
        return w + collc.pmean(batch.sum()), own

    jitted = jax.jit(collc.schedule(plan, batch="batch")(step), donate_argnums=(0, 1))
    compiled = jitted.lower(w, ranked, X).compile()
    header = compiled.as_text().partition("\n")[0]
    assert "{0}: (0, {}, may-alias)" in header and "{1}: (1, {}, may-alias)" in header
    w2, ranked2 = jitted(w, ranked, X)
    assert w.is_deleted() and ranked.value.is_deleted()
    assert not w2.is_deleted() and ranked2.value.shape == (2, 4, 64)


def test_results_can_be_the_next_arguments_without_a_new_trace(either_mesh):
    plan = collc.plan(either_mesh, {"gpu": "ring", "host": "tree"})
    step = planned(plan, lambda w, batch: w - collc.pmean(batch.sum()))
    w = jax.device_put(np.float32(1), jax.NamedSharding(either_mesh, P()))
    w = step(w, X)
    step(step(w, X), X)
    assert step._cache_size() == 1


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


def test_a_batch_may_be_left_out(plan):
    def step(batch, mask=None):
        return collc.psum((batch if mask is None else batch * mask).sum())

    decorated = collc.schedule(plan, batch=("batch", "mask"))(step)
    assert decorated(WHOLE) == decorated(WHOLE, None) == decorated([WHOLE][0], WHOLE * 0 + 1)


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


def test_a_step_says_what_it_is(plan):
    step = collc.schedule(plan, batch="batch")(scanned)
    assert repr(step) == str(step) == f"<step scanned over {plan}>"


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_some_axes_without_jit(kind):
    mesh = jax.make_mesh((2, 4), BOTH, axis_types=(getattr(jax.sharding.AxisType, kind),) * 2)
    plan = collc.plan(mesh, {"gpu": "ring"})

    def step(w, batch):
        return (
            w - collc.pmean(batch.sum()),
            collc.Batch(batch * 2),
            collc.Ranked(batch.sum(), "gpu"),
        )

    new, twice, own = collc.schedule(plan, batch="batch")(step)(2.0, WHOLE)
    assert new == 2 - WHOLE.sum() / 4
    assert_equal(twice, WHOLE * 2)
    assert_equal(own.value, WHOLE.reshape(4, -1).sum(1))


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
