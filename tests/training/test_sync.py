"""collc.sync: an identity whose backward reduces, layer by layer; with micro-batches the last one."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import collc
from collc.errors import DataError, MeshError, PlanError, ScheduleError, StepError
from collc.language.library import load

collectives = load(Path(__file__).parent / "asked.py").collectives

BOTH = ("host", "gpu")
LAYERS = 3
# Small whole numbers: whatever is added in whatever order is exact, and 8 divides exactly.
X = (np.arange(96, dtype=np.float32).reshape(32, 3) % 5) - 2
W = {
    "layers": {
        "w": (np.arange(27, dtype=np.float32).reshape(LAYERS, 3, 3) % 3) - 1,
        "b": (np.arange(9, dtype=np.float32).reshape(LAYERS, 3) % 2),
    },
    "head": np.array([1, 2, -1], np.float32),
}


def same(p):
    return p


def plain(w, batch, sync=same):
    """Layers one after another, each sliced out of the stack."""
    for i in range(LAYERS):
        p = sync(jax.tree.map(lambda x: x[i], w["layers"]))  # noqa: B023
        batch = batch @ p["w"] + p["b"]
    return ((batch @ w["head"]) ** 2).mean()


def scanned(w, batch, sync=same, wrap=same, unroll=1):
    def layer(x, p):
        p = sync(p)
        return x @ p["w"] + p["b"], None

    x, _ = lax.scan(wrap(layer), batch, w["layers"], unroll=unroll)
    return ((x @ w["head"]) ** 2).mean()


def inner_vmap(w, batch, sync=same):
    """A scan whose layers vmap over the examples."""

    def layer(x, p):
        def row(x):
            q = sync(p)
            return x @ q["w"] + q["b"]

        return jax.vmap(row)(x), None

    x, _ = lax.scan(layer, batch, w["layers"])
    return ((x @ w["head"]) ** 2).mean()


def vmapped(w, batch, sync=same):
    """All layers at once, beside each other."""

    def layer(p):
        p = sync(p)
        return (batch @ p["w"] + p["b"]) @ w["head"]

    return (jax.vmap(layer)(w["layers"]) ** 2).sum(0).mean()


def forms(loss, **options):
    return lambda w, batch, sync=same: loss(w, batch, sync, **options)


LOSSES = {
    "plain": plain,
    "scan": scanned,
    "unrolled scan": forms(scanned, unroll=LAYERS),
    "remat of scan": lambda w, batch, sync=same: jax.checkpoint(
        lambda w, batch: scanned(w, batch, sync)
    )(w, batch),
    "scan of remat": forms(scanned, wrap=jax.checkpoint),
    "scan of a saving remat": forms(
        scanned, wrap=lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)
    ),
    "scan of jit": forms(scanned, wrap=jax.jit),
    "inner vmap": inner_vmap,
    "vmap": vmapped,
}


@functools.cache
def whole(name="scan"):
    """The loss and its gradients on the whole batch."""
    return jax.jit(jax.value_and_grad(LOSSES[name]))(W, X)


def equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


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


# ---- micro-batches ----------------------------------------------------------------------------------


def whole_sync(loss):
    """The head and the layers in syncs of their own."""

    def synced(w, batch):
        return loss({**w, "head": collc.sync(w["head"])}, batch, collc.sync)

    return synced


@pytest.mark.parametrize(
    ("name", "k"),
    [("scan", 4), *((name, 2) for name in LOSSES if name not in ("inner vmap", "vmap"))],
)
def test_of_micro_batches_only_the_last_reduces(plan, name, k):
    grad = collc.value_and_grad(whole_sync(LOSSES[name]), plan, microbatches=k)
    equal(jax.jit(grad)(W, X), whole(name))
    asked = list(collectives(jax.make_jaxpr(grad)(W, X)))
    assert sum(size * times for _, size, times in asked) == 27 + 9 + 3 + 1  # once, and the loss
    assert len(asked) > 2  # and not at the end


def test_sums_are_kept_wide(plan):
    """On each device 1, then 7 times 1/256: in bfloat16 the small ones vanish one by one."""
    x = np.tile(np.array([1.0] + [2.0**-8] * 7), 8).astype(jnp.bfloat16)

    def loss(w, batch):
        return (collc.sync(w) * batch).sum()

    grad = collc.value_and_grad(loss, plan, microbatches=8)
    _, found = jax.jit(grad)(jnp.bfloat16(1), x)
    assert found.dtype == jnp.bfloat16
    assert float(found) == float(jnp.bfloat16((1 + 7 * 2.0**-8) / 8))
    assert ("bfloat16", 1, 1) in list(collectives(jax.make_jaxpr(grad)(jnp.bfloat16(1), x)))


def twice(w, batch):
    """Tied weights: two syncs of one parameter, to which a sum is not to be added twice."""
    return (batch @ collc.sync(w["layers"]["w"][0]) @ collc.sync(w["layers"]["w"][0])).sum(1).mean()


def beside(w, batch):
    """A parameter that is used beside its sync."""
    decay = sum((leaf**2).sum() for leaf in jax.tree.leaves(w))
    return scanned(w, batch, collc.sync) + decay


def shared(w, batch):
    """One parameter in every iteration."""

    def layer(x, _):
        return x @ collc.sync(w["layers"]["w"][1]), None

    return lax.scan(layer, batch, length=2)[0].sum(1).mean()


def scaled(w, batch):
    """What is synced is not the parameter itself."""
    return (batch @ collc.sync(w["head"] * 2)).mean()


def overlapping(w, batch):
    stack = w["layers"]["w"]
    return (batch @ collc.sync(stack[:2]).sum(0) @ collc.sync(stack[1:]).sum(0)).sum(1).mean()


def in_a_branch(w, batch):
    return lax.cond(w["head"][0] > 0, lambda v: (batch @ collc.sync(v)).mean(), jnp.sum, w["head"])


def in_aux_too(w, batch):
    """A metric takes the layers through a sync of its own."""
    metric = collc.pmean(lax.stop_gradient(scanned(w, batch, collc.sync)))
    return scanned(w, batch, collc.sync), metric


@pytest.mark.parametrize(
    "loss", [twice, beside, shared, scaled, overlapping, in_a_branch, in_aux_too]
)
def test_other_uses_are_right_too(plan, loss):
    def bare(w, batch):
        return loss(w, batch)

    aux = loss is in_aux_too
    found = jax.jit(collc.value_and_grad(bare, plan, microbatches=4, has_aux=aux))(W, X)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collc, "sync", same, raising=False)
        patch.setattr(collc, "pmean", same, raising=False)
        expected = jax.jit(jax.value_and_grad(bare, has_aux=aux))(W, X)
    equal(found[1], expected[1])
    equal(found[0][0] if aux else found[0], expected[0][0] if aux else expected[0])


def test_parts_and_casts_of_a_parameter(plan):
    def loss(w, batch, sync=same):
        q, k = jnp.split(w["qk"], 2)
        first, second = (sync(x.astype(jnp.bfloat16)).astype(jnp.float32) for x in (q, k.T))
        return ((batch @ first) * (batch @ second)).sum() + (
            batch @ sync(w["b"].reshape(3, 1))
        ).sum()

    w = {"qk": np.ones((6, 3), np.float32), "b": np.ones(3, np.float32)}
    x = np.where(np.arange(32)[:, None] == 5, X, 0)  # exact in bfloat16: one rank has data
    grad = collc.value_and_grad(lambda w, b: loss(w, b, collc.sync), plan, microbatches=2)
    equal(jax.jit(grad)(w, x), jax.jit(collc.value_and_grad(loss, plan, microbatches=2))(w, x))
    asked = sorted(collectives(jax.make_jaxpr(grad)(w, x)))
    assert asked == [("bfloat16", 9, 1)] * 2 + [("float32", 1, 1), ("float32", 3, 1)]


def test_several_arguments_and_auxiliary_results(plan):
    def loss(head, layers, batch, sync=same):
        y = scanned({"layers": layers, "head": sync(head)}, batch, sync)
        return y, {"each": collc.Batch(batch[:, 0]), "most": lax.stop_gradient(y)}

    def synced(head, layers, batch):
        y, aux = loss(head, layers, batch, collc.sync)
        return y, aux | {"most": collc.pmax(aux["most"])}

    args = W["head"], W["layers"], X
    grad = collc.value_and_grad(synced, plan, argnums=(1, 0), has_aux=True, microbatches=2)
    (value, aux), grads = jax.jit(grad)(*args)
    expected = jax.jit(jax.value_and_grad(loss, argnums=(1, 0), has_aux=True))(*args)
    equal((value, grads), (expected[0][0], expected[1]))
    equal(aux["each"], X[:, 0])
    assert aux["most"].shape == (2,)
    asked = list(collectives(jax.make_jaxpr(grad)(*args)))
    assert sum(size * times for _, size, times in asked) == 39 + 1 + 2  # and pmax of each piece


def test_a_loop_written_by_hand(plan):
    @jax.jit
    @collc.schedule(plan, batch="batch")
    def step(w, batch):
        first, last = jnp.split(batch, 2)
        so_far = jax.grad(scanned)(w, first)

        def loss(w):
            return scanned(collc.sync(w, add=so_far), last)

        return jax.grad(loss)(w)

    equal(step(W, X), jax.tree.map(lambda g: 2 * g, whole()[1]))


def test_sums_are_sliced_beside_their_parameters(plan):
    @jax.jit
    @collc.schedule(plan, batch="batch")
    def step(layers, batch):
        sums = jax.tree.map(jnp.ones_like, layers)

        def loss(layers, sums):
            w = {"layers": (layers, sums), "head": jnp.ones(3)}
            return scanned(w, batch, lambda pair: collc.sync(pair[0], add=pair[1]))

        stacked = jax.vmap(lambda p, s: collc.sync(p, add=s)["w"] * 2)
        both = jax.grad(lambda p: stacked(p, sums).sum())(layers)
        return jax.grad(loss)(layers, sums), both

    found, both = step(W["layers"], X)
    expected = jax.jit(jax.grad(scanned))(W | {"head": np.ones(3, np.float32)}, X)["layers"]
    equal(found, jax.tree.map(lambda g: g + 1, expected))
    equal(both, {"w": np.full((LAYERS, 3, 3), 3.0), "b": np.ones((LAYERS, 3))})


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
