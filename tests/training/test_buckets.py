"""Gradients in buckets: by what is done and dtype, of at most a size, in backward order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import collc
from collc import strategy
from collc.errors import ScheduleError
from collc.training.gradients.buckets import cut

from .asked import collectives

BOTH = ("host", "gpu")


def asked(strategies, grads, reduce=None):
    """The collectives of a reduction of each rank's part, in the order of the program."""
    reduce = reduce or strategies.reduce
    step = collc.schedule(strategies.plan, batch="grads")(
        lambda grads: collc.Ranked(jax.tree.leaves(reduce(grads)))
    )
    return list(collectives(jax.make_jaxpr(step)(grads)))


def test_cut_by_kind_and_size():
    assert cut([], 4) == []
    assert cut([("a", 9), ("a", 1), ("a", 3), ("b", 4), ("a", 1)], 4) == [[0], [1, 2], [3], [4]]
    assert cut([("a", 0), ("a", 4), ("a", 0)], 4) == [[0, 1, 2]]
    assert cut([("a", 2), ("b", 2), ("a", 2), ("b", 4)], 4) == [[1], [0, 2], [3]]


def test_one_message_for_a_bucket_last_leaf_first(plan):
    grads = {f"w{i}": jnp.ones((8, 2**i)) for i in range(5)}  # 4 to 64 bytes on a rank

    def sizes(bucket):
        s = collc.strategies({"*": strategy.all_reduce(plan)}, bucket=bucket)
        return [size for _, size, _ in asked(s, grads)]

    assert sizes("1MiB") == [31]
    assert sizes(64) == [16, 15]
    assert sizes("32") == [16, 8, 7]


def test_dtypes_strategies_and_plans_travel_apart(plan, mesh):
    other = collc.plan(mesh, {"gpu": "tree", "host": "tree"})
    s = collc.strategies(
        {
            "experts/*": strategy.local("gpu"),
            "other/*": strategy.all_reduce(other),
            "own/*": strategy.local("host", "gpu"),
            "*": strategy.all_reduce(plan),
        }
    )
    one, half = jnp.ones((8, 3)), jnp.ones((8, 3), jnp.bfloat16)
    grads = {"a": one, "b": half, "c": one, "experts": [one], "other": [one], "own": [one]}

    def lying(g):
        experts, own = collc.Ranked(g["experts"], "gpu"), collc.Ranked(g["own"], BOTH)
        return s.reduce(g | {"experts": experts, "own": own})

    found = asked(s, grads, lying)
    wide = ("float32", 3, 1)  # of bfloat16: a bucket of its own, in which sums travel in float32
    assert found == [wide, wide, wide, ("float32", 6, 1)]


def test_backward_order(plan):
    s = collc.strategies({"*": strategy.all_reduce(plan)}, bucket=1)
    # By name z is last, but it is used first, so its gradient is made last.
    w = {"z": jnp.ones((2, 3)), "b": jnp.ones((3, 5)), "a": jnp.ones((5, 7))}

    def loss(w, x):
        layer = jax.jit(lambda a, b, x: jnp.tanh(x @ a) @ b)
        return (layer(w["z"], w["b"], x) @ w["a"]).sum()

    step = collc.schedule(plan, batch="x")(lambda w, x: s.value_and_grad(loss)(w, x))
    sizes = [n for _, n, _ in collectives(jax.make_jaxpr(step)(w, jnp.ones((8, 2))))]
    assert sizes == [1, 35, 15, 6]


# Rank 0 has 1, the others 1/256: in bfloat16 sums the small ones vanish.
SMALL = jnp.asarray([[1.0], *[[2.0**-8]] * 7], jnp.bfloat16)
EXACT = float(jnp.bfloat16((1 + 7 * 2.0**-8) / 8))


def placed(make, algorithm):
    """The different means of SMALL, with its 1 at each rank in turn."""
    mesh = jax.make_mesh((8,), ("gpu",), devices=jax.devices()[:8])
    plan = collc.plan(mesh, {"gpu": algorithm})
    s = collc.strategies({"*": make(plan)})

    def own(x):
        return x.value.reshape(-1)[:1] if isinstance(x, collc.Shard) else x

    step = jax.jit(collc.schedule(plan, batch="g")(lambda g: collc.Ranked(own(s.reduce(g[0])))))
    means = [step(jnp.roll(SMALL, k, 0)) for k in range(8)]
    assert {m.value.dtype.name for m in means} == {"bfloat16"}
    return {float(np.asarray(m.value).reshape(-1)[0]) for m in means}


@pytest.mark.parametrize("algorithm", ["ring", "halving", "tree", "doubling", "server", "native"])
def test_narrow_gradients_are_added_in_float32_by_any_schedule(algorithm):
    assert placed(strategy.all_reduce, algorithm) == {EXACT}


@pytest.mark.parametrize("servers", [None, 1, 3])
def test_narrow_gradients_are_added_in_float32_at_servers(servers):
    assert placed(lambda plan: strategy.server(plan, servers), "ring") == {EXACT}


@pytest.mark.parametrize("servers", [None, 2])
def test_complex_gradients_have_their_own_sums(plan, servers):
    s = collc.strategies({"*": strategy.server(plan, servers)})
    step = jax.jit(collc.schedule(plan, batch="g")(lambda g: s.reduce(g[0])))
    found = step(jnp.arange(8).reshape(8, 1) * (1 + 2j)).value
    assert found.dtype == jnp.complex64 and np.asarray(found).reshape(-1)[0] == 3.5 + 7j


def test_narrow_sums_are_asked_for(plan):
    def narrow(plan):
        return strategy.all_reduce(plan, accumulate=None)

    def sent(plan):
        return strategy.all_reduce(plan, wire="bfloat16")

    assert placed(narrow, "ring") != {EXACT} != placed(sent, "ring")
    half = {"w": jnp.ones((8, 3), jnp.bfloat16)}
    for make, dtype in ((strategy.all_reduce, "float32"), (narrow, "bfloat16")):
        assert asked(collc.strategies({"*": make(plan)}), half) == [(dtype, 3, 1)]
    step = collc.schedule(plan, batch="g")(
        lambda g: collc.Ranked(collc.strategies({"*": sent(plan)}).reduce(g[0]))
    )
    assert "Cast(dtype='bfloat16'" in str(jax.make_jaxpr(step)(half["w"]))


def test_what_cannot_travel_narrow_names_the_pattern(mesh):
    plan = collc.plan(mesh, {"gpu": "doubling", "host": "ring"})
    for wire in (None, "bfloat16"):
        s = collc.strategies({"w*": strategy.all_reduce(plan, wire=wire)})
        step = jax.jit(collc.schedule(plan, batch="g")(lambda g, s=s: s.reduce({"w1": g[0]})))
        if wire is None:
            step.lower(jnp.ones((8, 3), jnp.bfloat16))
            continue
        with pytest.raises(ScheduleError, match=r"w1 \(pattern 'w\*'\).*Without wire="):
            step.lower(jnp.ones((8, 3), jnp.bfloat16))
