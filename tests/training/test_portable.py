"""A state that was saved on some devices comes back on others: exactly, or as its rule says."""

import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import collc
from collc.errors import CheckpointError
from collc.lowering.shards import Shard, part
from collc.training.checkpoints import checkpoint
from collc.training.checkpoints.flat import flattened
from collc.training.checkpoints.portable import places, portable, record
from collc.training.checkpoints.resize import resized
from collc.training.consistency import Delayed
from collc.training.kinds import AXES, Ranked

WHOLE = {"w": (7, 3), "b": (), "c": (10,), "one": (1,)}


def mesh(sizes, kind="Auto"):
    names = ("host", "gpu")[-len(sizes) :]
    kinds = (getattr(AxisType, kind),) * len(sizes)
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, names, axis_types=kinds, devices=devices)


def put(x, mesh, *axes):
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))


def shard(x, mesh, servers=None, layers=0):
    """A whole leaf as a Shard over all axes of the mesh, cut by numpy."""
    x = np.asarray(x)
    stack, shape = x.shape[:layers], x.shape[layers:]
    n = mesh.size
    k = part(shape, servers or n)
    row = np.zeros((*stack, n * k), x.dtype)
    row[..., : math.prod(shape)] = x.reshape(*stack, -1)
    rows = np.moveaxis(row.reshape(*stack, n, k), -2, 0)
    value = rows.reshape(*mesh.devices.shape, *stack, k, *(1,) * (len(shape) - 1))
    return Shard(put(value, mesh, *mesh.axis_names), shape, mesh.axis_names, servers)


def whole(shard, layers=0):
    size = math.prod(shard.shape)
    row = np.asarray(flattened("x", shard))
    assert not row[..., size:].any()  # padding stays zero
    return row[..., :size].reshape((*row.shape[:layers], *shard.shape))


def state(mesh, seed=0, servers=None):
    random = np.random.default_rng(seed)
    leaves = {name: random.normal(size=s).astype(np.float32) for name, s in WHOLE.items()}
    params: Any = {name: shard(x, mesh, servers) for name, x in leaves.items()}
    stacked = shard(random.normal(size=(3, 5, 2)).astype(np.float32), mesh, servers, layers=1)
    return {
        "params": params,
        "stacked": stacked,
        "opt": optax.adam(0.1).init(params),
        "key": put(jax.random.key(seed), mesh),
        "plain": put(jnp.asarray(random.normal(size=4), jnp.bfloat16), mesh),
    }


def equal(a, b):
    a, b = (x if x.dtype.name[:3] != "key" else jax.random.key_data(x) for x in (a, b))
    return a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def same(old, new):
    assert jax.tree.structure(old) == jax.tree.structure(new)
    for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        assert equal(a, b)


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


DEVICES = [((4,), None), ((8,), 2), ((2, 4), None), ((2, 3), None), ((1,), None), ((3,), 1)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One state on 2 x 2 devices, saved."""
    folder = tmp_path_factory.mktemp("saved")
    before = state(mesh((2, 2)))
    checkpoint.save(folder, 1, before, {})
    return before, checkpoint.latest(folder)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(("sizes", "servers"), DEVICES)
def test_shards_come_back_on_any_devices(saved, sizes, servers, kind):
    before, found = saved
    like = state(mesh(sizes, kind), seed=1, servers=servers)
    back = checkpoint.restore(found, abstract(like))
    assert jax.tree.structure(back) == jax.tree.structure(like)
    for new, target in zip(jax.tree.leaves(back), jax.tree.leaves(like), strict=True):
        assert new.sharding == target.sharding and new.shape == target.shape
    for name in WHOLE:
        np.testing.assert_array_equal(whole(back["params"][name]), whole(before["params"][name]))
    np.testing.assert_array_equal(whole(back["stacked"], 1), whole(before["stacked"], 1))
    assert equal(back["key"], before["key"]) and equal(back["plain"], before["plain"])


def test_on_equal_devices_all_bits_are_the_same(saved):
    before, found = saved
    same(before, checkpoint.restore(found, state(mesh((2, 2)), seed=1)))


def test_what_stands_in_padding_stays_on_equal_devices_and_goes_on_others(tmp_path):
    def leaf(n):
        x = shard(np.ones(7, np.float32), mesh((n,)))
        return Shard(x.value + 1, x.shape, x.axes)

    checkpoint.save(tmp_path, 1, leaf(4), {})
    found = checkpoint.latest(tmp_path)
    same(leaf(4), checkpoint.restore(found, leaf(4)))
    for n in (3, 2, 5):
        assert (whole(checkpoint.restore(found, leaf(n))) == 2).all()


def test_a_shard_keeps_its_parts_on_their_devices():
    """No gather: each device's row is its own part."""
    x = shard(np.arange(21.0).reshape(7, 3), mesh((2, 2)))
    arrays, records = portable({"x": x})
    parts = {s.device: np.asarray(s.data) for s in arrays["x"].addressable_shards}
    for own in x.value.addressable_shards:
        np.testing.assert_array_equal(parts[own.device], np.asarray(own.data).ravel())
    assert records["x"].text == "float32[7, 3] in shards"


def test_numbers_keys_numpy_empties_and_modules(tmp_path):
    module = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    before = {
        "module": nnx.state(module),
        "numbers": [3, 2.5, True, 1j, float("inf")],
        "numpy": {"wide": np.arange(3), "one": np.float32(2), "a.b/c": np.array(1.5)},
        "empty": jnp.zeros((0, 3)),
        "keys": jax.random.split(jax.random.key(3, impl="rbg"), 2),
        "none": None,
    }
    checkpoint.save(tmp_path, 1, before, {})
    like = jax.tree.map(lambda x: x if isinstance(x, int | float | complex) else x * 0, {
        **before, "module": None, "keys": None,
    })  # fmt: skip
    other = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(5)), nnx.Dropout(0.5, rngs=nnx.Rngs(6)))
    like |= {"module": nnx.state(other), "keys": jax.random.split(jax.random.key(0, impl="rbg"), 2)}
    back = checkpoint.restore(checkpoint.latest(tmp_path), like)
    assert back["numbers"] == before["numbers"]
    assert [type(x) for x in back["numbers"]] == [int, float, bool, complex, float]
    rest = [{k: v for k, v in tree.items() if k != "numbers"} for tree in (before, back)]
    same(*rest)
    assert type(back["numpy"]["wide"]) is np.ndarray and type(back["numpy"]["one"]) is np.float32
    assert not back["empty"].committed  # as in like: free to be moved to any mesh


def test_leaves_without_elements(tmp_path):
    def leaves(n, key):
        m = mesh((n,))
        return {
            "shard": shard(np.zeros((0, 3), np.float32), m),
            "keys": jax.random.split(jax.random.key(key, impl="rbg"), 0),
            "placed": put(jax.random.split(jax.random.key(key), 0), m),
        }

    checkpoint.save(tmp_path, 1, leaves(4, 0), {})
    for n in (4, 6):
        like = leaves(n, 1)
        back = checkpoint.restore(checkpoint.latest(tmp_path), like)
        same(like, back)
        assert back["shard"].value.sharding == like["shard"].value.sharding
        assert back["placed"].sharding == like["placed"].sharding


def test_paths_that_look_alike_are_different_leaves(tmp_path):
    words = ["", "_", "%5F", "__", "a.b", "a%2Eb", "A", "a", ".", "..", "x" * 300]
    before = {word: jnp.full(2, k) for k, word in enumerate(words)}
    before |= {"q": {"": jnp.full(2, 50), "_": jnp.full(2, 51)}}
    checkpoint.save(tmp_path, 1, before, {})
    same(
        before,
        checkpoint.restore(checkpoint.latest(tmp_path), jax.tree.map(jnp.zeros_like, before)),
    )


def test_abstract_keys(tmp_path):
    m = mesh((4,))
    before = put(jax.random.split(jax.random.key(7, impl="rbg"), 4), m, "gpu")
    checkpoint.save(tmp_path, 1, before, {})
    found = checkpoint.latest(tmp_path)
    back = checkpoint.restore(found, abstract(before))
    assert equal(back, before) and back.sharding == before.sharding
    with pytest.raises(CheckpointError, match=r"key<rbg>\[4\] there, but key<fry>\[4\] here"):
        checkpoint.restore(found, jax.random.split(jax.random.key(7), 4))


def test_what_a_late_server_holds_comes_back_on_any_devices(tmp_path):
    """Gradients that wait are each rank's own: their mean is what will be applied."""
    x = np.random.default_rng(0).normal(size=(4, 24, 7)).astype(np.float32)
    params = {"w": jnp.arange(7.0), "none": jnp.zeros((0, 3)), "one": jnp.float32(1)}

    def server(n):
        plan = collc.plan(mesh((n,)), {"gpu": "native"})

        @jax.jit
        @collc.schedule(plan, batch="x")
        def step(state, x):
            def loss(params):
                return jnp.mean((x @ params["w"] + params["one"]) ** 2)

            return state.push(jax.grad(loss)(state.pull()))

        late = collc.server(plan, optax.adam(0.05), consistency=Delayed(1))
        return step, late.init(params)

    step, before = server(4)
    for batch in x[:2]:
        before = step(before, batch)
    checkpoint.save(tmp_path, 2, before, {})
    want = step(step(before, x[2]), x[3]).params
    for n in (6, 1):
        step, like = server(n)
        back = checkpoint.restore(checkpoint.latest(tmp_path), like)
        got = step(step(back, x[2]), x[3]).params
        for name in params:
            np.testing.assert_allclose(whole(got[name]), whole(want[name]), rtol=1e-5)


# Ranked leaves -----------------------------------------------------------------------------------


def ranked(x, n):
    return Ranked(put(jnp.asarray(x), mesh((n,)), "gpu"), "gpu")


def back_on(tmp_path, x, like, **options):
    checkpoint.save(tmp_path, 1, {"a": {"x": x}}, {})
    return checkpoint.restore(checkpoint.latest(tmp_path), {"a": {"x": like}}, **options)["a"]["x"]


def test_ranked_leaves_on_equal_ranks(tmp_path):
    x = ranked(np.arange(12.0, dtype=np.float32).reshape(4, 3), 4)
    same(x, back_on(tmp_path, x, ranked(np.zeros((4, 3), np.float32), 4)))


def test_ranks_are_linear_over_axes(tmp_path):
    x = ranked(np.arange(8).reshape(8), 8)
    like = Ranked(put(jnp.zeros((2, 4), int), mesh((2, 4)), "host", "gpu"), ("host", "gpu"))
    assert np.asarray(back_on(tmp_path, x, like).value).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_equal_values_stay_equal(tmp_path):
    for x in (np.full((4, 2), np.nan, np.float32), np.full(4, 3, np.int32), np.ones(4, bool)):
        back = back_on(tmp_path, ranked(x, 4), ranked(np.zeros_like(x, shape=(6, *x.shape[1:])), 6))
        assert np.asarray(back.value).tobytes() == np.repeat(x[:1], 6, 0).tobytes()


def test_the_mean_over_ranks_is_kept(tmp_path):
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    back = back_on(tmp_path, ranked(x, 4), ranked(np.zeros((8, 3), np.float32), 8))
    np.testing.assert_array_equal(back.value, np.tile(x.mean(0), (8, 1)))


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_parts_are_cut_anew(tmp_path, n):
    x = np.arange(24, dtype=np.int32).reshape(4, 3, 2)
    back = back_on(tmp_path, ranked(x, 4), ranked(np.zeros((n, 12 // n, 2), np.int32), n))
    assert np.asarray(back.value).ravel().tolist() == list(range(24))


def test_a_count_needs_a_rule(tmp_path):
    x, like = ranked(np.array([3, 1, 2, 0]), 4), ranked(np.zeros(2, int), 2)
    with pytest.raises(CheckpointError, match=r'a/x holds int32\[\] of each of 4 .*resize=\{"a/x"'):
        back_on(tmp_path, x, like)
    for rule, want in (("sum", [6, 0]), ("first", [3, 3])):
        assert np.asarray(back_on(tmp_path, x, like, resize={"a/*": rule}).value).tolist() == want


def test_rank_keys_need_a_rule(tmp_path):
    x, like = (
        Ranked(put(jax.random.split(jax.random.key(1), n), mesh((n,)), "gpu"), "gpu")
        for n in (4, 2)
    )
    first = r"""resize=\{"a/x": rule\}, where "first" gives rank 0's value to all\.$"""
    with pytest.raises(
        CheckpointError, match=rf"a/x holds random keys\[\] .* values differ.*{first}"
    ):
        back_on(tmp_path, x, like)
    with pytest.raises(CheckpointError, match=rf'no "mean" of them leads there.*{first}'):
        back_on(tmp_path, x, like, resize={"a/x": "mean"})
    back = back_on(tmp_path, x, like, resize={"a/x": "first"})
    assert (
        equal(back.value, jnp.stack([x.value[0]] * 2))
        and back.value.sharding == like.value.sharding
    )


@pytest.mark.parametrize(
    ("resize", "message"),
    [
        ({"b/*": "sum"}, r"resize names 'b/\*', but this matches no leaf\. Known: a/x\."),
        ({"w": "sum"}, "only w, which is not ranked"),
        ({"a/x": "middle"}, "no such rule"),
        ({"a/x": "sum", "a/*": "mean"}, "two rules for a/x"),
    ],
)
def test_bad_rules(tmp_path, resize, message):
    state = {"a": {"x": ranked(np.zeros(4), 4)}, "w": jnp.ones(2)}
    checkpoint.save(tmp_path, 1, state, {})
    with pytest.raises(CheckpointError, match=message):
        checkpoint.restore(checkpoint.latest(tmp_path), state, resize=resize)


def test_a_state_that_is_one_ranked_leaf(tmp_path):
    """Its path is empty: errors call it the state, and its pattern is "*"."""
    counts, ones = ranked(np.arange(4), 4), ranked(np.zeros(2, int), 2)
    checkpoint.save(tmp_path, 1, counts, {})
    found = checkpoint.latest(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"^the state holds int32\[\] .*resize=\{\"\*\": rule"
    ):
        checkpoint.restore(found, ones)
    with pytest.raises(
        CheckpointError, match=r"names 'a', but this matches no leaf\. Known: \*\.$"
    ):
        checkpoint.restore(found, ones, resize={"a": "sum"})
    with pytest.raises(
        CheckpointError, match=r"the state is int32\[\] on each rank there, but float"
    ):
        checkpoint.restore(found, ranked(np.zeros(2, np.float32), 2))
    assert checkpoint.restore(found, ones, resize={"*": "sum"}).value.tolist() == [6, 0]


def test_integers_do_not_wrap():
    """Nor does an error offer the rule that it refuses."""
    x = np.array([100, 27], np.int8)
    assert resized("x", x, (1,), "sum").tolist() == [127]
    for x in (np.array([100, 28], np.int8), np.array([2**63 - 1, 1]), np.array([7, 1], jnp.int4)):
        with pytest.raises(
            CheckpointError, match=rf"sum of x over 2 ranks is more than {x.dtype}"
        ) as e:
            resized("x", x, (3,), "sum")
        assert '"first"' in str(e.value) and '"sum"' not in str(e.value)
    with pytest.raises(CheckpointError, match='no "mean" of them leads there') as e:
        resized("x", np.array([1, 2]), (3,), "mean")
    assert '"sum" gives' in str(e.value) and '"mean" gives' not in str(e.value)


def test_ranked_variables(tmp_path):
    def module(n, value):
        bn = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
        bn.mean.set_value(put(jnp.asarray(value, jnp.float32), mesh((n,)), "gpu"))
        bn.mean.set_metadata(AXES, ("gpu",))
        return nnx.state(bn)

    checkpoint.save(tmp_path, 1, module(2, [[1, 2], [3, 6]]), {})
    back = checkpoint.restore(checkpoint.latest(tmp_path), module(4, np.zeros((4, 2))))
    assert np.asarray(back["mean"].get_value()).tolist() == [[2, 4]] * 4


def test_means_and_sums_are_rounded_once():
    """In bfloat16, 256 + 1 is 256: the sum is taken wider."""
    x = np.asarray(jnp.asarray([256] + [1] * 8, jnp.bfloat16))
    exact = Fraction(264, 9)
    for rule, want in (("mean", exact), ("sum", Fraction(264))):
        got = resized("x", x, (3,), rule)
        assert got.dtype == x.dtype and got[0] == np.asarray(float(want)).astype(x.dtype)


# Refusals ----------------------------------------------------------------------------------------


def test_another_layout_or_shape_is_refused(tmp_path):
    x = shard(np.ones((7, 3), np.float32), mesh((4,)))
    checkpoint.save(tmp_path, 1, {"w": x}, {})
    found = checkpoint.latest(tmp_path)
    for like, here in (
        (shard(np.ones((7, 4), np.float32), mesh((8,))), r"float32\[7, 4\] in shards"),
        (shard(np.ones((3, 7), np.float32), mesh((4,))), r"float32\[3, 7\] in shards"),
        (jnp.ones((7, 3)), r"float32\[7, 3\]"),
    ):
        with pytest.raises(
            CheckpointError, match=rf"w is float32\[7, 3\] in shards there, but {here} here"
        ):
            checkpoint.restore(found, {"w": like})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": "text"}}, "a/b is a str: a checkpoint holds arrays and numbers"),
        ({"a": np.array([None])}, "a is a ndarray"),
        ({"a": {"b": 1.0}, "a/b": 2.0}, "Two leaves of the state have the path 'a/b'"),
        ({"a": Ranked(np.ones(3))}, "nothing says which of its dimensions"),
    ],
)
def test_what_cannot_be_held(tmp_path, state, message):
    with pytest.raises(CheckpointError, match=message):
        checkpoint.save(tmp_path, 1, state, {})
    assert not checkpoint.steps(tmp_path)


def test_a_ranked_node_without_axes_is_known_by_its_sharding():
    x = Ranked(put(jnp.ones((2, 2, 5)), mesh((2, 2)), "host", "gpu"))
    (place,) = places({"x": x})
    assert (record(place).lay, record(place).shape) == ((2, 2), (5,))
