"""The replication check lets everyday code pass: loops, branches, remat, and what flax makes of them."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from .stand_in import BOTH, NONE, W, X, bind, checked, here


def test_fori_loop_and_while_loop():
    def step(w, x):
        a = lax.fori_loop(0, 3, lambda i, c: c + x.sum(), 0.0)
        b = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + w), (0, jnp.zeros(3)))
        c = lax.while_loop(lambda c: c < x.sum(), lambda c: c + 1, 0.0)
        return a, b, c

    assert checked(step).varying == (BOTH, NONE, NONE, BOTH)


def test_a_loop_carries_variation_from_slot_to_slot():
    def step(w, x):
        return lax.fori_loop(0, 5, lambda i, c: (x.sum(), c[0], c[1], c[3]), (0.0, 0.0, 0.0, 0.0))

    assert checked(step).varying == (BOTH, BOTH, BOTH, NONE)


def test_a_scan_of_no_steps_returns_what_it_got():
    def step(w, x, length):
        return lax.scan(lambda c, t: (lax.pmax(c, ("host", "gpu")), None), x, None, length)[0]

    assert checked(partial(step, length=0)).varying == (BOTH,)
    assert checked(partial(step, length=2)).varying == (NONE,)


def test_cond_with_a_zeros_branch():
    def step(w, x):
        by_x = lax.cond(x[0, 0] > 0, lambda: w, lambda: jnp.zeros(3))
        of_x = lax.cond(w[0] > 0, lambda: x.sum(0), lambda: jnp.zeros(3))
        return by_x, of_x, lax.cond(w[0] > 0, lambda: w, lambda: jnp.zeros(3))

    assert checked(step).varying == (BOTH, BOTH, NONE)


def test_linen_lstm():
    model = nn.RNN(nn.LSTMCell(4))
    x = np.ones((16, 5, 3), np.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    def step(w, x):
        grads = jax.grad(lambda w: model.apply(w, x).sum())(w)
        return jax.tree.map(lambda g: bind(g), grads), grads

    found = checked(step, params, x)
    half = len(found.varying) // 2
    assert found.varying == (NONE,) * half + (BOTH,) * half


def test_nnx_lstm():
    model = nnx.eval_shape(lambda: nnx.RNN(nnx.LSTMCell(3, 4, rngs=nnx.Rngs(0))))
    graph, state = nnx.split(model)
    x = np.ones((16, 5, 3), np.float32)

    def step(state, x):
        model = nnx.merge(graph, state)
        grads = nnx.grad(lambda model: model(x).sum())(model)
        return jax.tree.map(lambda g: lax.pmean(g, ("host", "gpu")), grads), nnx.state(model)

    assert set(checked(step, state, x).varying) == {NONE}


def test_remat_with_a_mean_of_parameters():
    """What remat computes again in the backward pass is no cotangent."""

    def step(w, x):
        block = jax.checkpoint(lambda c, w: jnp.sin(c * lax.pmean(w * w, ("host", "gpu"))))

        def total(w):
            return lax.scan(lambda c, _: (block(c, w), None), x, None, length=3)[0].sum()

        return lax.pmean(jax.grad(total)(w), ("host", "gpu"))

    assert checked(step).varying == (NONE,)


def test_custom_vjp_and_custom_jvp():
    @jax.custom_vjp
    def double(x):
        return x * 2

    double.defvjp(lambda x: (double(x), x), lambda x, g: (g * jnp.ones_like(x) * 2,))

    def step(w, x):
        return double(w), double(x), jax.nn.relu(w), jax.grad(lambda w: double(w * x).sum())(w)

    assert checked(step).varying == (NONE, BOTH, NONE, BOTH)


@pytest.mark.parametrize("train", [True, False])
def test_batch_norm_with_axis_names(train):
    model = nn.BatchNorm(use_running_average=not train, axis_name=("host", "gpu"))
    variables = jax.eval_shape(nn.BatchNorm(True).init, jax.random.key(0), X)

    def step(variables, x):
        def local(params):
            y, new = model.apply(variables | {"params": params}, x, mutable=["batch_stats"])
            return (y * x).sum(), new

        grads, new = jax.grad(local, has_aux=True)(variables["params"])
        return lax.pmean(grads, ("host", "gpu")), new

    assert set(checked(step, variables).varying) == {NONE}


def test_batch_statistics_of_each_rank_vary():
    model = nn.BatchNorm(use_running_average=False)
    variables = jax.eval_shape(nn.BatchNorm(True).init, jax.random.key(0), X)
    found = checked(lambda v, x: model.apply(v, x, mutable=["batch_stats"])[1], variables)
    assert set(found.varying) == {BOTH}


def test_the_mean_of_parameters_under_eval_mode():
    """Synchronised statistics of what does not vary: a replicated batch."""
    model = nn.BatchNorm(use_running_average=False, axis_name="gpu")
    variables = jax.eval_shape(nn.BatchNorm(True).init, jax.random.key(0), X)

    def step(v, x):
        return model.apply(v, jnp.outer(v["params"]["scale"], W), mutable=["batch_stats"])

    found = checked(step, variables)
    assert set(found.varying) == {NONE}
    assert len(found.notes) == 1


def test_vmap_with_its_own_axis_name():
    def step(w, x):
        y = jax.vmap(lambda t: lax.pmean(t, "b") + lax.axis_index("b"), axis_name="b")(w)
        z = jax.vmap(lambda t: lax.psum(t, ("b", "gpu")), axis_name="b")(x)
        return y, z, jax.vmap(lambda t: lax.pmean(t, ("b", "gpu")), axis_name="b")(w)

    assert checked(step).varying == (NONE, frozenset({"host"}), NONE)


def test_a_replicated_dropout_key_is_noted_once():
    model = nn.Dropout(0.5, deterministic=False)

    def step(key, x):
        y = model.apply({}, x, rngs={"dropout": key})  # dropped
        folded = jax.random.fold_in(key, lax.axis_index(("host", "gpu")))
        z = jax.random.bernoulli(folded, 0.5, (3,))
        return y, z, jax.random.fold_in(key, 1)

    found = checked(step, jax.random.key(0))
    assert found.varying == (BOTH, BOTH, NONE)
    (note,) = found.notes
    assert note.startswith(here(step, "# dropped") + " in step: random bits from a key that is")
    assert "the same on all ranks of host and gpu" in note


def test_a_key_folded_with_one_coordinate_is_the_same_over_the_other():
    def step(key, x):
        return jax.random.normal(jax.random.fold_in(key, lax.axis_index("gpu")), (2,))

    (note,) = checked(step, jax.random.key(0)).notes
    assert "all ranks of host, so" in note


def test_helpers_traced_elsewhere_have_the_line_of_their_call():
    jax.make_jaxpr(lambda w: jnp.linalg.norm(w) + jnp.clip(w, 0, 1))(W)  # fills the caches

    def step(w, x):
        return jnp.clip(x, 0, 1), jnp.linalg.norm(x)

    for chain in checked(step).chains:
        assert chain == (here(step, "jnp.clip") + " in step",)


def test_other_primitives():
    def step(w, x):
        a = lax.reduce(w, 0.0, lax.add, (0,))
        b = w.at[0].add(1.0).at[1].multiply(2.0).at[jnp.array([0])].min(0)
        c = jnp.linalg.solve(jnp.eye(3) * 2, w), jnp.linalg.solve(jnp.eye(3) * 2, x[0])
        d = lax.sort((w, x[0]), num_keys=1)
        e = lax.optimization_barrier((w, x))
        f = lax.platform_dependent(w, cpu=lambda v: v + 1, default=lambda v: v)
        g = lax.reduce_window(w, 0.0, lax.add, (2,), (1,), "VALID"), jnp.cumsum(w), lax.top_k(w, 2)
        h = jnp.searchsorted(w, w), jnp.searchsorted(w, x[0]), jax.scipy.linalg.expm(jnp.diag(w))
        jax.debug.print("{}", x)
        return a, b, *c, *d, *e, f, g, h

    n = NONE
    expected = (n, n, n, BOTH, BOTH, BOTH, n, BOTH, n, n, n, n, n, n, BOTH, n)
    assert checked(step).varying == expected


def test_callbacks_vary():
    def step(w, x):
        return jax.pure_callback(lambda w: w, jax.ShapeDtypeStruct((3,), np.float32), w)

    assert checked(step).varying == (BOTH,)
