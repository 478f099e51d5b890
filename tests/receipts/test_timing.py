"""Calls that take turns, of functions that do what their names say."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from collc.errors import DataError, ScheduleError
from collc.language.parse import parse
from collc.language.states import COLLECTIVES
from collc.receipts.timing import USES, Repeated, compiled, in_turns, per_device, ratio

SCHEDULES = {
    "all_reduce": "ring.all_reduce @ gpu",
    "reduce_scatter": "ring.reduce_scatter @ gpu",
    "all_gather": "ring.all_gather @ gpu",
    "all_to_all": "pairwise.all_to_all @ gpu",
    "broadcast": "tree.broadcast @ gpu",
}


@pytest.fixture(scope="module")
def mesh():
    devices = jax.devices()[:4]
    kinds = (AxisType.Auto,) * 2
    return jax.make_mesh((2, 2), ("host", "gpu"), axis_types=kinds, devices=devices)


def spread(mesh, count):
    x = np.arange(count, dtype=np.float32)
    return jax.device_put(x, NamedSharding(mesh, P(mesh.axis_names)))


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_schedules_and_lax_do_the_same(mesh, collective):
    """Rank r of each group of gpu has its own data; lax and a schedule agree, NumPy with both."""
    x = spread(mesh, 4 * 6)
    own, lax_own = (
        np.asarray(compiled(per_device(collective, on), mesh, x, "fresh")(x))
        for on in (parse(SCHEDULES[collective]), ("gpu",))
    )
    np.testing.assert_array_equal(own, lax_own)
    groups = np.asarray(x).reshape(2, 2, 6)
    want = {
        "all_reduce": groups.sum(1, keepdims=True).repeat(2, 1),
        "reduce_scatter": groups.sum(1).reshape(2, 2, 3),
        "all_gather": groups.reshape(2, 1, 12).repeat(2, 1),
        "all_to_all": groups.reshape(2, 2, 2, 3).swapaxes(1, 2),
        "broadcast": groups[:, :1].repeat(2, 1),
    }
    np.testing.assert_array_equal(own, want[collective].reshape(-1))


@pytest.mark.parametrize("use", USES)
def test_uses(mesh, use):
    """A donated input is gone, an intermediate one is twice the input, and the output doubled."""
    x = spread(mesh, 8)
    given = np.asarray(x)
    y = compiled(lambda x: lax.psum(x, "gpu"), mesh, x, use)(x)
    total = given.reshape(2, 2, 2).sum(1, keepdims=True).repeat(2, 1).reshape(-1)
    np.testing.assert_array_equal(np.asarray(y), total * (4 if use == "intermediate" else 1))
    assert x.is_deleted() is (use == "donated")


def test_refusals(mesh):
    with pytest.raises(DataError, match="used fresh, donated, intermediate, not 'old'"):
        compiled(lambda x: x, mesh, spread(mesh, 4), "old")
    with pytest.raises(
        ScheduleError, match="nothing to time of a gather: all_reduce, reduce_scatter"
    ):
        per_device("gather", ("gpu",))


def test_turns():
    """All are called once in each turn, in other orders; those that warm up do not count."""
    order = []

    def call(name):
        order.append(name)
        return float(len(order))

    seconds = in_turns({n: lambda n=n: call(n) for n in "abc"}, 20, warmup=2)
    turns = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert len(turns) == 22 and {"".join(sorted(turn)) for turn in turns} == {"abc"}
    assert len(set(turns)) == 6
    at = {n: [i + 1 for i, name in enumerate(order) if name == n][2:] for n in "abc"}
    assert {n: t.tolist() for n, t in seconds.items()} == at
    assert ratio(seconds["a"], seconds["b"]) == np.median(np.divide(at["a"], at["b"]))


def test_repeated():
    """A donated value's successor is the output; otherwise it is the same value each time."""
    seen = []

    def add_one(x):
        seen.append(x)
        return x + 1

    for donated in (False, True):
        call = Repeated(add_one, np.float32(0), donated)
        assert all(call() >= 0 for _ in range(3))
    assert seen == [0, 0, 0, 0, 1, 2]
