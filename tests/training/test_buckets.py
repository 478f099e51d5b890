"""Gradients in buckets: by what is done and dtype, of at most a size, in backward order."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import collc
from collc import strategy
from collc.errors import ScheduleError
from collc.language.library import load
from collc.training.gradients.buckets import cut

collectives = load(Path(__file__).parent / "asked.py").collectives


def asked(strategies, grads):
    """The collectives of a reduction of each rank's part, in the order of the program."""
    step = collc.schedule(strategies.plan, batch="grads")(
        lambda grads: collc.Ranked(strategies.reduce(grads))
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
    found = asked(s, grads)
    assert found == [("float32", 3, 1), ("float32", 3, 1), ("bfloat16", 3, 1), ("float32", 6, 1)]


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


def test_narrow_gradients_travel_narrow_and_are_added_wide(plan):
    # Rank 0 has 1, the others 1/256: in bfloat16 sums the small ones vanish.
    g = np.full((8, 1), 2.0**-8, np.float32)
    g[0] = 1
    g = jnp.asarray(g, jnp.bfloat16)

    def run(**how):
        s = collc.strategies({"*": strategy.all_reduce(flat, **how)})
        step = collc.schedule(flat, batch="g")(lambda g: s.reduce(g[0]))
        return jax.jit(step)(g), str(jax.make_jaxpr(step)(g))

    flat = collc.plan(jax.make_mesh((8,), ("gpu",), devices=jax.devices()[:8]), {"gpu": "server"})
    (wide, text), (narrow, _) = run(), run(accumulate=None)
    assert wide.dtype == narrow.dtype == jnp.bfloat16
    assert float(wide[0]) == float(jnp.bfloat16((1 + 7 * 2.0**-8) / 8)) != float(narrow[0])
    assert "accumulate=float32" in text


def test_what_cannot_be_added_wide_names_the_pattern(mesh):
    plan = collc.plan(mesh, {"gpu": "doubling", "host": "ring"})
    s = collc.strategies({"w*": strategy.all_reduce(plan)})
    step = collc.schedule(plan, batch="g")(lambda g: s.reduce({"w1": g[0]}))
    step(jnp.ones((8, 3)))
    with pytest.raises(ScheduleError, match=r"w1 \(pattern 'w\*'\).*accumulate=None"):
        step(jnp.ones((8, 3), jnp.bfloat16))
