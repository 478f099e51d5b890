"""Norms, clipping and skipping over leaves that are replicated, ranked, and cut in shards."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import collc
from collc.errors import DataError, StepError
from collc.lowering.shards import Shard, part

BOTH = ("host", "gpu")
RNG = np.random.default_rng(6)
W, E, S = (RNG.normal(size=size).astype(np.float32) for size in [(3, 2), (4, 5), (5, 3)])
TOTAL = np.sqrt(sum((x.astype(np.float64) ** 2).sum() for x in (W, E, S)))


def cut(x, ranks=8, servers=None):
    """The parts of a leaf, [2, 4, k, 1...], as a step takes them."""
    k, parts = part(x.shape, servers or ranks), servers or ranks
    rows = np.zeros((ranks, k), np.float32)
    rows[:parts].reshape(-1)[: x.size] = x.reshape(-1)
    return rows.reshape(2, 4, k, *(1,) * (x.ndim - 1))


def mixed(servers=None, at=None, value=np.nan):
    """Replicated, ranked over gpu, and cut over both; with a value in one rank's part."""
    rows = cut(S, servers=servers)
    if at is not None:
        rows[at] = value
    return {
        "w": W,
        "e": collc.Ranked(E, "gpu"),
        "s": Shard(rows, S.shape, BOTH, servers),
        "none": None,
        "count": np.arange(3),
    }


def run(plan, f, *args):
    return jax.jit(collc.schedule(plan, batch=())(f))(*args)


def reductions(plan, f, *args):
    jaxpr = str(jax.make_jaxpr(collc.schedule(plan, batch=())(f))(*args))
    return jaxpr.count("collc_collective[")


# A leaf counted once for each rank, or a group that is not reduced, is far off.
@pytest.mark.parametrize("servers", [None, 1, 3])
def test_norm_of_leaves_that_lie_differently(plan, servers):
    tree = mixed(servers)
    np.testing.assert_allclose(run(plan, collc.global_norm, tree), TOTAL, rtol=1e-6)
    np.testing.assert_allclose(collc.global_norm(tree), TOTAL, rtol=1e-6)  # outside: whole
    assert reductions(plan, collc.global_norm, tree) == 2
    assert reductions(plan, collc.all_finite, tree) == 1


@pytest.mark.parametrize("servers", [None, 1, 3])
def test_padding_and_who_does_not_serve_do_not_count(plan, servers):
    tree = mixed(servers)
    flat = tree["s"].value.reshape(-1)
    flat[S.size :] = np.nan  # as an optimizer without epsilon makes of zeros
    norm, finite = run(plan, lambda t: (collc.global_norm(t), collc.all_finite(t)), tree)
    np.testing.assert_allclose(norm, TOTAL, rtol=1e-6)
    assert finite


def test_norm_on_either_mesh(either_mesh):
    plan = collc.plan(either_mesh, {"gpu": "ring", "host": "tree"})
    np.testing.assert_allclose(run(plan, collc.global_norm, mixed()), TOTAL, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:optax.global_norm")
def test_replicated_leaves_need_no_collective(plan):
    def f(t):
        return collc.global_norm(t), collc.all_finite(t)

    tree = {"a": W, "b": S}
    assert reductions(plan, f, tree) == 0
    norm, finite = run(plan, f, tree)
    assert norm == optax.global_norm(tree)
    assert finite


def test_without_axes_a_ranked_leaf_is_over_all_of_the_plan(plan):
    x = RNG.normal(size=(2, 4, 3)).astype(np.float32)
    norm = run(plan, collc.global_norm, collc.Ranked(x))
    np.testing.assert_allclose(norm, np.linalg.norm(x), rtol=1e-6)


def test_variables_and_shards_in_them(plan):
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.asarray(W))
            self.e = nnx.BatchStat(jnp.asarray(E[0]))

    def norm(model, shard):
        return collc.global_norm({"model": nnx.state(model), "s": nnx.Param(shard)})

    model = collc.ranked(Model(), plan, "gpu", of=nnx.BatchStat)
    expected = np.sqrt((W**2).sum() + (S**2).sum() + 4 * (E[0] ** 2).sum())
    got = run(plan, norm, model, Shard(cut(S), S.shape, BOTH))
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_norms_are_kept_in_float32():
    many = jnp.full(1000, 300, jnp.float16)  # its square is no float16
    assert collc.global_norm(many).dtype == jnp.float32
    np.testing.assert_allclose(collc.global_norm(many), 300 * np.sqrt(1000), rtol=1e-6)
    assert collc.global_norm({"z": jnp.array([3 + 4j])}) == 5
    assert collc.global_norm({}) == 0
    assert collc.global_norm({"key": jax.random.key(0), "n": jnp.arange(3), "x": 2.0}) == 2
    assert not collc.all_finite({"a": 1.0, "z": jnp.array([complex(1, np.inf)])})


def test_axes_that_the_step_does_not_have(mesh):
    plan = collc.plan(mesh, {"gpu": "ring"})

    def f(x):
        return collc.global_norm(Shard(x, (5, 3), ("host",)))

    with pytest.raises(StepError, match="host is no axis of the step here, which has gpu"):
        run(plan, f, W)


# ---- clipping -------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_clip_is_optax_clip_on_one_device(limit):
    tree = {"a": jnp.asarray(W), "b": jnp.asarray(S)}
    own, theirs = (c.clip_by_global_norm(limit) for c in (collc, optax))
    a, b = (jax.jit(tx.update)(tree, tx.init(tree))[0] for tx in (own, theirs))
    jax.tree.map(np.testing.assert_array_equal, a, b)
    if limit == 100:
        jax.tree.map(np.testing.assert_array_equal, a, tree)


def test_clip_over_leaves_that_lie_differently(plan):
    tx = collc.clip_by_global_norm(1.0)
    got = run(plan, lambda t: tx.update(t, tx.init(t))[0], mixed())
    np.testing.assert_allclose(got["w"], W / TOTAL, rtol=1e-5)
    np.testing.assert_allclose(got["e"].value, E / TOTAL, rtol=1e-5)
    np.testing.assert_allclose(got["s"].value, cut(S) / TOTAL, rtol=1e-5)
    np.testing.assert_array_equal(got["count"], np.arange(3))


def test_clip_of_zeros_and_of_nan():
    tx = collc.clip_by_global_norm(1.0)
    assert (tx.update(jnp.zeros(3), tx.init(None))[0] == 0).all()
    got, _ = tx.update({"a": jnp.ones(2), "b": jnp.array([jnp.nan])}, tx.init(None))
    assert np.isnan(np.concatenate([got["a"], got["b"]])).all()
    half = tx.update(jnp.full(4, 2, jnp.bfloat16), tx.init(None))[0]
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half, jnp.full(4, 0.5, jnp.bfloat16))


@pytest.mark.parametrize("limit", [0, -1.0, np.nan, "1", None, True, [1.0, 2.0]])
def test_bad_limits(limit):
    with pytest.raises(DataError, match="max_norm is a positive number, not"):
        collc.clip_by_global_norm(limit)


def test_clip_with_an_injected_limit():
    tx = optax.inject_hyperparams(collc.clip_by_global_norm)(max_norm=1.0)
    got, _ = jax.jit(tx.update)(jnp.full(4, 2.0), tx.init(jnp.ones(4)))
    np.testing.assert_array_equal(got, np.full(4, 0.5))


# ---- skipping -------------------------------------------------------------------------------------

TX = collc.skip_nonfinite(optax.chain(collc.clip_by_global_norm(1.0), optax.adam(0.1)))


def bits(tree):
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        .reshape(-1)
        .view(np.uint8)
        for x in jax.tree.leaves(tree)
    ]


def step(grads, params, state):
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def test_a_nan_in_one_part_is_skipped_by_all(plan):
    def grads(**at):
        return {k: v for k, v in mixed(**at).items() if k != "count"}

    params = grads()
    params["w"] = np.where(np.arange(6).reshape(3, 2) % 2, np.float32(-0.0), W)
    run_step = jax.jit(collc.schedule(plan, batch=())(step))
    moved, state = run_step(grads(), params, TX.init(params))
    assert (int(state.skipped), bool(state.finite)) == (0, True)
    assert not np.array_equal(moved["w"], params["w"])
    same, after = run_step(grads(at=(1, 2, 0), value=np.inf), moved, state)
    assert (int(after.skipped), bool(after.finite)) == (1, False)
    for a, b in zip(bits((moved, state.inner)), bits((same, after.inner)), strict=True):
        np.testing.assert_array_equal(a, b)
    for shard in after.skipped.addressable_shards:  # on every device
        assert int(shard.data) == 1
    _, last = run_step(grads(), same, after)
    assert (int(last.skipped), bool(last.finite)) == (1, True)


def test_every_value_survives_a_skipped_step_bit_for_bit():
    params = {
        "x": jnp.array([0.0, -0.0, 1.5, jnp.inf, -3.0]),
        "z": jnp.array([complex(-0.0, -0.0)]),
    }
    grads = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
    tx = collc.skip_nonfinite(optax.sgd(0.1))
    updates, _ = jax.jit(tx.update)(grads, tx.init(params))
    for u in bits(updates["x"]):
        np.testing.assert_array_equal(u, np.full(5, -0.0, np.float32).view(np.uint8))
    after = jax.jit(optax.apply_updates)(params, updates)
    for a, b in zip(bits(params), bits(after), strict=True):
        np.testing.assert_array_equal(a, b)


def test_keys_and_extra_arguments():
    def init(params):
        return jax.random.key(3), jnp.int32(0)

    def update(updates, state, params=None, *, scale, **extra):
        key, n = state
        return jax.tree.map(lambda u: scale * u, updates), (jax.random.split(key)[0], n + 1)

    inner = optax.GradientTransformationExtraArgs(init, update)
    tx = collc.skip_nonfinite(optax.chain(inner, optax.identity()))
    state = tx.init(None)
    got, good = jax.jit(tx.update)({"a": jnp.ones(2)}, state, scale=3.0)
    assert (got["a"] == 3).all()
    assert int(good.inner[0][1]) == 1
    _, bad = jax.jit(tx.update)({"a": jnp.full(2, jnp.nan)}, good, scale=3.0)
    for a, b in zip(bits(good.inner), bits(bad.inner), strict=True):
        np.testing.assert_array_equal(a, b)


def test_skip_of_what_is_no_transformation():
    with pytest.raises(StepError, match="takes an optax transformation, not 3"):
        collc.skip_nonfinite(3)  # pyright: ignore[reportArgumentType]
