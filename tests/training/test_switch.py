"""Steps switched by name, compiled before."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import collc
from collc.errors import StepError
from collc.training.fitting.switch import Switch, resume

TRACED = []


def make(plan):
    @jax.jit
    @collc.schedule(plan, batch="batch")
    def step(state, batch):
        TRACED.append(plan)
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * collc.pmean(grad)}, collc.pmean(loss)

    return step


@pytest.fixture
def plans(mesh, plan):
    return {"ring": plan, "native": collc.plan(mesh, {"gpu": "native", "host": "native"})}


def test_nothing_is_traced_after_compile(plans):
    state, batch = {"w": jnp.ones((4, 2))}, np.ones((16, 4), np.float32)
    switch = Switch.plans(make, plans)
    assert (switch.active, switch.names, switch.compiled) == ("ring", ("ring", "native"), False)
    TRACED.clear()
    assert switch.compile(state, batch) is switch and len(TRACED) == 2
    expected = state
    for name in ("ring", "native", "native", "ring"):
        switch.use(name)
        state, loss = switch(state, batch)
        loss.block_until_ready()
    assert len(TRACED) == 2 and switch.count == 2
    one = make(plans["native"])
    for _ in range(4):
        expected, _ = one(expected, batch)
    np.testing.assert_allclose(state["w"], expected["w"], rtol=1e-6)


def test_the_first_call_compiles_all(plans):
    TRACED.clear()
    switch = Switch.plans(make, plans, start="native")
    state, batch = {"w": jnp.ones((4, 2))}, np.ones((16, 4), np.float32)
    found = switch(state, batch)
    assert len(TRACED) == 2 and switch.compiled and switch.active == "native"
    jax.tree.map(np.testing.assert_array_equal, found, make(plans["native"])(state, batch))


def test_modules(plans):
    def of(plan):
        @nnx.jit
        @collc.schedule(plan, batch="batch")
        def step(model, optimizer, batch):
            TRACED.append(plan)
            loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(batch) ** 2))(model)
            optimizer.update(model, collc.pmean(grads))
            return collc.pmean(loss)

        return step

    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    batch = np.ones((16, 4), np.float32)
    TRACED.clear()
    switch = Switch.plans(of, plans).compile(model, optimizer, batch)
    losses = []
    for name in ("ring", "native", "ring"):
        switch.use(name)
        losses.append(float(switch(model, optimizer, batch)))
    assert len(TRACED) == 2 and losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize(
    "other, said",
    [
        (
            lambda s, b: (s, (b.sum(), b.sum())),
            r"\[1\] is float32\[\] of 'a' and a tuple of 2 of 'b'",
        ),
        (lambda s, b: (s.astype(jnp.bfloat16), b.sum()), r"float32\[3\] of 'a' and bfloat16\[3\]"),
        (lambda s, b: (s[:2], b.sum()), r"float32\[3\] of 'a' and float32\[2\] of 'b'"),
        (lambda s, b: [s, b.sum()], "the result is a tuple of 2 of 'a' and a list of 2 of 'b'"),
        (lambda s, b: (s, b.sum(), None), "the result is|missing of 'a' and None of 'b'"),
    ],
)
def test_results_that_differ_are_refused(other, said):
    switch = Switch({"a": jax.jit(lambda s, b: (s, b.sum())), "b": jax.jit(other)})
    with pytest.raises(StepError, match=said):
        switch.compile(jnp.ones(3), jnp.ones(4))


def test_shardings_that_differ_are_refused(mesh):
    P = jax.sharding.PartitionSpec
    there = [jax.sharding.NamedSharding(mesh, spec) for spec in (P(), P("gpu"))]
    a, b = (jax.jit(lambda s: s + 1, out_shardings=sharding) for sharding in there)
    with pytest.raises(StepError, match=r"the result is NamedSharding.* of 'a' and NamedSharding"):
        Switch({"a": a, "b": b}).compile(jnp.ones(8))


def test_other_shapes_are_refused_and_say_what_differs():
    traced = []

    @jax.jit
    def step(s, b):
        traced.append(s)
        return s, jax.tree.leaves(b)[0].sum()

    switch = Switch({"a": step}).compile(jnp.ones(3), {"x": jnp.ones(4)})
    with pytest.raises(StepError, match=r"\['x'\] of float32\[4\], but it is float32\[5\]"):
        switch(jnp.ones(3), {"x": jnp.ones(5)})
    with pytest.raises(StepError, match=r"\['x'\] of float32\[4\], but it is missing"):
        switch(jnp.ones(3), {"y": jnp.ones(4)})
    with pytest.raises(StepError, match=r"\[1\] of a dict of 1, but it is a list of 1"):
        switch(jnp.ones(3), [jnp.ones(4)])
    with pytest.raises(StepError, match=r"\['x'\] of float32\[4\], but it is None"):
        switch(jnp.ones(3), {"x": None})
    assert len(traced) == 1


def test_names_and_steps_that_cannot_be():
    a = jax.jit(lambda s: s)
    with pytest.raises(StepError, match="Did you mean ring"):
        Switch({"ring": a, "native": a}).use("rnig")
    with pytest.raises(StepError, match="no step 'x'"):
        Switch({"ring": a}, start="x")
    with pytest.raises(StepError, match=r"jax.jit"):
        Switch({"ring": lambda s: s})
    with pytest.raises(StepError, match="nothing to switch"):
        Switch({})
    with pytest.raises(StepError, match="dict of steps with texts as their names"):
        Switch({1: a})
    with pytest.raises(StepError, match="dict of steps"):
        Switch([a])  # pyright: ignore
    with pytest.raises(StepError, match="dict of plans"):
        Switch.plans(make, [None])  # pyright: ignore
    for name in (["ring"], 1):
        with pytest.raises(StepError, match="no step"):
            Switch({"ring": a}).check(name)  # pyright: ignore


def test_a_resumed_switch_goes_on_with_the_step_that_ran():
    a = jax.jit(lambda s: s)
    one = Switch({"ring": a, "native": a})
    one.use("native")
    other = Switch({"ring": a, "native": a}, start="ring")
    resume(other, one.notes())
    assert (other.active, other.count) == ("native", 1)
    resume(other, {})  # a run without a switch
    resume(a, {})
    assert (other.active, other.count) == ("native", 1)
    with pytest.raises(StepError, match=r"'native' ran, but the step is none.*Switch\(\{'native'"):
        resume(a, one.notes())
    with pytest.raises(StepError, match="no step 'native'"):
        resume(Switch({"ring": a}), one.notes())
