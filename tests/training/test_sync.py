"""collc.sync: an identity whose backward reduces, layer by layer."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import collc
from collc.errors import DataError, MeshError, PlanError, ScheduleError, StepError

from .asked import collectives
from .losses import BOTH, LAYERS, LOSSES, W, X, equal, scanned, whole


def step_of(loss, sync):
    def step(w, batch):
        value, grads = jax.value_and_grad(lambda w, batch: loss(w, batch, sync))(w, batch)
        return collc.pmean((value, grads))

    return step


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_one_pmean(plan, name):
    decorated = collc.schedule(plan, batch="batch")
    found = jax.jit(decorated(step_of(LOSSES[name], collc.sync)))(W, X)
    equal(found, whole(name))


def test_one_collective_for_a_layer_and_only_the_rest_after(plan):
    step = collc.schedule(plan, batch="batch")(step_of(scanned, collc.sync))
    asked = sorted(collectives(jax.make_jaxpr(step)(W, X)))
    # In the backward's loop 9 + 3 as one buffer; then the loss and the head, not the layers again.
    assert asked == [("float32", 1 + 3, 1), ("float32", 9 + 3, LAYERS)]
    assert "collc.pmean over gpu and host is elided in part" in step.explain()
    text = jax.jit(step).lower(W, X).compile().as_text()
    assert re.search(r'op_name="[^"]*collc/sync/[^"]*collc/ring.reduce_scatter/gpu', text)
    assert "f32[40]" not in text  # no buffer of all is put together


def test_all_synced_nothing_is_left_to_reduce(plan):
    def step(w, batch):
        grads = jax.grad(lambda w: scanned(collc.sync(w), batch))(w)
        return collc.pmean(grads)

    step = collc.schedule(plan, batch="batch")(step)
    assert list(collectives(jax.make_jaxpr(step)(W, X))) == [("float32", 27 + 9 + 3, 1)]
    assert "is elided: its operand" in step.explain()
    equal(jax.jit(step)(W, X), whole()[1])


def test_two_dtypes_are_two_buffers_and_narrow_ones_stay_narrow(plan):
    w = {"a": jnp.ones((2, 3), jnp.bfloat16), "b": jnp.ones((3,)), "c": jnp.ones((3,))}

    def step(w, batch):
        def loss(w):
            w = collc.sync(w)
            return (batch @ (w["a"].sum(0).astype(jnp.float32) + w["b"] * w["c"])).sum()

        return jax.grad(loss)(w)

    step = collc.schedule(plan, batch="batch")(step)
    asked = list(collectives(jax.make_jaxpr(step)(w, X)))
    assert sorted(asked) == [("bfloat16", 6, 1), ("float32", 6, 1)]
    found = jax.jit(step)(w, X)
    assert found["a"].dtype == jnp.bfloat16
    np.testing.assert_allclose(found["b"], X.sum(0) / 8)


@pytest.mark.parametrize("options", [{"accumulate": "float32"}, {"wire": "bfloat16"}])
def test_options_are_those_of_pmean(plan, options):
    def step(w, batch):
        x = batch.astype(w.dtype) * 1.01
        synced = jax.grad(lambda w: (x @ collc.sync(w, **options)).sum())(w)
        return synced, collc.pmean(jax.grad(lambda w: (x @ w).sum())(w), **options)

    w = jnp.ones(3, jnp.bfloat16 if "accumulate" in options else jnp.float32)
    equal(*jax.jit(collc.schedule(plan, batch="batch")(step))(w, X))


def test_a_gradient_that_does_not_depend_on_the_batch(plan):
    """Weight decay on what is synced: its mean is itself, and nothing is sent."""

    def step(w, batch):
        def loss(w):
            return (collc.sync(w["a"]) ** 2).sum() + (batch @ collc.sync(w["b"])).mean()

        return jax.grad(loss)(w)

    w = {"a": np.arange(3.0, dtype=np.float32), "b": np.ones(3, np.float32)}
    step = collc.schedule(plan, batch="batch")(step)
    equal(jax.jit(step)(w, X), {"a": 2 * w["a"], "b": X.mean(0)})
    assert list(collectives(jax.make_jaxpr(step)(w, X))) == [("float32", 3, 1)]


def test_a_gradient_that_is_not_synced_is_still_refused(plan):
    def step(w, batch):
        return jax.grad(lambda w: scanned(w, batch, collc.sync))(w)

    step = collc.schedule(plan, batch="batch")(step)
    with pytest.raises(StepError, match=r"\['head'\] is returned as replicated, but it differs"):
        jax.eval_shape(step, W, X)


def test_parts_of_a_mean_that_are_the_same_stay_at_home(plan):
    def step(w, batch):
        first, empty, last = batch[0], jnp.zeros((0, 2)), batch.sum()
        return collc.pmean({"a": w, "b": first, "c": empty, "d": w[0] * 2, "e": last})

    step = collc.schedule(plan, batch="batch")(step)
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    found = jax.jit(step)(w, X)
    first = X.reshape(8, 4, 3)[:, 0].mean(0)
    empty = np.zeros((0, 2), np.float32)
    equal(found, {"a": w, "b": first, "c": empty, "d": w[0] * 2, "e": X.sum() / 8})
    assert list(collectives(jax.make_jaxpr(step)(w, X))) == [("float32", 4, 1)]


# ---- in a shard_map of the user's own, typed and not -----------------------------------------------


def on_mesh(mesh, body, check_vma, out_specs):
    specs = (P(), P(BOTH))
    return jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=check_vma)
    )


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", ["scan of remat", "vmap"])
def test_reduces_exactly_once_typed_or_not(mesh, plan, name, check_vma):
    """Typed, the gradient is the same on all ranks by type, with no psum of JAX's own."""
    loss = LOSSES[name]

    def body(w, x):
        return jax.grad(lambda w: loss(collc.sync(w, plan), x))(w)

    run = on_mesh(mesh, body, check_vma, P())
    equal(run(W, X), whole(name)[1])
    assert "psum" not in str(jax.make_jaxpr(run)(W, X))


@pytest.mark.parametrize("check_vma", [True, False])
def test_of_what_varies_already(mesh, plan, check_vma):
    def body(w, x):
        w = jax.tree.map(lambda v: lax.pcast(v, ("host",), to="varying"), w)
        grads = jax.grad(lambda w: scanned(collc.sync(w, plan), x))(w)
        return jax.tree.map(lambda g: g[None], grads)

    found = on_mesh(mesh, body, check_vma, P("host"))(W, X)
    equal(found, jax.tree.map(lambda g: np.stack([g, g]), whole()[1]))


@pytest.mark.parametrize("check_vma", [True, False])
def test_forward_mode_and_second_order(mesh, plan, check_vma):
    """jvp is the identity's; differentiating a gradient reduces once more, as with one pmean."""

    def cubic(w, x):
        return ((x @ w) ** 3).mean()

    def body(w, x):
        def norm(w):
            grads = jax.grad(lambda v: cubic(collc.sync(v, plan), x))(w)
            return (grads**2).sum()

        moved = jax.jvp(lambda v: collc.sync({"v": v}, plan)["v"] * 2, (w,), (w + 1,))
        return jax.grad(norm)(w), jax.tree.map(lambda y: y[None], moved)

    def expected(w, x):
        return (jax.grad(cubic)(w, x) ** 2).sum()

    w = np.array([1, 2, -1], np.float32)
    found, (value, tangent) = on_mesh(mesh, body, check_vma, (P(), P(BOTH)))(w, X)
    np.testing.assert_allclose(found, jax.grad(expected)(w, X), rtol=1e-6)
    equal((value, tangent), (np.stack([2 * w] * 8), np.stack([2 * (w + 1)] * 8)))


def test_over_some_axes_with_a_schedule(mesh):
    def body(w, x):
        grads = jax.grad(lambda w: scanned(collc.sync(w, "ring.all_reduce @ gpu"), x))(w)
        return jax.tree.map(lambda g: g[None], grads)

    found = on_mesh(mesh, body, False, P("host"))(W, X)
    for i, half in enumerate((X[:16], X[16:])):
        equal(jax.tree.map(lambda g: g[i], found), jax.jit(jax.grad(scanned))(W, half))  # noqa: B023


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_beside_automatic_axes(kind):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(getattr(AxisType, kind),) * 2)
    plan = collc.plan(mesh, {"data": "ring"})
    own = {"w": P(None, None), "b": P(None)}

    def loss(w, batch):
        return scanned(w, batch, lambda p: collc.sync(p, specs=own))

    specs = jax.tree.map(lambda _: P(), W)
    for k in (1, 2):
        found = jax.jit(collc.value_and_grad(loss, plan, specs=specs, microbatches=k))(W, X)
        equal(found, whole())


# ---- what passes through, and what is refused ------------------------------------------------------


def test_what_has_no_gradient_passes_through(plan):
    key, flags = jax.random.key(0), np.array([True, False])
    given = {"key": key, "flags": flags, "steps": np.arange(3), "none": None}

    @jax.jit
    @collc.schedule(plan)
    def step(w):
        full = given | {"w": w, "rate": 0.5}
        out = collc.sync(full)
        assert out["key"] is key and out["flags"] is flags and out["none"] is None
        assert out["steps"] is given["steps"]
        return out["w"], out["rate"], collc.sync({}), collc.sync(())

    w, rate, *empty = step(np.ones(3, np.float32))
    assert rate == 0.5 and empty == [{}, ()]
    equal(w, np.ones(3))
    assert collc.sync({"steps": given["steps"]}) == {"steps": given["steps"]}  # nothing to reduce


def test_needs_a_plan_whose_axes_are_manual(mesh, plan):
    with pytest.raises(PlanError, match=r"collc.sync: no plan here. Decorate the step"):
        collc.sync(W)
    with pytest.raises(MeshError, match=r"collc.sync: .* runs inside jax.shard_map"):
        collc.sync(W, plan)
    half = jax.shard_map(
        lambda w: collc.sync(w, plan), mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"host"}
    )
    with pytest.raises(MeshError, match=r"collc.sync: 'gpu' is an automatic axis here"):
        jax.eval_shape(jax.jit(half), W)


def test_refuses_what_cannot_be_reduced(plan):
    def refusal(**options):
        step = collc.schedule(plan)(lambda w: collc.sync({"a": w}, **options))
        return lambda: jax.eval_shape(step, np.ones((2, 3), np.float32))

    with pytest.raises(DataError, match=r"collc.sync: 'text' is no array, nor a number"):
        jax.eval_shape(collc.schedule(plan)(lambda w: collc.sync({"a": w, "b": "text"})), 1.0)
    with pytest.raises(DataError, match="add= has to be a pytree like params"):
        refusal(add=np.ones((2, 3)))()
    with pytest.raises(DataError, match=r"has float32\[3\] for a leaf float32\[2, 3\]"):
        refusal(add={"a": np.ones(3, np.float32)})()
    with pytest.raises(DataError, match=r"has int32\[2, 3\] for a leaf"):
        refusal(add={"a": np.ones((2, 3), np.int32)})()
    with pytest.raises(ScheduleError, match=r"collc.sync: wire= has no effect on native"):
        refusal(wire="bfloat16", plan="native.all_reduce @ gpu")()
    with pytest.raises(ScheduleError, match=r"collc.sync needs partial -> replica"):
        refusal(plan="ring.all_gather @ gpu")()
    with pytest.raises(DataError, match="specs= has no effect here"):
        refusal(specs={"a": P()})()

    def loss(w, batch):
        return (batch @ collc.sync(w, add=w)).mean()

    with pytest.raises(StepError, match=r"keeps the sums itself. Drop add="):
        jax.eval_shape(collc.value_and_grad(loss, plan, microbatches=2), W["head"], X)
