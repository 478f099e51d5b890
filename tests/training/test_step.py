"""Decorated steps on plain pytrees and Linen's TrainState: what they compute, and let pass."""

import dataclasses
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
from collc.errors import PlanError

from .steps import BOTH, WHOLE, W, X, assert_close, assert_equal, line, loss_fn, planned


def lax_step(local, mesh):
    """The same step as plain jax has it."""
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(P(), P(BOTH)), out_specs=P(), check_vma=False)
    )


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
    assert permutes(step.lower(W, X).compile()) == plan.certificate("all_reduce").rounds


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
    for own in (other, plan):
        small = planned(own, lambda batch: shared(batch)).lower(X).compile()
        assert permutes(small) == own.certificate("all_reduce").rounds


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


def test_a_batch_may_be_left_out(plan):
    def step(batch, mask=None):
        return collc.psum((batch if mask is None else batch * mask).sum())

    decorated = collc.schedule(plan, batch=("batch", "mask"))(step)
    assert decorated(WHOLE) == decorated(WHOLE, None) == decorated([WHOLE][0], WHOLE * 0 + 1)


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
