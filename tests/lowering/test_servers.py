"""Rows between all ranks and the first k: exact against NumPy, in one message, and each other's dual."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import collc
from collc.errors import DataError, MeshError, ScheduleError
from collc.language.library import load
from collc.lowering.primitive import bind
from collc.lowering.servers import pull, push
from collc.lowering.wire import Plain
from collc.schedules import servers

cases = load(Path(__file__).parent / "cases.py")

MESHES = [{"x": n} for n in (1, 2, 3, 4, 8)] + [{"x": 2, "y": 3}, {"x": 1, "y": 2, "z": 2}]
SHAPES = ((3,), (2, 3), ())  # of a row
DTYPES = ("float32", "float32", "int32")


def leaves(n: int, *lead: int) -> list[np.ndarray]:
    """A number for each rank and place that no other has, [n, lead..., shape...] for each shape."""
    return [
        cases.tell_tale("reduce", "sum", dtype, n, (*lead, *shape), i)
        for i, (shape, dtype) in enumerate(zip(SHAPES, DTYPES, strict=True))
    ]


def on_mesh(body, xs, sizes):
    """``body`` of arrays [n, ...] on a mesh, and back to [n, ...]."""
    mesh = tuple(sizes.values())
    out = cases.run(body, [x.reshape(*mesh, *x.shape[1:]) for x in xs], sizes=sizes)
    return [np.asarray(y).reshape(-1, *y.shape[len(mesh) :]) for y in out]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_rows_are_those_of_numpy(sizes):
    n, axes = int(np.prod([*sizes.values()])), tuple(sizes)
    # One program for all k: to compile it takes longest.
    rows = {k: leaves(n, k) for k in range(1, n + 1)}
    own = leaves(n)

    def body(xs):
        own, *each = (xs[i : i + len(SHAPES)] for i in range(0, len(xs), len(SHAPES)))
        done = []
        for k, mine in zip(rows, each, strict=True):
            done += push(mine, axes, k, op="sum") + pull(own, axes, k) + push(mine[:2], axes, k)
        return done

    out = iter(on_mesh(body, [*own, *(x for xs in rows.values() for x in xs)], sizes))
    for k, xs in rows.items():
        for x in xs:
            want = np.zeros((n, *x.shape[2:]), x.dtype)
            want[:k] = x.sum(axis=0, dtype=x.dtype)
            np.testing.assert_array_equal(next(out), want)
        for x in own:
            np.testing.assert_array_equal(next(out), np.stack([x[:k]] * n))
        for x in xs[:2]:
            want = np.zeros((n, *x.shape[2:]), x.dtype)
            want[:k] = x.sum(axis=0) / n
            # XLA multiplies by 1/n, which is rounded too.
            np.testing.assert_allclose(next(out), want, rtol=2**-23)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_transpose_of_pull_is_push(k):
    n, sizes = 4, {"x": 2, "y": 2}
    axes, (weights, *_) = tuple(sizes), leaves(n, k)
    (x, *_) = leaves(n)

    def body(xs):
        x, w = xs
        _, back = jax.vjp(lambda x: pull([x, x[:1]], axes, k), x)
        (ct,) = back([w, w[:, :1]])
        extra = w.at[:, :1].add(w[:, :1])
        (want,) = push([extra], axes, k, op="sum")
        _, there = jax.vjp(lambda w: push([w], axes, k, op="sum"), w)
        return [ct, want, *there([x]), *pull([x], axes, k)]

    ct, want, there, rows = on_mesh(body, [x, weights], sizes)
    np.testing.assert_array_equal(ct, want)
    assert (ct[k:] == 0).all() and (ct[:k] != 0).all()
    np.testing.assert_array_equal(there, rows)


def test_the_gradient_at_a_server_is_that_of_its_row_also_when_it_is_cut_short():
    """A broadcast of 5 from 2 roots: 3 from rank 0, 2 from rank 1, in slices of its own."""
    certificate = collc.verify(collc.parse("servers.pull(2).through(Pipeline(2)) @ x"), x=3)
    x = cases.tell_tale("broadcast", "sum", "float32", 3, (5,))

    def body(x):
        y, back = jax.vjp(
            lambda x: bind([x], certificate, op="sum", wire=Plain(), drop=False)[0], x
        )
        return [y, *back(jnp.ones(5))]

    y, ct = cases.run(body, x, sizes={"x": 3})
    np.testing.assert_array_equal(y, [np.concatenate([x[0, :3], x[1, 3:]])] * 3)
    np.testing.assert_array_equal(ct, [[3, 3, 3, 0, 0], [0, 0, 0, 3, 3], [0] * 5])


def test_leaves_of_one_dtype_are_one_message_and_sums_may_be_wider():
    xs = [
        jax.ShapeDtypeStruct((4, 2, *s), d) for s in ((3,), (5, 2)) for d in ("bfloat16", "int32")
    ]

    def body(*xs):
        return pull(push(xs, ("x",), 2, op="sum", accumulate="float32"), ("x",), 2)

    bound = str(jax.make_jaxpr(cases.on_ranks(body, cases.mesh_of({"x": 4})))(*xs))
    assert bound.count("collc_collective[") == 2  # each of two operands, one for each dtype
    half = np.full((4, 1, 1), 1 / 256, "bfloat16")
    half[0] = 1  # in bfloat16 each 1/256 that is added to 1 is lost

    def wide(x):
        return push([x], ("x",), 1, op="sum", accumulate="float32")[0]

    assert cases.run(wide, half, sizes={"x": 4})[0] == np.float32(1 + 3 / 256).astype("bfloat16")


X = jnp.zeros((2, 3))


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: push([X], ("x",), 3), DataError, "shape (2, 3) has to have 3 rows"),
        (lambda: push([X], ("x",), 2, op="max"), DataError, "op is 'mean' or 'sum', not 'max'"),
        (lambda: push([X.astype(int)], ("x",), 2), DataError, "Say op='sum'"),
        (lambda: push([jnp.zeros((5, 1))], ("x",), 5), ScheduleError, "5 roots need as many ranks"),
        (
            lambda: pull([X], ("x",), 5),
            ScheduleError,
            "5 roots need as many ranks, and there are 4",
        ),
        (
            lambda: pull([X], ("z",), 2),
            MeshError,
            "placed on 'z', which the mesh here does not have",
        ),
    ],
)
def test_refused(call, error, words):
    with pytest.raises(error) as caught:
        cases.trace(lambda x: call(), jnp.zeros(4), sizes={"x": 4})
    assert words in str(caught.value)


def test_a_broadcast_takes_one_root():
    mesh = jax.make_mesh((4,), ("x",), (AxisType.Auto,), devices=jax.devices()[:4])
    many = servers.pull(2) @ "x"

    def body(x):
        return collc.pbroadcast(x, many)

    wrapped = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    with pytest.raises(ScheduleError, match="begins at 2 roots, none of which has the whole"):
        jax.eval_shape(wrapped, jnp.arange(8.0))
