"""What the replication check says is true, and what it elides changes nothing: both are run."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

import collc
from collc import strategy
from collc.errors import StepError
from collc.training.check.replication import check

from .stand_in import AXES, BOTH, NONE, W, X, bind, mesh


def checked_and_run(step):
    """The check of step(w, x); its jaxpr returns what the step does, and varies as it says."""
    seen = []

    def body(w, x):
        jaxpr = jax.make_jaxpr(step)(w, x)
        seen.append(check(jaxpr, [NONE, BOTH], AXES))
        both = jaxpr_as_fun(seen[0].jaxpr)(w, x), jaxpr_as_fun(jaxpr)(w, x)
        return jax.tree.map(lambda y: jnp.expand_dims(y, (0, 1)), both)

    specs = {"in_specs": (P(), P(("host", "gpu"))), "out_specs": P("host", "gpu")}
    results = jax.jit(jax.shard_map(body, mesh=mesh(), check_vma=False, **specs))(W, X)
    for new, plain, varying in zip(*results, seen[0].varying):
        new = np.asarray(new)
        np.testing.assert_array_equal(new, plain)
        for i, axis in enumerate(AXES):
            if axis not in varying:
                np.testing.assert_array_equal(new, np.repeat(new.take([0], i), AXES[axis], i))
    return seen[0]


def count(jaxpr, name):
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    total = 0
    for eqn in inner.eqns:
        total += eqn.primitive.name == name
        params = [p for v in eqn.params.values() for p in (v if isinstance(v, tuple) else (v,))]
        total += sum(count(p, name) for p in params if hasattr(getattr(p, "jaxpr", p), "eqns"))
    return total


def test_mean_max_min_of_the_same_are_elided():
    def step(w, x):
        a, b = bind((w, x.sum()))  # only the first
        c = bind(w * 2, op="max")
        d = lax.pmax(lax.pmin(w, "gpu"), "host")
        e = lax.pmax(lax.psum(x, "host"), ("host", "gpu"))  # over gpu is enough
        return a + b, c, d + e, bind(a, op="min"), w

    found = checked_and_run(step)
    assert count(found.jaxpr, "collc_collective") == 1
    assert count(found.jaxpr, "pmin") == 0
    assert "pmax[axes=('gpu',)" in str(found.jaxpr)
    assert [re.sub(r".*: (\S+ over [a-z ]*) is elided.*", r"\1", n) for n in found.notes] == [
        "collc.pmean over host and gpu",
        "collc.pmax over host and gpu",
        "lax.pmin over gpu",
        "lax.pmax over host",
        "lax.pmax over host and gpu",
        "collc.pmin over host and gpu",
    ]
    assert re.match(r"test_check_runs.py:\d+ in step: .* is elided in part", found.notes[0])


def test_elided_within_nested_jaxprs():
    @jax.custom_vjp
    def custom(w):
        return bind(w) * 2

    custom.defvjp(lambda w: (custom(w), None), lambda r, g: (g,))

    def step(w, x):
        w = jax.jit(lambda w: bind(w) + 1)(w)
        w = jax.checkpoint(lambda w: bind(w, op="max"))(w)
        w = lax.scan(lambda c, t: (bind(c) + t, bind(t)), w, jnp.stack([w, w]))[0]
        w = lax.while_loop(lambda c: bind(c).sum() < 9, lambda c: bind(c) + 1, w)
        w = lax.cond(w.sum() > 0, lambda w: bind(w), lambda w: w + 1, w)
        w = custom(w)
        return jax.nn.relu(w)

    found = checked_and_run(step)
    assert count(found.jaxpr, "collc_collective") == 0
    assert len(found.notes) == 6  # by line


def test_a_loop_that_begins_the_same_elides_nothing():
    def step(w, x):
        return lax.fori_loop(0, 3, lambda i, c: bind(c) + x.sum(), w)

    found = checked_and_run(step)
    assert found.varying == (BOTH,) and found.notes == ()
    assert count(found.jaxpr, "collc_collective") == 1


def test_an_unchanged_jaxpr_keeps_its_identity():
    jaxpr = jax.make_jaxpr(lambda w: jax.jit(jnp.sin)(w))(W)
    assert check(jaxpr, [BOTH], AXES).jaxpr is jaxpr


def test_scan_from_zeros():
    def step(w, x):
        def total(w):
            return lax.scan(lambda c, t: (c + jnp.tanh(t * w), c.sum()), jnp.zeros(3), x)[0].sum()

        return lax.pmean(jax.grad(total)(w), ("host", "gpu")), jax.grad(total)(w)

    found = checked_and_run(step)
    assert found.varying == (NONE, BOTH)


def _shift(carry, _):
    a, _, b = carry
    return (b, lax.pmin(a, "gpu"), b), None


def _small(carry):
    return carry[0].sum() < 5


OPERATIONS = {
    "add": lambda a, b: a + b,
    "where": lambda a, b: jnp.where(a > 0.5, b, a),
    "index": lambda a, b: a + lax.axis_index("gpu"),
    "psum": lambda a, b: lax.psum(a, "gpu"),
    "pmean": lambda a, b: lax.pmean(a + b, "host"),
    "pmax": lambda a, b: lax.pmax(b, ("host", "gpu")),
    "ours": lambda a, b: bind((a, b), op="max")[0],
    "gather": lambda a, b: lax.all_gather(a, "gpu")[1],
    "shift": lambda a, b: lax.ppermute(a, "gpu", [(i, (i + 1) % 4) for i in range(4)]),
    "send": lambda a, b: lax.ppermute(a, "host", [(0, 1)]),
    "scatter": lambda a, b: lax.psum_scatter(jnp.tile(a, 4), "gpu", tiled=True),
    "exchange": lambda a, b: lax.all_to_all(jnp.tile(a, 2), "host", 0, 0, tiled=True)[:3],
    "cond": lambda a, b: lax.cond(a[0] > 0.5, lambda: a, lambda: b * 2),
    "cond_max": lambda a, b: lax.cond(a[0] > 0.5, lambda: lax.pmax(a, "gpu"), lambda: b),
    "scan": lambda a, b: lax.scan(_shift, (a, a, b), None, 2)[0][1],
    "while": lambda a, b: lax.while_loop(_small, lambda c: (c[0] + 1, b), (a, a))[1],
    "jit": lambda a, b: jax.jit(lambda a: bind(a, ("gpu",)))(a),
    "grad": lambda a, b: jax.grad(lambda a: jnp.sin(a * b).sum())(a),
}


MORE = [pytest.param(seed, marks=pytest.mark.newest_only) for seed in range(6, 12)]


@pytest.mark.parametrize("seed", [*range(6), *MORE])
def test_random_programs_vary_as_the_check_says(seed):
    """Programs of six operations that the check lets pass; their results are compared exactly."""
    rng = np.random.default_rng(seed)
    program = []

    def step(w, x, program):
        values = [w, x[0]]
        for name, a, b in program:
            values.append(OPERATIONS[name](values[a], values[b]) / 2)
        return values[2:]

    def passes(program):
        try:
            jaxpr = jax.make_jaxpr(partial(step, program=program), axis_env=list(AXES.items()))
            check(jaxpr(W, X[:2]), [NONE, BOTH], AXES)
        except StepError:
            return False
        return True

    while len(program) < 6:
        n = len(program) + 2
        new = (str(rng.choice(list(OPERATIONS))), int(rng.integers(n)), int(rng.integers(n)))
        program += [new] * passes([*program, new])
    found = checked_and_run(partial(step, program=program))
    assert len(found.varying) == 6


def test_groups_may_differ_in_what_they_run():
    """XLA's grouped collectives wait for their group only; a permute would wait for all devices."""

    def step(w, x):
        host = lax.axis_index("host")
        y = lax.cond(host == 0, lambda: lax.psum(x, "gpu"), lambda: x)
        return y, lax.while_loop(
            lambda c: c[0] <= host, lambda c: (c[0] + 1, step_of(c[1])), (0, x)
        )

    def step_of(x):
        return lax.all_gather(x, "gpu").sum(0)

    assert checked_and_run(step).varying == (BOTH, frozenset({"host"}), BOTH)


def test_what_collc_binds_itself():
    """The public collectives, not a stand-in."""
    from collc.lowering import collectives
    from collc.schedules import ring

    plan = ring.all_reduce @ "gpu"

    def loss(w, x):
        return jnp.mean((x @ w) ** 2)

    def step(w, x):
        value, grads = jax.value_and_grad(loss)(w, x)
        once = collectives.pmean((value, grads), plan)
        return collectives.pmean(once, plan), once, collectives.psum(1, plan)

    found = checked_and_run(step)
    host = frozenset({"host"})
    assert found.varying == (host, host, host, host, NONE)
    assert count(found.jaxpr, "collc_collective") == 1
    assert len(found.notes) == 1 and "collc.pmean over gpu is elided" in found.notes[0]

    def inside(w, x):
        return jax.grad(lambda w: collectives.psum(loss(w, x), plan))(w)

    def twice(w, x):
        return collectives.psum(collectives.psum(x, plan), plan)

    for wrong, says in (inside, "loss reduced inside grad"), (twice, "collc.psum sums over gpu"):
        with pytest.raises(StepError, match=says):
            checked_and_run(wrong)


# -- gradients that are reduced twice -------------------------------------------------------------


def pushed(plan, before, by=strategy.server):
    """A step that reduces gradients by what is declared, once ``before`` has had them."""
    s = collc.strategies({"*": by(plan)})

    @collc.schedule(plan, batch="x")
    def step(w, x):
        out = s.reduce(before({"w": w * x.sum(), "v": w + x.sum()}, w))
        return out

    return step


@pytest.mark.parametrize(
    "before",
    [
        lambda g, w: collc.psum(g),
        lambda g, w: collc.pmean(g),
        lambda g, w: lax.pmean(g, ("host", "gpu")),
        lambda g, w: jax.tree.map(lambda x: 0.5 * x + w, collc.pmean(g)),
        lambda g, w: g | {"w": collc.psum(g["w"])},
    ],
)
@pytest.mark.parametrize("servers", [None, 2])
def test_a_server_refuses_what_has_been_reduced(plan, before, servers):
    step = pushed(plan, before, lambda plan: strategy.server(plan, servers))
    line = r"test_check_runs.py:\d+ in step: collc.reduce.*over .* before: it reduces twice"
    with pytest.raises(StepError, match=line + ".*this rank's gradients"):
        step(W, X)


def test_a_server_takes_what_is_the_same_on_all_ranks(plan):
    step = pushed(plan, lambda g, w: {"w": 2 * w, "v": jnp.tanh(collc.pmean(g["v"]))})
    out = jax.jit(step)(W, X)
    np.testing.assert_array_equal(np.asarray(out["w"].value).reshape(-1)[:3], 2 * W)


def test_a_mean_of_sums_is_noted_as_one(plan):
    for before, said in (
        (collc.psum, "the same on all ranks, a sum over gpu and host, 8 times their mean"),
        (lambda g: collc.psum(g, "gpu"), "of what is a sum over gpu, 4 times their mean"),
        (collc.pmean, "the same on all ranks"),
    ):
        step = pushed(plan, lambda g, w, f=before: f(g), strategy.all_reduce)
        jax.eval_shape(step, W, X)
        assert step.notes[-1].endswith(said)
