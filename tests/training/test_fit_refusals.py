"""What `collc.fit` refuses of steps, states, metrics and data, on one device."""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from collc.errors import CollcError, DataError, StepError
from collc.training.fitting import feed
from collc.training.fitting.carried import COLUMNS, Carried, named
from collc.training.fitting.fit import fit
from collc.training.fitting.source import Source

QUIET = {"console": Console(quiet=True), "profile": 0}


def data(t):
    return np.full((4, 3), 0.37 * t + 0.11, np.float32)


@jax.jit
def step(state, batch):
    w = state["w"] - state["rate"] * batch.mean(0)
    return {**state, "w": w}, jnp.sum(w)


def fresh():
    return {"w": jnp.ones(3), "rate": 0.013}


def test_weak_types_are_strong_from_the_first_step_on(tmp_path):
    carried = Carried({"rate": 0.5, "n": 3, "weak": jnp.asarray(0.5), "on": True}, None)
    leaves = carried.arrays()
    assert not any(x.weak_type for x in leaves.values())
    kinds = {"rate": "float32", "n": "int32", "weak": "float32", "on": "bool"}
    assert {name: str(x.dtype) for name, x in leaves.items()} == kinds
    # What a step makes weak again becomes strong, too: so does a checkpoint.
    carried.call(jax.jit(lambda s, b: ({**s, "rate": jnp.where(b, 0.1, 0.2)}, 1.0)), True)
    assert not carried.arrays()["rate"].weak_type

    whole = fit(step, fresh(), data, steps=6, **QUIET).state
    fit(step, fresh(), data, steps=3, folder=tmp_path, **QUIET)
    found = fit(step, fresh(), data, steps=6, folder=tmp_path, resume=True, **QUIET).state
    jax.tree.map(np.testing.assert_array_equal, found, whole)
    # A weak rate would have kept bfloat16, until the run was resumed.
    low = {**fresh(), "w": jnp.ones(3, jnp.bfloat16)}
    with pytest.raises(StepError, match=r"w was bfloat16\[3\], and became float32\[3\]"):
        fit(step, low, data, steps=1, **QUIET)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda s: {**s, "more": s["w"]}, "more was missing, and became float32"),
        (lambda s: {"w": s["w"]}, r"a was a list of 1, and became missing"),
        (lambda s: {**s, "w": s["w"].astype(jnp.bfloat16)}, r"w was float32\[3\].* bfloat16\[3\]"),
        (lambda s: {**s, "w": s["w"][:2]}, r"w was float32\[3\], and became float32\[2\]"),
        (lambda s: {**s, "a": tuple(s["a"])}, "a was a list of 1, and became a tuple of 1"),
        (lambda s: {**s, "a": [3]}, r"a/0 was float32\[2\], and became a Python int"),
        (lambda s: None, "the state was a dict of 2, and became None"),
    ],
)
def test_a_step_returns_a_state_of_the_same_tree_shapes_and_dtypes(change, said):
    state = {"w": jnp.zeros(3), "a": [jnp.zeros(2)]}
    with pytest.raises(StepError, match=said):
        fit(lambda s, b: (change(s), 1.0), state, data, steps=2, **QUIET)


def test_a_step_changes_modules_without_changing_what_they_are_made_of():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    @nnx.jit
    def step(model, batch):
        model.kernel.set_value(model.kernel[...].astype(jnp.bfloat16))
        return batch.sum()

    with pytest.raises(
        StepError, match=r"kernel.* was float32\[3, 2\], and became bfloat16\[3, 2\]"
    ):
        fit(step, model, data, steps=2, **QUIET)


def test_a_state_of_two_parts_without_metrics():
    state = jnp.zeros(3), jnp.float32(0)
    with pytest.raises(StepError, match=r"returned the state alone.*\(\(a, b\), loss\)"):
        fit(jax.jit(lambda s, b: (s[0] + 1, s[1] + 1)), state, data, steps=2, **QUIET)


@pytest.mark.parametrize(
    "number, said",
    [
        (3_000_000_000, "n is 3000000000, which"),
        (2**70, "n is 1180591620717411303424, which"),
        (np.array([1, 3_000_000_000]), r"n is int64\[2\], which"),
        (np.array([1e300]), r"n is float64\[1\], which"),
        (np.array([None]), r"n is object\[1\], but numbers"),
        (np.array(["a"]), r"n is <U1\[1\], but numbers"),
    ],
)
def test_numbers_that_32_bits_do_not_hold(number, said):
    with pytest.raises(StepError, match=said):
        Carried({"n": number}, None)
    kept = Carried({"n": np.array([np.nan, np.inf, 0.1]), "k": np.int64(7)}, None).arrays()
    assert kept["n"].dtype == "float32" and kept["k"] == 7


@pytest.mark.parametrize(
    "metrics, said",
    [
        ({}, 'without "loss": none'),
        ({"nll": np.nan}, 'without "loss": nll'),
        ({"loss": 1j}, "'loss' of complex"),
        ({"loss": jnp.complex64(1)}, "'loss' of complex64"),
        ({"loss": 1.0, "key": jax.random.key(0)}, r"'key' of key<fry>"),
        ({"loss": np.str_("a")}, "'loss' of <U1"),
        ({"loss": jnp.ones(2)}, r"'loss' of shape \[2\]"),
        (None, "'loss' of NoneType"),
        ({"loss": 1.0, 3: 1.0}, "3 of float"),
        *(({"loss": 1.0, name: 1.0}, f"'{name}', but the run") for name in COLUMNS),
        ({"loss": 1.0, "validation_loss": 1.0}, "'validation_loss', but the run"),
    ],
)
def test_metrics_that_cannot_be(metrics, said):
    with pytest.raises(StepError, match=said):
        named(metrics, "step")


def test_metrics_of_an_evaluation_have_names_of_their_own():
    found = {"accuracy": jnp.bfloat16(1), "step": 3, "good": jnp.bool(True), "n": np.int64(3)}
    assert named(found, "evaluate") == found
    with pytest.raises(StepError, match="evaluate returned no metrics"):
        named({}, "evaluate")


ROWS = np.arange(96, dtype=np.float32).reshape(32, 3)


@pytest.mark.parametrize(
    "other, said",
    [
        (feed.batches(ROWS, 4, seed=9), "seed was 0, and is 9"),
        (feed.batches(ROWS, 8), "size was 4, and is 8"),
        (feed.batches(ROWS[:16], 4), "rows was 32, and is 16"),
        (
            feed.batches(ROWS.astype(np.float16), 4),
            r"float32\[3\] a row, and is float16\[3\] a row",
        ),
        (feed.batches(ROWS, 4, short="pad"), "padded was False, and is True"),
    ],
)
def test_a_run_is_resumed_with_its_own_batches(tmp_path, other, said):
    fit(step, fresh(), feed.batches(ROWS, 4), steps=2, folder=tmp_path, **QUIET)
    with pytest.raises(DataError, match=f"had other batches: .*{said}"):
        fit(step, fresh(), other, steps=4, folder=tmp_path, resume=True, **QUIET)
    same = feed.batches(ROWS, 4, epochs=5, short="drop")  # the same rows, but an end
    assert fit(step, fresh(), same, steps=4, folder=tmp_path, resume=True, **QUIET).step == 4


def test_what_is_known_of_each_process_s_batches_is_compared_with_its_own():
    def source(seed):
        return Source(feed.batches(ROWS, 4, seed=seed), 2)

    notes = {"data": [source(seed).position() for seed in (0, 1)]}
    source(1).resume(notes, 1)
    with pytest.raises(DataError, match="seed was 0, and is 1"):
        source(1).resume(notes, 0)
    Source(data, 2).resume(notes, 0)  # of another function nothing is known
    source(1).resume({"data": [""]}, 0)


def test_local_data_that_is_too_short_is_refused_before_the_first_step(plan):
    local = feed.local(feed.batches(ROWS, 8, epochs=1).at, 8, plan)
    with pytest.raises(CollcError, match="data has 4 batches, but steps is 5"):
        Source(local, 5)


def test_a_damaged_checkpoint_is_set_aside_and_the_run_goes_on_from_the_one_before(tmp_path):
    whole = fit(step, fresh(), data, steps=6, folder=tmp_path / "whole", **QUIET).state
    hurt, told = tmp_path / "hurt", io.StringIO()
    fit(step, fresh(), data, steps=4, save_every=2, folder=hurt, **QUIET)
    files = [
        f for f in (hurt / "checkpoints" / "step_00000004" / "state").rglob("*") if f.is_file()
    ]
    largest = max(files, key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    said = {"console": Console(file=told, width=500), "profile": 0}
    found = fit(step, fresh(), data, steps=6, save_every=2, folder=hurt, resume=True, **said).state
    jax.tree.map(np.testing.assert_array_equal, found, whole)
    assert "It is damaged_step_00000004 now, and step 2 is taken." in told.getvalue()
    names = sorted(path.name for path in (hurt / "checkpoints").iterdir())
    assert names == ["damaged_step_00000004", "step_00000004", "step_00000006"]
    both = [
        (tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "hurt")
    ]
    losses = [[json.loads(line)["loss"] for line in lines] for lines in both]
    assert losses[0] == losses[1]
