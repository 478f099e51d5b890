"""`collc.fit`: what runs, what is written, what resumes, what is refused."""

import io
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

import collc
from collc.errors import CheckpointError, DataError, StepError
from collc.training.checkpoints import checkpoint
from collc.training.fitting import feed
from collc.training.fitting.fit import fit
from collc.training.fitting.switch import Switch
from collc.training.norms import skip_nonfinite

QUIET = {"console": Console(quiet=True), "profile": 0}
TX = optax.adam(0.05)
ROWS = {
    "x": np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=(40, 1)).astype(np.float32),
}
DATA = feed.batches(ROWS, 8, seed=5)


def fresh():
    params = {"w": jnp.zeros((3, 1)), "b": jnp.zeros(1)}
    return {"params": params, "opt": TX.init(params), "key": jax.random.key(0), "t": 0}


def loss_fn(params, batch, noise=0.0):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] + noise - batch["y"]) ** 2)


def make(plan):
    @jax.jit
    @collc.schedule(plan, batch="batch")
    def step(state, batch):
        key, now = jax.random.split(state["key"])
        noise = 0.1 * jax.random.normal(now, ())
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch, noise)
        updates, opt = TX.update(collc.pmean(grads), state["opt"])
        params = optax.apply_updates(state["params"], updates)
        new = {"params": params, "opt": opt, "key": key, "t": state["t"] + 1}
        return new, {"loss": collc.pmean(loss), "t": state["t"]}

    return step


@pytest.fixture(scope="module")
def step(plan):
    return make(plan)


@pytest.fixture(scope="module")
def undisturbed(step):
    """The state after ten steps."""
    return fit(step, fresh(), DATA, steps=10, **QUIET).state


def lines(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def plain(x):
    typed_key = hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if typed_key else x


def same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(plain(x), plain(y)), a, b)


def stop_at(step):
    return lambda event: event.stop() if event.step == step else None


def losses(folder):
    return [(r["step"], r["loss"]) for r in lines(folder) if "loss" in r]


def test_it_is_the_loop_that_one_would_write(step, undisturbed, plan):
    state, metrics = fresh(), {}
    for t in range(10):
        state, metrics = step(state, feed.place(DATA(t), plan))
        jax.block_until_ready(metrics)
    same(state, undisturbed)
    found = fit(step, fresh(), DATA, steps=10, **QUIET)
    assert found.step == 10 and found.metrics == {k: float(v) for k, v in metrics.items()}


def test_what_a_run_leaves(step, tmp_path):
    told = io.StringIO()
    console = Console(file=told, width=100)
    evaluate = jax.jit(lambda state: {"loss": loss_fn(state["params"], ROWS), "zero": 0.0})
    seen = []
    found = fit(
        step,
        fresh(),
        DATA,
        steps=10,
        folder=tmp_path,
        evaluate=evaluate,
        evaluate_every=4,
        save_every=3,
        callbacks=[lambda e: seen.append((e.step, e.metrics["t"], e.validation is not None))],
        tensorboard=True,
        console=console,
    )
    assert seen == [(n, n - 1, n in (4, 8, 10)) for n in range(1, 11)]
    assert list(checkpoint.steps(tmp_path / "checkpoints")) == [9, 10]
    records = lines(tmp_path)
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 11))
    assert [r["step"] for r in records if "validation_loss" in r] == [4, 8, 10]
    assert found.metrics["validation_loss"] == records[-1]["validation_loss"]
    assert [r["seconds"] for r in records] == sorted(r["seconds"] for r in records)
    assert list((tmp_path / "tensorboard").glob("events.*"))
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["steps"] == report["here"] == 10 and 0 <= report["input"] <= 1
    assert report["compute"] is None and "8 virtual CPU devices" in report["why"]
    text = told.getvalue()
    assert "10/10" in text and "validation: loss" in text and "share of time: input" in text
    assert "not measured: compute and communication" in text


@pytest.mark.parametrize("cut", [3, 4, 7])
def test_resumed_bit_for_bit(step, undisturbed, tmp_path, cut):
    fit(step, fresh(), DATA, steps=cut, folder=tmp_path, save_every=2, **QUIET)
    found = fit(step, fresh(), DATA, steps=10, folder=tmp_path, resume=True, **QUIET)
    assert (found.step, found.report.here) == (10, 10 - cut)
    same(found.state, undisturbed)
    assert [n for n, _ in losses(tmp_path)] == list(range(1, 11))


def test_a_callback_stops(step, tmp_path):
    found = fit(step, fresh(), DATA, steps=10, folder=tmp_path, callbacks=[stop_at(2)], **QUIET)
    assert (found.step, found.report.stopped) == (2, "callback")
    assert list(checkpoint.steps(tmp_path / "checkpoints")) == [1, 2]


class Stream:
    """Batches one after the other, that knows where it is, as Grain's iterators do."""

    def __init__(self, as_bytes):
        self.t, self.as_bytes = 0, as_bytes

    def __iter__(self):
        return self

    def __next__(self):
        self.t += 1
        return DATA(self.t - 1)

    def get_state(self):
        state = {"t": self.t}
        return json.dumps(state).encode() if self.as_bytes else state

    def set_state(self, state):
        self.t = json.loads(state)["t"] if self.as_bytes else state["t"]


@pytest.mark.parametrize("as_bytes", [True, False])
def test_an_iterator_resumes_where_it_was(step, undisturbed, tmp_path, as_bytes):
    one = Stream(as_bytes)
    fit(step, fresh(), one, steps=10, folder=tmp_path, callbacks=[stop_at(4)], **QUIET)
    assert one.t == 5  # it is asked one ahead
    found = fit(step, fresh(), Stream(as_bytes), steps=10, folder=tmp_path, resume=True, **QUIET)
    same(found.state, undisturbed)
    with pytest.raises(CheckpointError, match="another kind of data"):
        fit(step, fresh(), DATA, steps=11, folder=tmp_path, resume=True, **QUIET)


def test_an_iterator_without_a_position(step, undisturbed, tmp_path):
    def items():
        return (DATA(t) for t in range(10))

    same(fit(step, fresh(), items(), steps=10, folder=tmp_path, **QUIET).state, undisturbed)
    with pytest.raises(DataError, match=r"generator cannot say where it was.*get_state"):
        fit(step, fresh(), items(), steps=12, folder=tmp_path, resume=True, **QUIET)
    with pytest.raises(DataError, match="ended before step 11"):
        fit(step, fresh(), items(), steps=12, **QUIET)


def test_modules_are_changed_in_place_and_resume(plan, tmp_path):
    @nnx.jit
    @collc.schedule(plan, batch="batch")
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(batch["x"]) - batch["y"]) ** 2))(
            model
        )
        optimizer.update(model, collc.pmean(grads))
        return collc.pmean(loss)

    def make():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, TX, wrt=nnx.Param)

    def evaluate(model, optimizer):
        return jnp.mean((model(ROWS["x"]) - ROWS["y"]) ** 2)

    whole = make()
    found = fit(step, whole, DATA, steps=6, evaluate=evaluate, **QUIET)
    assert found.state is whole and found.metrics["validation_loss"] > 0
    fit(step, make(), DATA, steps=3, folder=tmp_path, **QUIET)
    resumed = make()
    fit(step, resumed, DATA, steps=6, folder=tmp_path, resume=True, **QUIET)
    same(nnx.state(resumed), nnx.state(whole))


def guarded(plan):
    """A step that leaves out what is not finite, and counts it; and its first state."""
    tx = skip_nonfinite(optax.sgd(0.1))

    @jax.jit
    @collc.schedule(plan, batch="batch")
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = tx.update(collc.pmean(grads), state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, collc.pmean(loss)

    params = fresh()["params"]
    return step, {"params": params, "opt": tx.init(params)}


def poisoned(*bad):
    return lambda t: jax.tree.map(lambda x: x * np.float32("nan") if t in bad else x, DATA(t))


def test_steps_that_are_skipped_are_counted(plan, tmp_path):
    step, state = guarded(plan)
    found = fit(step, state, poisoned(2, 3), steps=6, folder=tmp_path, max_skipped=3, **QUIET)
    assert found.report.skipped == 2
    assert [r["skipped"] for r in lines(tmp_path)] == [0, 0, 1, 2, 2, 2]
    assert [r["loss"] is None for r in lines(tmp_path)] == [False] * 2 + [True] * 2 + [False] * 2
    assert np.isfinite(found.state["params"]["w"]).all()
    with pytest.raises(StepError, match=r"steps 2 to 4 were not finite: 3 in a row"):
        fit(step, guarded(plan)[1], poisoned(1, 2, 3), steps=6, max_skipped=3, **QUIET)


def test_switched_by_a_callback_and_resumed(mesh, plan, tmp_path):
    traced = []

    def counted(plan):
        inner = make(plan)

        @jax.jit
        def step(state, batch):
            traced.append(plan)
            return inner(state, batch)

        return step

    plans = {"ring": plan, "native": collc.plan(mesh, {"gpu": "native", "host": "native"})}
    switch = Switch.plans(counted, plans)

    def turn(event):
        if event.step in (2, 5):
            event.switch("native" if event.step == 2 else "ring")
        if event.step == 3:
            with pytest.raises(StepError, match="Did you mean native"):
                event.switch("natve")

    found = fit(
        switch, fresh(), DATA, steps=8, folder=tmp_path, callbacks=[turn], plan=plan, **QUIET
    )
    assert len(traced) == 2 and found.report.switches == switch.count == 2
    assert [r["switches"] for r in lines(tmp_path)] == [0, 0, 1, 1, 1, 2, 2, 2]
    again = Switch.plans(counted, plans, start="native")
    fit(again, fresh(), DATA, steps=10, folder=tmp_path, resume=True, plan=plan, **QUIET)
    assert (again.active, again.count) == ("ring", 2)
    with pytest.raises(StepError, match=r"no collc.Switch"):
        fit(make(plan), fresh(), DATA, steps=1, callbacks=[lambda e: e.switch("ring")], **QUIET)


def test_a_server_state_is_saved_and_resumed(plan, tmp_path):
    server = collc.server(plan, TX)

    @jax.jit
    @collc.schedule(plan, batch="batch")
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.pull(), batch)
        return state.push(grads), collc.pmean(loss)

    def begin():
        return server.init(fresh()["params"])

    whole = fit(step, begin(), DATA, steps=6, **QUIET).state
    fit(step, begin(), DATA, steps=3, folder=tmp_path, **QUIET)
    assert "skipped" in lines(tmp_path)[0]
    same(fit(step, begin(), DATA, steps=6, folder=tmp_path, resume=True, **QUIET).state, whole)


def test_one_device_without_a_plan_is_profiled():
    @jax.jit
    def step(w, batch):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2))(w)
        return w - 0.1 * grad, loss

    found = fit(step, jnp.zeros((3, 1)), DATA, steps=8, console=Console(quiet=True))
    report = found.report
    assert report.profiled == 3 and report.compute > 0 and report.communication == 0
    assert report.compute + report.input + report.idle == pytest.approx(1, abs=0.06)
    few = fit(step, jnp.zeros((3, 1)), DATA, steps=3, console=Console(quiet=True))
    assert few.report.compute is None and "too few steps" in few.report.why
