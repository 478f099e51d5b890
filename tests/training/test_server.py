"""A sharded server against replicated training with the same optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import collc
from collc import consistency
from collc.lowering.shards import is_shard, part

OPTIMIZERS = {
    "adam": optax.adam(0.05),
    "adamw": optax.adamw(0.05, weight_decay=0.1),
    "momentum": optax.sgd(0.05, momentum=0.9),
}
SHAPES = {
    "one": (1,),
    "seven": (7,),
    "ten": (2, 5),
    "scalar": (),
    "deep": (3, 2, 2),
    "none": (0, 3),
}


def fresh():
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    return {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, SHAPES.items(), strict=True)}


def loss_fn(params, batch):
    total = sum(jnp.sum(jnp.sin(x + batch.sum(axis=1).mean())) for x in params.values())
    return total + jnp.mean(batch) * sum(jnp.sum(x**2) for x in params.values())


def plan_of(n):
    if n == 8:
        kinds = (AxisType.Auto,) * 2
        mesh = jax.make_mesh((2, 4), ("host", "gpu"), kinds, devices=jax.devices()[:8])
        return collc.plan(mesh, {"gpu": "ring", "host": "halving"})
    mesh = jax.make_mesh((n,), ("gpu",), (AxisType.Auto,), devices=jax.devices()[:n])
    return collc.plan(mesh, {"gpu": "ring"})


def step_of(plan):
    @jax.jit
    @collc.schedule(plan, batch="batch")
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.pull(), batch)
        return state.push(grads), collc.pmean(loss)

    return step


def pulled(state, plan):
    return jax.jit(collc.schedule(plan)(lambda state: state.pull()))(state)


def batches(n, steps=4):
    return [jax.random.normal(jax.random.key(t + 1), (n * 2, 3)) for t in range(steps)]


def per_rank(grads_of, n, batch):
    return jax.tree.map(lambda *g: sum(g) / n, *[grads_of(b) for b in jnp.split(batch, n)])


def trained(tx, data, n):
    params = fresh()
    opt = tx.init(params)
    for batch in data:
        grads = per_rank(lambda b, p=params: jax.grad(loss_fn)(p, b), n, batch)
        updates, opt = tx.update(grads, opt, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_replicated_training(name, n):
    tx, plan = OPTIMIZERS[name], plan_of(n)
    state = collc.server(plan, tx).init(fresh())
    step = step_of(plan)
    data = batches(n)
    for batch in data:
        state, _ = step(state, batch)
    expected = trained(tx, data, n)
    for key, value in pulled(state, plan).items():
        assert value.shape == SHAPES[key]
        np.testing.assert_allclose(value, expected[key], rtol=2e-5, atol=2e-6, err_msg=key)
    assert int(state.skipped) == 0
    for key, shard in state.params.items():
        flat = np.asarray(shard.value).reshape(-1)
        size = int(np.prod(SHAPES[key]))
        assert flat.size == n * part(SHAPES[key], n)
        assert not flat[size:].any(), key


@pytest.mark.newest_only
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_k_servers_equal_replicated_training(servers):
    tx, plan, data = OPTIMIZERS["adamw"], plan_of(3), batches(3, 3)
    state = collc.server(plan, tx, servers=servers).init(fresh())
    step = step_of(plan)
    for batch in data:
        state, _ = step(state, batch)
    for key, value in pulled(state, plan).items():
        np.testing.assert_allclose(value, trained(tx, data, 3)[key], rtol=2e-5, atol=2e-6)
    for key, shard in state.params.items():
        assert shard.value.shape[:2] == (3, part(SHAPES[key], servers))
        assert not np.asarray(shard.value)[servers:].any()  # who does not serve holds nothing


def test_gradients_of_shards_are_means_already():
    tx, plan, data = OPTIMIZERS["adam"], plan_of(8), batches(8)

    @jax.jit
    @collc.schedule(plan, batch="batch")
    def step(state, batch):
        sharded = jax.value_and_grad(lambda p, b: loss_fn(collc.all_gather(p), b))
        loss, grads = sharded(state.params, batch)
        assert all(map(is_shard, jax.tree.leaves(grads, is_leaf=is_shard)))
        return state.push(grads), collc.pmean(loss)

    state = collc.server(plan, tx).init(fresh())
    for batch in data:
        state, _ = step(state, batch)
    for key, value in pulled(state, plan).items():
        np.testing.assert_allclose(value, trained(tx, data, 8)[key], rtol=2e-5, atol=2e-6)


def test_layers_of_a_loop_are_gathered_one_by_one():
    plan = plan_of(8)
    params = {"layers": {"w": jax.random.normal(jax.random.key(0), (3, 5, 5))}, "head": jnp.ones(5)}
    server = collc.server(plan, optax.sgd(0.1), stacked="layers/*")

    def loss(params, batch, whole):
        def layer(x, w):
            return jnp.tanh(x @ whole(w)["w"]), None

        y, _ = jax.lax.scan(jax.checkpoint(layer), batch, params["layers"])
        return jnp.mean((y @ whole(params["head"])) ** 2)

    @jax.jit
    @collc.schedule(plan, batch="batch")
    def step(state, batch):
        grads = jax.grad(loss)(state.params, batch, collc.all_gather)
        return state.push(grads)

    state = server.init(params)
    assert state.params["layers"]["w"].value.shape == (2, 4, 3, 4, 1)
    batch = jax.random.normal(jax.random.key(1), (16, 5))
    got = pulled(step(state, batch), plan)
    grads = per_rank(lambda b: jax.grad(loss)(params, b, lambda x: x), 8, batch)
    jax.tree.map(
        lambda a, p, g: np.testing.assert_allclose(a, p - 0.1 * g, rtol=1e-5, atol=1e-6),
        got,
        params,
        grads,
    )


@pytest.mark.newest_only
@pytest.mark.parametrize("late", [1, 2])
def test_a_delayed_push_is_applied_late(late):
    tx, plan, data = OPTIMIZERS["adamw"], plan_of(3), batches(3, 5)
    state = collc.server(plan, tx, consistency=consistency.Delayed(late)).init(fresh())
    step = step_of(plan)
    params = fresh()
    opt, waiting = tx.init(params), []
    for batch in data:
        state, _ = step(state, batch)
        waiting.append(per_rank(lambda b, p=params: jax.grad(loss_fn)(p, b), 3, batch))
        if len(waiting) > late:
            updates, opt = tx.update(waiting.pop(0), opt, params)
            params = optax.apply_updates(params, updates)
    for key, value in pulled(state, plan).items():
        np.testing.assert_allclose(value, params[key], rtol=2e-5, atol=2e-6)
    for grads in waiting:
        updates, opt = tx.update(grads, opt, params)
        params = optax.apply_updates(params, updates)
    flushed = jax.jit(collc.schedule(plan)(lambda state: state.flush()))(state)
    for key, value in pulled(flushed, plan).items():
        np.testing.assert_allclose(value, params[key], rtol=2e-5, atol=2e-6)
    assert jax.tree.structure(flushed) == jax.tree.structure(state)


def test_some_parameters_by_path():
    tx, plan = OPTIMIZERS["adam"], plan_of(3)

    @jax.jit
    @collc.schedule(plan, batch="batch")
    def step(state, batch):
        some = state.pull("t*", "*e")
        assert sorted(some) == ["none", "one", "ten"]
        grads = jax.grad(lambda p: jnp.mean(batch) * jnp.sum(p["ten"] ** 2))({"ten": some["ten"]})
        return state.push(grads)

    before = collc.server(plan, tx).init(fresh())
    after = step(before, jnp.ones((3, 2)))
    for key in SHAPES:
        for a, b in (
            (before.params, after.params),
            (before.opt.inner[0].mu, after.opt.inner[0].mu),
        ):
            same = np.array_equal(a[key].value, b[key].value)
            assert same == (key != "ten"), key
    assert int(after.opt.inner[0].count) == 1


PADDED = {
    "adagrad": optax.adagrad(0.1),
    "rprop": optax.rprop(0.1),
    "yogi": optax.yogi(0.1),
    "adabelief": optax.adabelief(0.1),
}


@pytest.mark.parametrize("servers", [None, 2])
def test_padding_of_all_that_an_optimizer_keeps_is_zero(servers):
    plan = plan_of(3)
    params = {"seven": jnp.ones(7), "six": jnp.ones((2, 3))}
    tx = optax.chain(*PADDED.values())
    states = [collc.server(plan, tx, servers=servers).init(params)]

    @jax.jit
    @collc.schedule(plan)
    def step(state):
        return state.push(jax.tree.map(jnp.ones_like, state.pull()))

    states.append(step(states[0]))
    for state in states:
        found = jax.tree.leaves((state.params, state.opt), is_leaf=is_shard)
        shards = [x for x in found if is_shard(x)]
        assert len(shards) > 2 * len(PADDED)
        for shard in shards:
            # The others of 2 servers hold zeros, too.
            assert not np.asarray(shard.value).reshape(-1)[np.prod(shard.shape) :].any()


@pytest.mark.parametrize("servers", [None, 1])
def test_padding_does_not_count_within_an_optimizer(servers):
    """Without an epsilon, padding is 0 / 0 before it is clipped."""
    params = {"ten": jnp.arange(1.0, 11.0)}

    def chain(clip):
        return optax.chain(optax.scale_by_rms(eps=0.0), clip(0.01), optax.scale(-1.0))

    plan, tx = plan_of(3), chain(optax.clip_by_global_norm)
    state = collc.server(plan, chain(collc.clip_by_global_norm), servers=servers).init(params)
    state = jax.jit(collc.schedule(plan)(lambda state: state.push(state.pull())))(state)
    updates, _ = tx.update(params, tx.init(params))
    wanted = optax.apply_updates(params, updates)
    np.testing.assert_allclose(pulled(state, plan)["ten"], wanted["ten"], rtol=1e-6)
    assert not np.asarray(state.params["ten"].value).reshape(-1)[10:].any()


def test_a_gradient_that_is_not_finite_changes_nothing():
    plan = plan_of(8)
    state = collc.server(plan, OPTIMIZERS["adamw"]).init(fresh())
    step = step_of(plan)
    state, _ = step(state, batches(8, 1)[0])
    bad = batches(8, 1)[0].at[3, 1].set(jnp.nan)  # on one rank
    after, _ = step(state, bad)
    assert int(after.skipped) == 1
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(after.params), strict=True):
        np.testing.assert_array_equal(a.view(jnp.int32), b.view(jnp.int32))
    inner = jax.tree.leaves(state.opt.inner), jax.tree.leaves(after.opt.inner)
    for a, b in zip(*inner, strict=True):
        np.testing.assert_array_equal(a, b)
    again, _ = step(after, batches(8, 1)[0])
    assert int(again.skipped) == 1


@pytest.mark.newest_only
def test_moments_take_a_share_of_the_memory():
    """For each rank 1/N, rounded up to whole numbers, of each parameter and of each moment."""
    shapes = {"w": (64, 64), "odd": (61, 3)}

    def arguments(n, tx):
        plan = plan_of(n)
        state = collc.server(plan, tx).init({k: jnp.zeros(s) for k, s in shapes.items()})

        @jax.jit
        @collc.schedule(plan)
        def step(state):
            return state.push(state.pull())

        return step.lower(state).compile().memory_analysis().argument_size_in_bytes

    for n in (1, 2, 3, 8):
        own = 4 * sum(part(shape, n) for shape in shapes.values())
        adam, sgd = arguments(n, optax.adam(0.1)), arguments(n, optax.sgd(0.1))
        assert 2 * own <= adam - sgd <= 2 * own + 8, n  # and a counter
        assert own <= sgd <= own + 16, n  # and what counts skipped pushes


def test_mixed_strategies():
    plan = plan_of(8)
    chosen = collc.strategies(
        {
            "embed": collc.strategy.server(plan),
            "experts": collc.strategy.local("gpu"),
            "*": collc.strategy.all_reduce(plan),
        }
    )
    tx = optax.chain(collc.clip_by_global_norm(0.5), optax.adam(0.1))
    embed, dense = jnp.arange(5.0), jnp.arange(3.0)
    experts = jnp.arange(8.0).reshape(4, 2)
    params = {"embed": embed, "dense": dense, "experts": collc.ranked(jnp.zeros(2), plan, "gpu")}
    params["experts"] = collc.Ranked(jnp.broadcast_to(experts, (4, 2)), ("gpu",))
    state = collc.server(chosen, tx).init(params)

    def loss(params, batch):
        own = params["experts"].value
        return batch.mean() * (
            jnp.sum(params["embed"] ** 2) + jnp.sum(params["dense"] ** 2) + jnp.sum(own**2)
        )

    @jax.jit
    @collc.schedule(plan, batch="batch")
    def step(state, batch):
        return state.push(jax.grad(loss)(state.pull(), batch))

    batch = jnp.arange(1.0, 9.0)
    got = pulled(step(state, batch), plan)
    by_rank = np.asarray(batch).reshape(2, 4)
    grads = {
        "embed": 2 * embed * by_rank.mean(),
        "dense": 2 * dense * by_rank.mean(),
        "experts": 2 * experts * by_rank.mean(axis=0)[:, None],
    }
    whole = {"embed": embed, "dense": dense, "experts": experts}
    plain = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
    updates, _ = plain.update(grads, plain.init(whole), whole)
    expected = optax.apply_updates(whole, updates)
    np.testing.assert_allclose(got["experts"].value, expected["experts"], rtol=1e-5)
    for key in ("embed", "dense"):
        np.testing.assert_allclose(got[key], expected[key], rtol=1e-5)
