"""Strategies by parameter: each leaf's reduction, axes and denominator, against numpy."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import collc
from collc import strategy
from collc.errors import DataError, MeshError, StepError
from collc.training.paths import matches

BOTH = ("host", "gpu")
# A whole number for each rank: sums are exact, and so are these divisions.
G = np.arange(8, dtype=np.float32).reshape(8, 1) * 16 + np.float32([[0, 8, 24]])
TOKENS = np.int32([4, 0, 2, 2, 1, 3, 0, 4])  # 16 in all
HERE = np.array([1, 0, 1, 1, 1, 0, 0, 0], bool)


def is_shard(x):
    return isinstance(x, collc.Shard)


def rows(s, g=G, **counts):
    """What each rank has after the reduction: [8, 3]."""

    @jax.jit
    @collc.schedule(s.plan, batch=("g", "counts"))
    def step(g, counts):
        own = {name: c[0] for name, c in counts.items() if name != "none"}
        dropped = dict(s.patterns)["*"].dropped
        out = s.reduce({"w": collc.Ranked(g[0], dropped) if dropped else g[0]}, **own)["w"]
        return collc.Ranked(out.value if dropped else out)

    return np.asarray(step(g, {"none": HERE, **counts}).value).reshape(8, 3)


def expected(weights, axes, divisor):
    """The sum over axes of weighted gradients, on every rank."""
    wide = (weights[:, None] * np.where(weights[:, None] > 0, G, 0)).reshape(2, 4, 3)
    total = wide.sum(axis=axes, keepdims=True) if axes else wide
    return np.broadcast_to(total / divisor, (2, 4, 3)).reshape(8, 3)


@pytest.mark.parametrize(
    "make, axes, divisor",
    [
        (lambda plan, mean: strategy.all_reduce(plan, mean), (0, 1), 8),
        (lambda plan, mean: strategy.local("gpu", mean=mean, plan=plan), (0,), 2),
        (lambda plan, mean: strategy.local("host", mean=mean, plan=plan), (1,), 4),
        (lambda plan, mean: strategy.local(*BOTH, mean=mean, plan=plan), (), 1),
    ],
)
def test_every_denominator(plan, make, axes, divisor):
    for mean in strategy.MEANS:
        s = collc.strategies({"*": make(plan, mean)})
        counts = {"tokens": TOKENS} if mean == "tokens" else {}
        counts = {"participates": HERE} if mean == "participants" else counts
        c = np.float32(next(iter(counts.values()), np.ones(8)))
        total = c.reshape(2, 4).sum(axis=axes, keepdims=True) if axes else c.reshape(2, 4)
        weighted = np.broadcast_to(np.maximum(total, 1), (2, 4))[..., None]
        by = {"ranks": divisor, "world": 8}.get(mean, weighted)
        np.testing.assert_allclose(rows(s, **counts), expected(c, axes, by), rtol=3e-7)


def test_means_are_exact_where_arithmetic_is(plan):
    s = collc.strategies({"*": strategy.all_reduce(plan, mean="tokens")})
    np.testing.assert_array_equal(rows(s, tokens=TOKENS), expected(TOKENS, (0, 1), 16))
    s = collc.strategies({"*": strategy.all_reduce(plan, mean="participants")})
    np.testing.assert_array_equal(rows(s, participates=HERE), expected(HERE * 1, (0, 1), 4))


def test_ranks_that_count_for_nothing_may_hold_nan(plan):
    s = collc.strategies({"*": strategy.all_reduce(plan, mean="tokens")})
    broken = np.where(TOKENS[:, None] > 0, G, np.nan)
    np.testing.assert_array_equal(rows(s, broken, tokens=TOKENS), expected(TOKENS, (0, 1), 16))
    none = rows(s, G * np.nan, tokens=TOKENS * 0)
    np.testing.assert_array_equal(none, np.zeros((8, 3)))


def test_counts_that_are_missing_or_idle(plan):
    ranks = collc.strategies({"*": strategy.all_reduce(plan)})
    tokens = collc.strategies({"*": strategy.all_reduce(plan, mean="tokens")})
    with pytest.raises(StepError, match="tokens= has no effect"):
        rows(ranks, tokens=TOKENS)
    with pytest.raises(StepError, match="participates= has no effect"):
        rows(tokens, tokens=TOKENS, participates=HERE)
    with pytest.raises(StepError, match=r"tokens= was not given.*push.grads, reduced=True"):
        rows(tokens)
    with pytest.raises(DataError, match=r"one number for this rank, not int32\[2\]"):
        rows(tokens, tokens=np.int32([[1, 2]] * 8))


def test_servers_get_their_parts(plan):
    for mean, c in (("ranks", np.ones(8)), ("tokens", TOKENS)):
        for servers in (None, 1, 3):
            s = collc.strategies({"*": strategy.server(plan, servers, mean=mean)})
            counts = {"tokens": TOKENS} if mean == "tokens" else {}
            step = collc.schedule(plan, batch=["g", "tokens"])(
                lambda g, tokens, s=s, counts=counts: s.reduce(
                    {"w": g[0]}, tokens[0] if counts else None
                )
            )
            shard = jax.jit(step)(G, TOKENS)["w"]
            assert is_shard(shard) and shard.shape == (3,) and shard.axes == BOTH
            found = np.asarray(shard.value).reshape(-1)[:3]
            np.testing.assert_array_equal(found, expected(c, (0, 1), c.sum())[0])


def test_stacked_layers_are_not_cut(plan):
    s = replace(collc.strategies({"*": strategy.server(plan)}), stacked=("blocks/*",))
    grads = {"blocks": [jnp.ones((2, 5, 3))], "w": jnp.ones((2, 5, 3))}
    step = collc.schedule(plan)(lambda g: s.reduce(g))
    out = jax.jit(step)(grads)
    assert out["blocks"][0].shape == (5, 3) and out["w"].shape == (2, 5, 3)
    with pytest.raises(StepError, match=r"of stacked= the pattern 'blocks/\*' matches no leaf"):
        s.of({"w": jnp.ones(3)})


def test_patterns(plan):
    every, own = strategy.all_reduce(plan), strategy.local("gpu")
    table = collc.Ranked(1.0, "gpu")
    tree = {"embed": {"table": table}, "blocks": [{"w": 2.0}, {"w": 3.0}], "none": None}
    s = collc.strategies({"embed/*": own, "*": every})
    placed = replace(own, plan=plan)
    assert s.of(tree) == [("blocks/0/w", every), ("blocks/1/w", every), ("embed/table", placed)]
    assert hash(s) == hash(collc.strategies({"embed/*": own, "*": every})) and s.plan is plan
    with pytest.raises(StepError, match=r"'embd/\*' matches no leaf. Did you mean embed/table"):
        collc.strategies({"embd/*": own, "*": every}).of(tree)
    assert collc.strategies({"embd/*": own, "*": every}).of({"w": 1.0}, partial=True)
    with pytest.raises(StepError, match=r"blocks/0/w: the patterns 'blocks/\*' and '\*/w' collide"):
        collc.strategies({"blocks/*": own, "*/w": every, "*": every}).of(tree)
    with pytest.raises(StepError, match="blocks/0/w has no strategy"):
        collc.strategies({"embed/*": every}).of(tree)
    for name in ("embed", "embed/"):
        with pytest.raises(StepError, match=r'matches no leaf. Write "embed/\*" for all below it'):
            collc.strategies({name: own, "*": every}).of(tree)
    with pytest.raises(StepError, match=r"stands for any path. Write \"\*\", which takes what no"):
        collc.strategies({"**": every})


def test_a_star_is_any_part_of_a_path_and_all_else_itself():
    assert matches("*/w", "blocks/0/attention/w") and matches("a*w", "aw")
    assert not matches("blocks/[0]/w", "blocks/0/w") and matches("blocks/[0]/w", "blocks/[0]/w")
    assert not matches("w?", "w1") and not matches("w", "w1") and not matches("W", "w")


def test_two_parameters_of_one_path(plan):
    s = collc.strategies({"*": strategy.all_reduce(plan)})
    with pytest.raises(StepError, match=r"path 'a/b': \['a'\]\['b'\] and \['a/b'\]. Rename one"):
        s.of({"a/b": 1.0, "a": {"b": 2.0}})


def test_what_cannot_be_strategies(plan, mesh):
    every = strategy.all_reduce(plan)
    with pytest.raises(MeshError, match=r"the plan has no axis 'gpus'. Did you mean gpu"):
        collc.strategies({"a": strategy.local("gpus"), "*": every})
    other = collc.plan(mesh, {"gpu": "ring"})
    with pytest.raises(MeshError, match="'a' and '\\*' have plans over different meshes or axes"):
        collc.strategies({"a": strategy.all_reduce(other), "*": every})
    with pytest.raises(StepError, match="none of the strategies has a plan"):
        collc.strategies({"*": strategy.local("gpu")})
    for wrong in ({}, "*"):
        with pytest.raises(StepError, match="takes strategies by pattern, as"):
            collc.strategies(wrong)
    for wrong, said in (({"*": plan}, r"not '\*': a Plan"), ({1: every}, "not 1: a Strategy")):
        with pytest.raises(StepError, match=f"takes pairs of a pattern and a strategy.*{said}"):
            collc.strategies(wrong)
    for wrong, said in ((True, "bytes"), (1.5, "bytes"), ("32MB", "32MB"), ("0", "0")):
        with pytest.raises(DataError, match=said):
            collc.strategies({"*": every}, bucket=wrong)
    with pytest.raises(StepError, match="Did you mean tokens"):
        strategy.all_reduce(plan, mean="token")
    with pytest.raises(StepError, match="axes whose ranks keep their own"):
        strategy.local()
    with pytest.raises(DataError, match="servers is 1 to 8"):
        strategy.server(plan, 9)
    with pytest.raises(DataError, match="floating-point dtype or None"):
        strategy.all_reduce(plan, accumulate="int32")
    with pytest.raises(DataError, match=r"strategy.local: wire= takes a floating-point .*'bf17'"):
        strategy.local("gpu", wire="bf17")
    with pytest.raises(DataError, match="wire= has no effect with servers=2"):
        strategy.server(plan, 2, wire="bfloat16")
    assert str(strategy.all_reduce(plan, wire=jnp.bfloat16)) == "all_reduce(wire='bfloat16')"


def test_nodes_have_to_lie_as_declared(plan):
    s = collc.strategies({"e": strategy.local("gpu"), "*": strategy.all_reduce(plan)})
    one = jnp.ones(3)
    assert s.of({"e": collc.Ranked(one, "gpu"), "w": one})
    with pytest.raises(
        StepError, match=r"e .* is ranked over host.*Declare strategy.local\(\"host"
    ):
        s.of({"e": collc.Ranked(one, "host"), "w": one})
    own = collc.Ranked(one, "gpu")
    with pytest.raises(
        StepError, match=r"w .*: each rank has its own. But its strategy is all_red"
    ):
        s.of({"e": own, "w": own})
    shard = collc.Shard(one[:1], (3,), BOTH)
    with pytest.raises(StepError, match=r"w .* is a Shard over host and gpu.*strategy.server"):
        s.of({"e": own, "w": shard})
    with pytest.raises(StepError, match=r'e .*one value for all ranks.*ranked\(value, plan, "gpu"'):
        s.explain({"e": one, "w": one})
    with pytest.raises(StepError, match="each rank has its own"):
        collc.strategies({"*": strategy.server(plan)}).of({"w": collc.Ranked(one, BOTH)})
    held = collc.strategies({"*": strategy.server(plan, mean="tokens")})
    step = collc.schedule(plan)(lambda x: held.reduce({"w": x}, tokens=1))
    with pytest.raises(StepError, match=r"by tokens any more.*push.grads, reduced=True"):
        step(collc.Shard(jnp.ones((2, 4, 1)), (3,), BOTH))
    passed = collc.strategies({"*": strategy.server(plan)})
    step = collc.schedule(plan)(lambda x: passed.reduce({"w": x})["w"])
    out = step(collc.Shard(jnp.arange(8.0).reshape(2, 4, 1), (3,), BOTH))
    np.testing.assert_array_equal(out.value, jnp.arange(8.0).reshape(2, 4, 1))


def test_scalars_empty_leaves_mixed_dtypes_and_no_gradient(plan):
    s = collc.strategies({"*": strategy.all_reduce(plan)})
    grads = {
        "empty": np.zeros((8, 0, 3), np.float32),
        "half": G.astype(jnp.bfloat16),
        "scalar": G[:, 0],
        "none": None,
    }
    step = jax.jit(
        collc.schedule(plan, batch="g")(lambda g: s.reduce(jax.tree.map(lambda x: x[0], g)))
    )
    out = step(grads)
    assert out["none"] is None and out["empty"].shape == (0, 3)
    assert out["half"].dtype == jnp.bfloat16 and out["scalar"].shape == ()
    np.testing.assert_array_equal(out["half"], G.mean(0).astype(jnp.bfloat16))
    np.testing.assert_array_equal(out["scalar"], G[:, 0].mean())
    nothing = np.zeros((3,), jax.dtypes.float0)
    step = collc.schedule(plan, batch="g")(lambda g: s.reduce({"a": g[0], "b": nothing})["a"])
    np.testing.assert_array_equal(step(G), G.mean(0))
    with pytest.raises(DataError, match=r"w .* is int32, which has no mean"):
        collc.schedule(plan, batch="g")(lambda g: s.reduce({"w": g[0].astype(int)}))(G)


def test_nnx_state_and_linen_params(plan):
    s = collc.strategies({"a/kernel": strategy.server(plan), "*": strategy.all_reduce(plan)})

    class Net(nnx.Module):
        def __init__(self):
            self.a = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    state = nnx.state(Net(), nnx.Param)
    boxed = {
        "a": {"kernel": linen.Partitioned(jnp.ones((3, 2)), (None, None)), "bias": jnp.ones(2)}
    }
    for tree in (state, boxed):
        assert [path for path, _ in s.of(tree)] == ["a/bias", "a/kernel"]
        step = collc.schedule(plan, batch="x")(
            lambda t, x: s.reduce(jax.tree.map(lambda y: y + 0 * x.sum(), t))["a"]["bias"]
        )
        assert jax.tree.structure(step(tree, G)) == jax.tree.structure(tree["a"]["bias"])


def test_table(plan):
    s = collc.strategies(
        {
            "embed/*": strategy.server(plan),
            "experts/*": strategy.local("gpu", mean="world"),
            "own": strategy.local(*BOTH),
            "*": strategy.all_reduce(plan, mean="tokens", accumulate=None),
        },
        bucket="1MiB",
    )
    shape = jax.ShapeDtypeStruct
    params = {
        "embed": {"table": collc.Shard(shape((2, 4, 32, 1), jnp.float32), (31, 8), BOTH)},
        "experts": [collc.Ranked(shape((4, 1024, 512), jnp.bfloat16), "gpu")] * 3,
        "own": collc.Ranked(shape((2, 4), jnp.float32), BOTH),
        "w": shape((1 << 20,), jnp.float32),
    }
    text = s.explain(params)
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "embed/* 1 992 B server() host, gpu 8 ranks -" in rows
    assert "experts/* 3 6 MiB local('gpu', mean=\"world\") host 8 ranks -" in rows
    assert "experts/*: narrower gradients travel in the dtype that sums are kept in." in rows
    assert "own 1 4 B local('host', 'gpu') - 1 rank -" in rows
    assert '* 1 4 MiB all_reduce(mean="tokens", accumulate=None) host, gpu tokens -' in rows
    assert "experts/*: tree.all_reduce @ host" in rows
    assert "No times, for there is no machine: collc.plan(..., machine=...)." in text
    pod = jax.sharding.AbstractMesh((2, 4), BOTH)
    priced = collc.plan(pod, {"gpu": "ring", "host": "ring"}, machine="dgx-h100:1")
    table = collc.strategies({"*": strategy.all_reduce(priced)}).explain({"w": params["w"]})
    assert "Predicted on dgx-h100:1" in table and " us\n" in table


def test_the_table_counts_what_travels(mesh):
    """16 bfloat16 numbers: 64 bytes in float32 sums, 32 where told so."""
    plan = collc.plan(mesh, {"gpu": "ring", "host": "tree"})
    w = {"w": jax.ShapeDtypeStruct((16,), jnp.bfloat16)}
    for chosen, size in (
        (strategy.all_reduce(plan), "64 B"),
        (strategy.all_reduce(plan, wire="bfloat16"), "32 B"),
        (strategy.all_reduce(plan, accumulate=None), "32 B"),
        (strategy.server(plan), "64 B"),
        (strategy.server(plan, wire="bfloat16"), "32 B"),
        (strategy.server(plan, 2), "32 B"),  # straight to the server that adds them
    ):
        row = collc.strategies({"*": chosen}).explain(w).splitlines()[2]
        assert row.split()[1:4] == ["1", *size.split()], chosen


def test_the_table_counts_what_has_a_gradient(plan):
    class Net(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
            self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    s = collc.strategies({"*": strategy.all_reduce(plan)})
    tree = {"w": jnp.ones(3), "step": 1, "key": jax.random.key(0), "scale": 2.0}
    for params in (Net(), nnx.state(Net()), tree):
        row = s.explain(params).splitlines()[2].split()
        assert row[1] == "2", params  # scale and bias; w and scale


def test_the_table_prices_servers_by_what_is_sent():
    mesh = jax.sharding.AbstractMesh((4, 8), ("host", "gpu"))
    plan = collc.plan(mesh, {"gpu": "native", "host": "native"}, machine="dgx-h100:4")
    shapes = {"w": jax.ShapeDtypeStruct((32, 1 << 18), jnp.float32)}
    times = []
    for servers in (1, 2, None):
        text = collc.strategies({"*": strategy.server(plan, servers)}).explain(shapes)
        if servers:
            assert f"servers.push({servers}) @ (host, gpu) and servers.pull({servers})" in text
        number, unit = text.splitlines()[2].split()[-2:]
        times.append(float(number) * {"us": 1e-6, "ms": 1e-3}[unit])
    assert times[0] > 1.5 * times[1] > 1.5 * times[2]  # a star is the bottleneck
