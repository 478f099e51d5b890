"""What `collc.fit` cannot be asked for, refused before anything is changed or written."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

import collc
from collc.errors import CheckpointError, CollcError, StepError
from collc.training.fitting import feed
from collc.training.fitting.fit import fit
from collc.training.fitting.switch import Switch

QUIET = {"console": Console(quiet=True), "profile": 0}
ROWS = {"x": np.ones((40, 3), np.float32)}
DATA = feed.batches(ROWS, 8, seed=5)


def fresh():
    return {"w": jnp.zeros(3), "t": 0}


@pytest.fixture(scope="module")
def step(plan):
    @jax.jit
    @collc.schedule(plan, batch="batch")
    def step(state, batch):
        loss = collc.pmean(jnp.mean((batch["x"] @ state["w"] - 1) ** 2))
        return {"w": state["w"] + 1, "t": state["t"] + 1}, loss

    return step


@pytest.mark.parametrize(
    "options, said",
    [
        ({"resume": True}, "resume has no effect without a folder"),
        ({"save_every": 2}, "save_every has no effect without a folder"),
        ({"tensorboard": True}, "tensorboard has no effect"),
        ({"evaluate_every": 2}, "no effect without evaluate"),
        ({"max_skipped": 2}, "no counter of skipped steps"),
        ({"steps": -1}, "steps is -1"),
        ({"steps": 0}, "steps is 0: a whole number from 1 on"),
        ({"steps": None}, "steps is None"),
        ({"steps": "9"}, "steps is '9'"),
        ({"steps": 6.0}, r"steps is 6\.0"),
        ({"step": None}, "step is None: a jitted function"),
        ({"evaluate": 3}, "evaluate is 3: a function of the state"),
        ({"callbacks": print}, "callbacks is <built-in function print>: a list"),
        ({"callbacks": None}, "callbacks is None"),
        ({"plan": "ring"}, "plan is 'ring': a plan is needed"),
        ({"console": "x"}, "console is 'x'"),
        ({"tensorboard": "yes"}, "tensorboard is 'yes': True or False"),
        ({"folder": 5}, "folder is 5: the path of a folder"),
        ({"folder": ""}, "folder is '': the path"),
        ({"folder": "never", "resume": "no"}, "resume is 'no': True or False"),
        ({"folder": "never", "resize": {"t": "sum"}}, "resize has no effect without resume=True"),
        ({"folder": "never", "resume": True, "resize": ["w"]}, r"resize is \['w'\]: rules by"),
        ({"folder": "never", "resume": True, "resize": {"t": "sum"}}, "only t, which is not"),
        ({"folder": "never", "resume": True, "resize": {"x": "first"}}, "this matches no leaf"),
        ({"profile": True}, "profile is True"),
        ({"callbacks": [3]}, "callbacks has 3"),
        ({"data": 3}, "data is int"),
        ({"data": feed.batches(ROWS, 8, epochs=1)}, "data has 5 batches, but steps is 6"),
        ({"data": feed.batches(ROWS, 10)}, r"\['x'\] has the shape \[10, 3\].* 8 devices"),
        ({"step": lambda s, b: b}, r"step returned a dict of 1, but \(state, metrics\)"),
        ({"step": lambda s, b: (s, {"loss": b["x"]})}, r"'loss' of shape \[8, 3\]"),
        ({"evaluate": lambda s: "good"}, "evaluate returned 'loss' of str"),
    ],
)
def test_what_is_refused(step, options, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"step": step, "state": fresh(), "data": DATA, "steps": 6, **QUIET, **options}
    with pytest.raises(CollcError, match=said):
        fit(**given)
    assert not any(tmp_path.iterdir())


def test_folders_that_hold_another_run(step, tmp_path):
    fit(step, fresh(), DATA, steps=3, folder=tmp_path, **QUIET)
    with pytest.raises(CheckpointError, match=r"already holds a run \(3 steps .*resume=True"):
        fit(step, fresh(), DATA, steps=3, folder=tmp_path, **QUIET)
    with pytest.raises(CheckpointError, match="has 3 steps, but steps is 2"):
        fit(step, fresh(), DATA, steps=2, folder=tmp_path, resume=True, **QUIET)
    found = fit(step, fresh(), DATA, steps=3, folder=tmp_path, resume=True, **QUIET)
    assert found.step == 3 and found.report.here == 0
    other = fresh() | {"more": jnp.zeros(2)}
    with pytest.raises(CheckpointError, match="holds another state: more"):
        fit(step, other, DATA, steps=4, folder=tmp_path, resume=True, **QUIET)
    empty = tmp_path / "empty"
    assert fit(step, fresh(), DATA, steps=1, folder=empty, resume=True, **QUIET).step == 1


def test_tensorboard_needs_its_extra(step, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r'pip install "collc\[tensorboard\]"'):
        fit(step, fresh(), DATA, steps=1, folder=tmp_path, tensorboard=True, **QUIET)


class Stream:
    """Batches without an end."""

    def __iter__(self):
        return self

    def __next__(self):
        return DATA(0)

    def get_state(self):
        return 1

    def set_state(self, state):
        pass


class Lost(Stream):
    """One that cannot go to where another run was."""

    def set_state(self, state):
        raise CheckpointError(f"there is no {state}")


def module():
    return nnx.Linear(3, 1, rngs=nnx.Rngs(0))


def adds(amount):
    @nnx.jit
    def step(model, batch):
        model.kernel[...] = model.kernel[...] + amount
        return jnp.float32(0)

    return step


def test_a_refused_resumption_leaves_modules_as_they_were(tmp_path):
    def switch():
        return Switch({"one": adds(1), "two": adds(2)})

    fit(switch(), module(), Stream(), steps=2, folder=tmp_path, **QUIET)
    other = Switch({"three": adds(1), "two": adds(2)})
    for step, data, error, said in (
        (other, Stream(), StepError, "no step 'one'"),
        (switch(), Lost(), CheckpointError, "there is no 1"),
    ):
        model = module()
        with pytest.raises(error, match=said):
            fit(step, model, data, steps=4, folder=tmp_path, resume=True, **QUIET)
        np.testing.assert_array_equal(model.kernel[...], module().kernel[...])
