"""Replicated, batch and ranked values: what a step sees of them, and how they come back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import collc
from collc.errors import DataError, MeshError, StepError

X = np.arange(16, dtype=np.float32)


def run(plan, step, *args):
    return jax.jit(collc.schedule(plan, batch="batch")(step))(*args)


def test_every_rank_keeps_its_own(either_mesh):
    plan = collc.plan(either_mesh, {"gpu": "ring", "host": "tree"})
    state = collc.ranked({"sum": np.float32(0), "seen": np.zeros(2, np.float32)}, plan)
    assert state.axes == ("host", "gpu") and state.value["seen"].shape == (2, 4, 2)
    assert state.value["sum"].sharding.spec == P("host", "gpu")

    def step(state, batch):
        assert state.value["sum"].shape == () and state.value["seen"].shape == (2,)
        new = {"sum": state.value["sum"] + batch.sum(), "seen": state.value["seen"] + batch}
        return collc.Ranked(new, state.axes), collc.psum(new["sum"])

    for turn in (1, 2):
        state, total = run(plan, step, state, X)
        # Rank (h, g) has examples 2 (4 h + g) and the next.
        np.testing.assert_array_equal(state.value["seen"], turn * X.reshape(2, 4, 2))
        np.testing.assert_array_equal(state.value["sum"], turn * X.reshape(2, 4, 2).sum(-1))
        assert total == turn * X.sum()
    assert state.value["sum"].sharding.spec == P("host", "gpu")


def test_over_some_axes(plan):
    state = collc.ranked(jnp.zeros(()), plan, ["gpu"])
    assert state.axes == ("gpu",) and state.value.shape == (4,)

    def step(state, batch):
        return collc.Ranked(state.value + collc.psum(batch.sum(), "host"), ("gpu",))

    new = run(plan, step, state, X)
    np.testing.assert_array_equal(new.value, X.reshape(2, 4, 2).sum((0, 2)))
    with pytest.raises(StepError, match=r"(?s)returned as ranked, but .* of host\..*over gpu only"):
        run(plan, lambda batch: collc.Ranked(batch.sum(), ("gpu",)), X)


def test_without_axes_it_is_over_all_of_them(plan):
    step = jax.jit(
        collc.schedule(plan, batch="batch")(
            lambda state, batch: collc.Ranked(state.value + batch.sum())
        )
    )
    own = X.reshape(2, 4, 2).sum(-1)
    state = step(step(collc.Ranked(np.zeros((2, 4), np.float32)), X), X)
    np.testing.assert_array_equal(state.value, 2 * own)


def test_a_name_is_one_axis(plan):
    state = collc.ranked(jnp.zeros(()), plan, "gpu")
    assert state.axes == ("gpu",) == collc.Ranked(0, "gpu").axes == collc.Ranked(0, ["gpu"]).axes
    new = run(plan, lambda s, batch: collc.Ranked(s.value + collc.psum(batch[0]), "gpu"), state, X)
    assert new.axes == ("gpu",) and new.value.shape == (4,)


def test_per_example_results_keep_their_order(plan):
    pair, doubled = run(
        plan, lambda batch: (collc.Batch({"x": batch, "y": -batch[:1]}), collc.Batch(2 * batch)), X
    )
    np.testing.assert_array_equal(pair["x"], X)
    np.testing.assert_array_equal(pair["y"], -X[::2])
    np.testing.assert_array_equal(doubled, 2 * X)


def test_ranked_in_the_leaves_of_a_state(plan):
    state = {"w": jnp.float32(1), "own": collc.ranked(jnp.zeros(2), plan, ["host"])}

    def step(state, batch):
        own = collc.Ranked(state["own"].value + collc.psum(batch, "gpu"), ("host",))
        return {"w": state["w"] + 1, "own": own}

    state = run(plan, step, run(plan, step, state, X), X)
    assert state["w"] == 3
    np.testing.assert_array_equal(state["own"].value, 2 * X.reshape(2, 4, 2).sum(1))


def test_shapes_that_do_not_fit(plan):
    step = collc.schedule(plan)(lambda state: None)
    with pytest.raises(DataError, match=r"state\['a'\] is ranked over host and gpu, so its shape"):
        step({"a": collc.Ranked(np.zeros((4, 2)), ("host", "gpu"))})
    with pytest.raises(DataError, match=r"has to begin with \(2, 4\); it is \(2,\)\. Make it with"):
        step(collc.Ranked(np.zeros(2)))
    with pytest.raises(
        DataError, match="ranked over gpu and host, but the plan's axes are host and"
    ):
        step(collc.Ranked(np.zeros((4, 2)), ("gpu", "host")))
    with pytest.raises(StepError, match="result is ranked over model, but the plan's axes"):
        run(plan, lambda batch: collc.Ranked(batch, ("model",)), X)


def test_ranked_says_what_it_needs(plan):
    with pytest.raises(MeshError, match=r"no axis 'gpus'\. Did you mean gpu\?"):
        collc.ranked(jnp.zeros(()), plan, ["gpus"])
    with pytest.raises(StepError, match="selects variables of an nnx module; this is none"):
        collc.ranked({"a": 1.0}, plan, of=nnx.Param)
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    for of in (None, "BatchStat"):
        with pytest.raises(StepError, match="needs of=, the type of the variables"):
            collc.ranked(model, plan, of=of)
    with pytest.raises(StepError, match=r"collc\.ranked takes a plan, not None"):
        collc.ranked(jnp.zeros(()), None)
    for value in ("x", {"a": [object()]}):
        with pytest.raises(
            DataError, match=r"collc\.ranked takes arrays, but there is a (str|object)"
        ):
            collc.ranked(value, plan)
    with pytest.raises(StepError, match="has no variable of type BatchStat"):
        collc.ranked(model, plan, of=nnx.BatchStat)


def test_rank_key_folds_the_rank_into_a_copy(plan):
    key = jax.random.key(7)

    def step(key, batch):
        return key, collc.Ranked(jax.random.bits(collc.rank_key(key)))

    same, bits = run(plan, step, key, X)
    assert same == key
    expected = [jax.random.bits(jax.random.fold_in(key, rank)) for rank in range(8)]
    np.testing.assert_array_equal(bits.value, np.reshape(expected, (2, 4)))
    with pytest.raises(StepError, match="inside a decorated step only"):
        collc.rank_key(key)
