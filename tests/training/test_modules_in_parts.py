"""NNX modules whose variables hold parts, collc.Shard and collc.Ranked, as a step's arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

import collc
from collc.errors import StepError

X = jax.random.normal(jax.random.key(1), (16, 3))
ADAM = optax.adamw(0.1)


class Count(nnx.Variable):
    """What a step changes, and no optimizer."""


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 5, rngs=rngs)
        self.last = nnx.Linear(5, 1, use_bias=False, rngs=rngs)
        self.seen = Count(jnp.float32(0))

    def __call__(self, x):
        self.seen.set_value(self.seen.get_value() + 1)
        return self.last(jnp.tanh(self.first(x)))


@functools.cache
def parts(by):
    return collc.server(by, optax.identity()).init(nnx.state(Net(nnx.Rngs(0)), nnx.Param)).params


def parted(plan, tx=ADAM, by=None):
    """A module that holds its parameters in parts, and its optimizer."""
    model = Net(nnx.Rngs(0))
    nnx.update(model, parts(by or plan))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def whole(model):
    """A copy of a module in a step, with whole parameters."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return nnx.merge(graph, collc.all_gather(params), rest)


def loss_fn(model, batch):
    return jnp.mean((whole(model)(batch) - 1) ** 2)


def train_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return collc.pmean(loss)


@functools.cache  # one program for all tests that train by it
def decorated(plan, step=train_step):
    return nnx.jit(collc.schedule(plan, batch="batch")(step))


@functools.cache
def gather(plan):
    return jax.jit(collc.schedule(plan)(collc.all_gather))


def pulled(plan, model):
    """The parameters of a module, whole, outside of a step."""
    return gather(plan)(nnx.state(model, nnx.Param))


@functools.cache
def replicated(tx=ADAM, steps=3):
    """The same training on one device: the model, and its losses."""
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(X) - 1) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    return model, [step(model, optimizer) for _ in range(steps)]


def assert_near(got, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5), got, expected)


KINDS = ["Auto", pytest.param("Explicit", marks=pytest.mark.newest_only)]


@pytest.mark.parametrize("either_mesh", KINDS, indirect=True)
def test_trains_as_a_whole_one(either_mesh):
    plan = collc.plan(either_mesh, {"gpu": "ring", "host": "tree"})
    (model, optimizer), (expected, losses) = parted(plan), replicated()
    step, moments = decorated(plan), optimizer.opt_state[0].mu["first"]["kernel"]
    assert_near([step(model, optimizer, X) for _ in losses], losses)
    assert_near(pulled(plan, model), nnx.state(expected, nnx.Param))
    assert int(model.seen.get_value()) == 3  # of the copy, which shares it
    for variable in (model.first.kernel, moments):  # 15 numbers in 8 parts of 2
        shard = variable.get_value()
        assert isinstance(shard, collc.Shard) and shard.shape == (3, 5)
        assert shard.value.shape == (2, 4, 2, 1)
        assert shard.value.sharding.spec[:2] == ("host", "gpu")
        assert not np.ravel(shard.value)[15:].any()
    assert int(optimizer.step.get_value()) == 3


def test_beside_its_server(plan):
    server = collc.server(plan, ADAM)
    model, _ = parted(plan)
    state = server.init(nnx.state(Net(nnx.Rngs(0)), nnx.Param))

    def step(model, state, batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        state = state.push(grads)
        nnx.update(model, state.params)
        return state, collc.pmean(loss)

    step = decorated(plan, step)
    for _ in range(3):
        state, _ = step(model, state, X)
    assert_near(pulled(plan, model), nnx.state(replicated()[0], nnx.Param))


def test_some_parameters(plan):
    tx = optax.chain(collc.clip_by_global_norm(0.1), ADAM)
    chosen = collc.strategies(
        {"last/*": collc.strategy.server(plan), "*": collc.strategy.all_reduce(plan)}
    )
    model, optimizer = parted(plan, tx, chosen)
    assert isinstance(model.last.kernel.get_value(), collc.Shard)

    def loss(model, batch):
        graph, params, rest = nnx.split(model, lambda path, x: "last" in path, ...)
        return jnp.mean((nnx.merge(graph, collc.all_gather(params), rest)(batch) - 1) ** 2)

    def step(model, optimizer, batch):
        value, grads = chosen.value_and_grad(loss)(model, batch)
        optimizer.update(model, grads)
        return value

    step, (expected, losses) = (
        decorated(plan, step),
        replicated(optax.chain(optax.clip_by_global_norm(0.1), ADAM)),
    )
    assert_near([step(model, optimizer, X) for _ in losses], losses)
    np.testing.assert_allclose(
        model.first.kernel.get_value(), expected.first.kernel.get_value(), 1e-4, 1e-5
    )


def test_padding_stays_zero(plan):
    up = optax.stateless(lambda updates, params: jax.tree.map(lambda x: x + 1, updates))
    model, optimizer = parted(plan, up)

    def step(model, optimizer, batch):
        optimizer.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param)))

    decorated(plan, step)(model, optimizer, X)
    kernel = np.ravel(model.first.kernel.get_value().value)
    before = np.ravel(Net(nnx.Rngs(0)).first.kernel.get_value(), order="F")
    np.testing.assert_array_equal(kernel, [*(before + 1), 0])


def test_fit_resumes_exactly(plan, tmp_path):
    step, data = decorated(plan), lambda t: X + 0.1 * t
    quiet = {"console": Console(quiet=True), "profile": 0}
    without, cut, resumed = (parted(plan) for _ in range(3))
    collc.fit(step, without, data, steps=4, **quiet)
    collc.fit(step, cut, data, steps=2, folder=tmp_path, **quiet)
    collc.fit(step, resumed, data, steps=4, folder=tmp_path, resume=True, **quiet)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(resumed), nnx.state(without))

    few = collc.plan(jax.make_mesh((2,), ("gpu",), devices=jax.devices()[:2]), {"gpu": "native"})
    model, optimizer = parted(few)
    fewer = decorated(few)
    collc.fit(fewer, (model, optimizer), data, steps=5, folder=tmp_path, resume=True, **quiet)
    collc.fit(step, without, lambda t: data(t + 4), steps=1, **quiet)
    assert model.first.kernel.get_value().value.shape == (2, 8, 1)
    assert_near(pulled(few, model), pulled(plan, without[0]))


def test_a_variable_that_holds_a_ranked_value(plan):
    model = Net(nnx.Rngs(0))
    model.seen = nnx.Variable(collc.ranked({"sum": jnp.zeros(3), "n": jnp.int32(0)}, plan, "gpu"))

    def step(model, batch, reduce=lambda x: collc.psum(x, "host")):
        seen = model.seen.get_value()
        assert seen.value["sum"].shape == (3,)
        new = {"sum": seen.value["sum"] + reduce(batch.sum(0)), "n": seen.value["n"] + 1}
        model.seen.set_value(collc.Ranked(new, seen.axes))

    run = decorated(plan, step)
    run(model, X)
    run(model, X)
    seen = model.seen.get_value()
    assert_near(seen.value["sum"], 2 * X.reshape(2, 4, 2, 3).sum((0, 2)))
    np.testing.assert_array_equal(seen.value["n"], [2] * 4)
    assert seen.value["sum"].sharding.spec[0] == "gpu"
    with pytest.raises(StepError, match=r"model\.seen is returned as ranked, but .* of host\."):
        decorated(plan, lambda model, batch: step(model, batch, lambda x: x))(model, X)


def test_ranked_parameters_and_their_optimizer(plan):
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    model.bias.set_value(collc.ranked(model.bias.get_value(), plan, "gpu"))
    optimizer = nnx.Optimizer(model, optax.sgd(1.0, momentum=0.5), wrt=nnx.Param)

    def step(model, optimizer, batch):
        grads = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
        own = collc.psum(batch[:1, 0], "host")
        grads["bias"].set_value(collc.Ranked(own, "gpu"))
        optimizer.update(model, grads)

    run = decorated(plan, step)
    run(model, optimizer, X)
    run(model, optimizer, X)
    own = X.reshape(2, 4, 2, 3)[:, :, :1, 0].sum(0)
    assert_near(model.bias.get_value().value, -2.5 * own)
    assert_near(optimizer.opt_state[0].trace["bias"].get_value().value, 1.5 * own)


def test_moments_whose_padding_is_not_zero_at_first(plan):
    """yogi starts from a number everywhere, and nnx.Optimizer asks it outside of a step."""
    model, optimizer = parted(plan, optax.yogi(0.1))

    def step(model, optimizer, batch):
        optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))

    decorated(plan, step)(model, optimizer, X)
    for kept in (optimizer.opt_state[0].mu, optimizer.opt_state[0].nu):
        assert not np.ravel(kept["first"]["kernel"].get_value().value)[15:].any()


# -- refused ----------------------------------------------------------------------------------------


def test_refuses_optimizers_that_look_beyond_a_part(plan):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    model, optimizer = parted(plan, tx)
    with pytest.raises(StepError, match=r"Take collc\.clip_by_global_norm"):
        decorated(plan)(model, optimizer, X)
    assert optimizer.tx == tx


def test_refuses_masks_by_the_size_of_a_part(plan):
    tx = optax.adamw(0.1, mask=lambda tree: jax.tree.map(lambda x: x.size > 5, tree))
    model, optimizer = parted(plan, tx)
    with pytest.raises(StepError, match=r"the update of first/kernel differs.*mask=mask"):
        decorated(plan)(model, optimizer, X)


def test_refuses_an_optimizer_of_other_parameters(plan):
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    with pytest.raises(StepError, match="made of other parameters than the module now has"):
        decorated(plan)(parted(plan)[0], optimizer, X)


def test_refuses_gradients_that_lie_otherwise(plan):
    def step(model, optimizer, batch):
        copy = whole(model)
        grads = nnx.grad(lambda m: jnp.mean(m(batch)))(copy)
        optimizer.update(model, collc.pmean(grads))

    with pytest.raises(StepError, match="the gradients do not lie as the parameters"):
        decorated(plan, step)(*parted(plan), X)


def test_refuses_to_gather_into_the_module_itself(plan):
    def step(model, batch):
        nnx.update(model, collc.all_gather(nnx.state(model, nnx.Param)))

    message = r"model\.first\.bias held a collc\.Shard of \[5\] before the step, but an array after"
    with pytest.raises(StepError, match=message):
        decorated(plan, step)(parted(plan)[0], X)


def test_refuses_parts_in_attributes_and_without_axes(plan):
    step = decorated(plan, lambda model, batch: None)
    model = Net(nnx.Rngs(0))
    model.seen = nnx.data({"a": [collc.ranked(jnp.zeros(3), plan)]})
    with pytest.raises(StepError, match=r"model\.seen\.a\[0\] is a collc\.Ranked that is an attr"):
        step(model, X)
    model.seen = nnx.Variable(collc.Ranked(jnp.zeros((2, 4, 3))))
    with pytest.raises(StepError, match=r"model\.seen holds a collc\.Ranked without axes"):
        step(model, X)


def test_refuses_to_rank_what_lies_already(plan):
    model, _ = parted(plan)
    with pytest.raises(StepError, match="ranked already, or in shards"):
        collc.ranked(nnx.state(model, nnx.Param), plan)
