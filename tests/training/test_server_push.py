"""What a server's step is given: plans, keys, gradients that are reduced; and what is refused."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import collc
from collc import consistency
from collc.errors import CollcError, DataError, MeshError, StepError
from collc.receipts import hlo
from collc.training.fitting.switch import Switch


@pytest.fixture(scope="session")
def plan(mesh):
    return collc.plan(mesh, {"gpu": "ring", "host": "halving"})


@pytest.fixture(scope="session")
def native(mesh):
    return collc.plan(mesh, {"gpu": "native", "host": "native"})


def pulled(state, plan):
    return jax.jit(collc.schedule(plan)(lambda state: state.pull()))(state)


def test_what_an_optimizer_keeps_is_told_apart_by_structure(plan):
    """Not by names: parameters that are called as optax calls its own counters."""
    params = {"count": jnp.ones(3), "skipped": jnp.ones(3), "finite": jnp.ones(3), "w": jnp.ones(3)}
    tx = optax.adamw(0.1, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 0, tree))
    before = collc.server(plan, tx).init(params)

    @jax.jit
    @collc.schedule(plan)
    def step(state, grad):
        return state.push({"w": grad})

    after = step(before, jnp.ones(3))
    adam = after.opt.inner[0]
    assert (int(adam.count), int(after.skipped), bool(after.opt.finite)) == (1, 0, True)
    for key in params:
        still = np.array_equal(adam.mu[key].value, before.opt.inner[0].mu[key].value)
        assert still == (key != "w")
    bad = step(after, jnp.full(3, jnp.nan))
    assert (int(bad.skipped), bool(bad.opt.finite)) == (1, False)
    np.testing.assert_array_equal(bad.params["w"].value, after.params["w"].value)

    picky = optax.GradientTransformation(lambda p: jnp.zeros(p["w"].shape), lambda u, s, p: (u, s))
    reduced = collc.strategies({"*": collc.strategy.all_reduce(plan)})
    state = collc.server(reduced, picky).init(params)
    with pytest.raises(StepError, match="has to know what the optimizer keeps for which"):
        jax.eval_shape(step, state, jnp.ones(3))


def kinds(step, *args):
    """How many collectives of each kind a compiled step has, but for the all-reduces of scalars."""
    found = hlo.count(hlo.parse_hlo(step.lower(*args).compile().as_text()))
    return {kind: n for kind, n in found.items() if kind != "all-reduce"}


def test_the_plan_of_the_step_counts(plan, native):
    params, batch = {"w": jnp.ones((3, 7))}, jnp.ones((8, 3))

    def make(plan):
        @jax.jit
        @collc.schedule(plan, batch="batch")
        def step(state, batch):
            return state.push(jax.grad(lambda p: jnp.mean((batch @ p["w"]) ** 2))(state.pull()))

        return step

    state = collc.server(plan, optax.sgd(0.1)).init(params)
    assert set(kinds(make(plan), state, batch)) == {"collective-permute"}
    switch = Switch.plans(make, {"ring": plan, "native": native}).compile(state, batch)
    assert set(kinds(make(native), state, batch)) == {"all-gather", "reduce-scatter"}
    one = switch(state, batch)
    switch.use("native")
    jax.tree.map(np.testing.assert_allclose, one.params, switch(state, batch).params)

    chosen = collc.strategies({"*": collc.strategy.server(plan)})
    state = collc.server(chosen, optax.sgd(0.1)).init(params)
    with pytest.raises(StepError, match=r"the step is decorated with .*native.* no effect"):
        jax.eval_shape(make(native), state, batch)


def test_strategies_of_several_plans_pull_by_their_own(plan, native):
    own = {"a": collc.strategy.server(plan), "b": collc.strategy.server(native)}
    state = collc.server(collc.strategies(own), optax.sgd(0.1)).init(
        dict.fromkeys("ab", jnp.ones(8))
    )
    pull = jax.jit(collc.schedule(plan)(lambda state: state.pull()))
    assert set(kinds(pull, state)) == {"collective-permute", "all-gather"}


def test_gradients_that_value_and_grad_has_reduced(plan):
    chosen = collc.strategies(
        {
            "s": collc.strategy.server(plan, mean="tokens"),
            "*": collc.strategy.all_reduce(plan, mean="tokens"),
        }
    )
    params = {"s": jnp.arange(3.0), "w": jnp.ones(3)}

    def loss_fn(params, batch):
        x, mask = batch
        return jnp.sum(mask * (x @ (params["s"] + params["w"])) ** 2) / jnp.maximum(mask.sum(), 1)

    def pushed(**options):
        @collc.schedule(plan, batch="batch")
        def step(state, batch):
            counted = chosen.value_and_grad(loss_fn, tokens=lambda params, batch: batch[1].sum())
            loss, grads = counted(state.pull(), batch)
            return state.push(grads, **options), loss

        return step

    x, mask = jax.random.normal(jax.random.key(0), (16, 3)), (jnp.arange(16) < 11) * 1.0
    state = collc.server(chosen, optax.sgd(0.1)).init(params)
    after, loss = jax.jit(pushed(reduced=True))(state, (x, mask))
    wanted = jax.value_and_grad(loss_fn)(params, (x, mask))  # one mean over 11
    np.testing.assert_allclose(loss, wanted[0], rtol=1e-5)
    for key, x_ in pulled(after, plan).items():
        np.testing.assert_allclose(x_, params[key] - 0.1 * wanted[1][key], rtol=1e-5)

    def refused(options, match, late=None):
        of = collc.server(chosen, optax.sgd(0.1), consistency=late).init(params)
        with pytest.raises(StepError, match=match):
            jax.eval_shape(pushed(**options), of, (x, mask))

    refused({}, r"is a mean over ranks already\. .*state\.push\(grads, reduced=True\)")
    refused({"tokens": 3}, r"state\.push\(grads, reduced=True\)")
    refused({"reduced": True, "tokens": 3}, "tokens= has no effect on gradients that are reduced")
    refused({"reduced": True}, "do not count", consistency.Delayed())

    @collc.schedule(plan)
    def whole(state):
        return state.push(state.pull(), reduced=True)

    with pytest.raises(StepError, match="s has a server, but its gradient is whole"):
        jax.eval_shape(whole, state)
    plain = collc.strategies({"*": collc.strategy.all_reduce(plan, mean="tokens")})
    with pytest.raises(StepError, match=r"needs tokens= of this rank.*reduced=True"):
        jax.eval_shape(
            collc.schedule(plan)(lambda state: state.push(state.params)),
            collc.server(plain, optax.sgd(0.1)).init(params),
        )
    late = collc.server(plan, optax.sgd(0.1), consistency=consistency.Delayed()).init(params)
    with pytest.raises(StepError, match="these gradients are reduced already"):
        jax.eval_shape(collc.schedule(plan)(lambda s: s.push(s.params, reduced=True)), late)


@dataclass(frozen=True)
class Says(consistency.Delayed):
    """Delayed, but for what it says."""

    says: int = 0

    @property
    def late(self):
        return self.says


def test_flush_asks_what_waits(plan):
    flush = collc.schedule(plan)(lambda state: state.flush())
    params = {"w": jnp.ones(3)}
    state = collc.server(plan, optax.sgd(0.1), consistency=Says(1)).init(params)
    with pytest.raises(StepError, match=r"something waits, but late of .* says 0"):
        jax.eval_shape(flush, state)
    state = collc.server(plan, optax.sgd(0.1)).init(params)
    assert jax.tree.structure(jax.eval_shape(flush, state)) == jax.tree.structure(state)


def test_what_is_refused(plan):
    params = {"deep": jnp.ones((3, 2)), "seven": jnp.ones(7), "ten": jnp.ones((2, 5))}
    state = collc.server(plan, optax.sgd(0.1)).init(params)

    def refused(function, match):
        with pytest.raises(CollcError, match=match):
            jax.eval_shape(collc.schedule(plan)(function), state)

    refused(lambda s: s.pull("sevn"), "'sevn' names no parameter. Did you mean")
    refused(lambda s: s.push({"sevn": jnp.ones(7)}), "no parameter 'sevn'")
    refused(lambda s: s.push([jnp.ones(7)]), "but the parameters are")
    other = "ring.all_gather @ host"
    refused(
        lambda s: collc.all_gather(s.params, other),
        "the shards lie over host and gpu, but the schedule",
    )
    refused(lambda s: s.push(s.pull(), tokens=3), "tokens= has no effect")
    refused(lambda s: s.push({}), "would update nothing")
    refused(
        lambda s: s.push({"ten": jnp.ones(10)}),
        r"the gradient of ten is \[10\], but the parameter is a collc.Shard of \[2, 5\] over host",
    )
    refused(lambda s: s.push(s.pull() | {"ten": jnp.ones(())}), r"the gradient of ten is \[\]")
    refused(
        lambda s: s.push({"ten": s.params["seven"]}),
        r"is a collc.Shard of \[7\] over host and gpu, but",
    )
    refused(
        lambda s: s.push({"ten": 1j * s.pull("ten")["ten"]}), "ten is complex64, but .* float32"
    )
    refused(lambda s: s.push({"ten": jnp.ones((2, 5), int)}), "the gradient of ten is int32, but")
    refused(lambda s: s.pull(["ten"]), r"\['ten'\] is no path\. .*state.pull\('deep', 'seven'\)")
    refused(lambda s: s.pull(0), "0 is no path")
    for wrong in (consistency.Delayed, "late", 1):
        with pytest.raises(StepError, match=r"consistency= is Sync\(\) or Delayed\(1\)"):
            collc.server(plan, optax.sgd(0.1), consistency=wrong)
    with pytest.raises(StepError, match=r"state\.pull runs inside a step"):
        state.pull()
    with pytest.raises(StepError, match="servers= has no effect on strategies"):
        collc.server(collc.strategies({"*": collc.strategy.server(plan)}), optax.sgd(1), servers=1)
    with pytest.raises(StepError, match="by 1 step or more"):
        consistency.Delayed(0)
    with pytest.raises(StepError, match=r"'no/\*' matches no leaf"):
        collc.server(plan, optax.sgd(0.1), stacked="no/*").init(params)


@pytest.mark.parametrize(
    "tx",
    [
        optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation(),
        optax.chain(optax.apply_every(2), optax.sgd(1.0)),
    ],
)
def test_pushes_by_path_of_an_optimizer_that_waits(plan, tx):
    state = collc.server(plan, tx).init({"w": jnp.ones(3), "b": jnp.ones(3)})
    with pytest.raises(StepError, match=r"counts all pushes together .*microbatches="):
        jax.eval_shape(collc.schedule(plan)(lambda state: state.push({"w": jnp.ones(3)})), state)
    jax.eval_shape(collc.schedule(plan)(lambda state: state.push(state.pull())), state)


def test_each_push_by_path_counts(plan):
    """As state.push says: to Adam, pushes of one half each are two steps."""
    state = collc.server(plan, optax.adam(0.1)).init({"w": jnp.ones(3), "b": jnp.ones(3)})
    one = {"w": jnp.ones(3)}, {"b": jnp.ones(3)}
    after = jax.jit(collc.schedule(plan)(lambda s: s.push(one[0]).push(one[1])))(state)
    assert int(after.opt.inner[0].count) == 2


def test_plans_that_leave_out_an_axis(mesh):
    part = collc.plan(mesh, {"gpu": "ring"})
    with pytest.raises(MeshError, match="the plan has gpu, but host of its mesh stays with XLA"):
        collc.server(part, optax.sgd(0.1))
    collc.server(collc.strategies({"*": collc.strategy.all_reduce(part)}), optax.sgd(0.1))


@pytest.mark.parametrize("wrong", [3, [3], {"w": 1}])
def test_patterns_of_stacked_parameters(plan, wrong):
    with pytest.raises(StepError, match=r"stacked= is a pattern of paths, .* or several, not"):
        collc.server(plan, optax.sgd(0.1), stacked=wrong)


def test_stacked_parameters_without_effect_or_layers(plan):
    both = {"a": collc.strategy.server(plan), "*": collc.strategy.all_reduce(plan)}
    server = collc.server(collc.strategies(both), optax.sgd(0.1), stacked=["a", "b"])
    with pytest.raises(StepError, match="stacked='b' has no effect"):
        server.init({"a": jnp.ones((2, 3)), "b": jnp.ones((2, 3))})
    for none in (jnp.ones((0, 3)), jnp.ones(())):
        with pytest.raises(DataError, match=r"stacked= names a, which is \[.*\] and has no layers"):
            collc.server(plan, optax.sgd(0.1), stacked="a").init({"a": none})


def test_a_loop_over_what_is_not_stacked(plan):
    state = collc.server(plan, optax.sgd(0.1)).init({"layers": jnp.ones((4, 5, 5))})

    @collc.schedule(plan)
    def step(state):
        def layer(x, w):
            return x @ collc.all_gather(w), None

        return jax.lax.scan(layer, jnp.ones(5), state.params["layers"])[0]

    with pytest.raises(DataError, match=r"a loop went over the part\. .*stacked="):
        jax.eval_shape(step, state)


def test_what_has_no_gradient_is_no_parameter(plan):
    server = collc.server(plan, optax.sgd(0.1))
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    for wrong, match in (
        (model, "Dropout is an nnx module. Give its parameters, .*nnx.split"),
        (nnx.state(model), r"rngs/\S+ is \S+, which has no gradient.*nnx.split\(model, nnx.Param"),
        ({"a": [jnp.ones(1), jnp.arange(3)]}, "a/1 is int32, which has no gradient"),
        ({"a": "b"}, "a is str, which has no gradient"),
        ({"a": jax.random.key(0)}, "a is key<fry>, which has no gradient"),
    ):
        with pytest.raises(DataError, match=match):
            server.init(wrong)


def test_optimizers_that_look_beyond_an_element_are_refused(plan):
    @collc.schedule(plan)
    def step(state):
        return state.push(state.pull())

    for tx, match in (
        (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), "collc.clip_by_global_norm"),
        (optax.lamb(0.1), "strategy.all_reduce"),
    ):
        state = collc.server(plan, tx).init({"w": jnp.ones((3, 7))})
        with pytest.raises(StepError, match=match):
            jax.eval_shape(step, state)
