"""The public functions: what they take, what they return, what they refuse, in which dtypes they add."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import collc
from collc import language as cl
from collc.analysis.certificate import verify
from collc.analysis.reference import flatten
from collc.analysis.rounds import colours
from collc.errors import DataError, MeshError, PlanError, ScheduleError
from collc.language.library import load
from collc.language.parse import parse

cases = load(Path(__file__).parent / "cases.py")
zoo = load(Path(__file__).parents[1] / "zoo.py")

N = 4
AR, RS, AG = "ring.all_reduce @ x", "ring.reduce_scatter @ x", "ring.all_gather @ x"
A2A, BC = "pairwise.all_to_all @ x", "tree.broadcast @ x"


def run(body, *xs, sizes=None, check_vma=False):
    """``body`` of each rank's part of arrays [N, ...]; its results are stacked to [N, ...]."""
    mesh = cases.mesh_of(sizes or {"x": N})
    return cases.quick(cases.on_ranks(body, mesh, check_vma=check_vma))(*xs)


def trace(body, *xs, sizes=None):
    return jax.eval_shape(cases.on_ranks(body, cases.mesh_of(sizes or {"x": N})), *xs)


def equal(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(a.astype(np.complex128), b.astype(np.complex128))


def integers(*shape, seed=0, top=100):
    return np.random.default_rng(seed).integers(1, top, (N, *shape))


# ---- pytrees, dtypes, constants -----------------------------------------------------------------------


def mixed(x):
    """A pytree of all sorts, of a rank's integers [6]."""
    return {
        "f32": x.astype(jnp.float32),
        "bf16": (x % 16).astype(jnp.bfloat16).reshape(2, 3),
        "f16": (x % 16).astype(jnp.float16),
        "i32": (x, [x[0], x[:0]]),
        "i8": (x % 8).astype(jnp.int8),
        "u32": x.astype(jnp.uint32),
        "bool": x > 50,
        "c64": (x + 1j * x[::-1]).astype(jnp.complex64),
        "empty": jnp.zeros((0, 3), jnp.float32),
        "numpy": np.arange(3, dtype=np.int32),
        "python": (2, 0.5),
        "none": None,
    }


REAL = ("f32", "bf16", "f16", "i32", "i8", "u32", "bool", "empty", "numpy", "python")


@pytest.mark.parametrize("text", [AR, "tree.double_all_reduce @ x", "server.shards(2) @ x", "native.all_reduce @ x"])
def test_any_pytree(text):
    def ours(x):
        real = {k: v for k, v in mixed(x).items() if k in REAL}
        return collc.psum(mixed(x), text), collc.pmean(mixed(x), text), collc.pmax(real, text), collc.pmin(real, text)

    def theirs(x):
        real = {k: v for k, v in mixed(x).items() if k in REAL}
        return lax.psum(mixed(x), "x"), lax.pmean(mixed(x), "x"), lax.pmax(real, "x"), lax.pmin(real, "x")

    x = integers(6)
    equal(run(ours, x), run(theirs, x))


@pytest.mark.parametrize(
    "constant",
    [1, 2.5, True, np.float32(3), np.arange(3), np.array([True, False]), {"a": 1, "b": (2, 3.0)}, [], None],
    ids=str,
)
def test_constants_are_not_sent(constant):
    """As in lax, where psum(1) is the number of ranks, and a Python number."""
    seen = {}

    def body(x):
        for name, ours, theirs in (
            ("psum", collc.psum, lax.psum), ("pmean", collc.pmean, lax.pmean),
            ("pmax", collc.pmax, lax.pmax), ("pmin", collc.pmin, lax.pmin),
        ):  # fmt: skip
            seen[name] = ours(constant, AR), theirs(constant, "x")
        return x

    jaxpr = str(jax.make_jaxpr(cases.on_ranks(body, cases.mesh_of({"x": N})))(integers(2)))
    truths = any(jnp.result_type(v) == bool for v in jax.tree.leaves(constant))
    assert ("collc_collective" in jaxpr) == truths  # of those lax makes numbers, which it sends
    for ours, theirs in seen.values():
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            if isinstance(b, jax.core.Tracer):  # lax does send a constant's maximum
                assert (np.shape(a), jnp.result_type(a)) == (b.shape, b.dtype)
            else:
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
                assert np.asarray(a).dtype == np.asarray(b).dtype


def test_constants_beside_values():
    x = integers(3)
    equal(
        run(lambda x: collc.psum((x, 1, np.float32(2)), AR), x),
        run(lambda x: lax.psum((x, 1, np.float32(2)), "x"), x),
    )


# ---- dimensions ---------------------------------------------------------------------------------------

BOTH = [
    *[
        (
            lambda x, d=d, t=t: collc.psum_scatter(x if t else x[:, :N], RS, scatter_dimension=d, tiled=t),
            lambda x, d=d, t=t: lax.psum_scatter(x if t else x[:, :N], "x", scatter_dimension=d, tiled=t),
        )
        for d, t in ((0, True), (1, True), (1, False))
    ],
    *[
        (
            lambda x, a=a, t=t: collc.all_gather(x, AG, axis=a, tiled=t),
            lambda x, a=a, t=t: lax.all_gather(x, "x", axis=a, tiled=t),
        )
        for a, t in ((0, False), (2, False), (3, False), (0, True), (1, True), (2, True))
    ],
    *[
        (
            lambda x, s=s, c=c, t=t: collc.all_to_all(x if t else x[:, :N], A2A, s, c, tiled=t),
            lambda x, s=s, c=c, t=t: lax.all_to_all(x if t else x[:, :N], "x", s, c, tiled=t),
        )
        for s, c, t in ((0, 0, True), (0, 1, True), (1, 0, True), (1, 2, True), (0, 2, True), (1, 1, True),
                        (1, 0, False), (1, 1, False), (1, 2, False))
    ],
]  # fmt: skip


def test_other_dimensions():
    """All forms in one compilation: [4, 8, 3] on a rank."""
    x = integers(4, 8, 3, top=1 << 16).astype(np.float32)
    equal(run(lambda x: [f(x) for f, _ in BOTH], x), run(lambda x: [g(x) for _, g in BOTH], x))


def test_negative_dimensions():
    """As NumPy counts them; lax refuses some."""
    x = integers(4, 8, 3).astype(np.float32)
    forms = [
        (
            lambda x, d=d, k=k: collc.psum_scatter(x, RS, scatter_dimension=d - k, tiled=True)
            for d in (0, 1) for k in (0, 3)
        ),
        (lambda x, d=d, k=k: collc.all_gather(x, AG, axis=d - k, tiled=True) for d in (0, 2) for k in (0, 3)),
        (lambda x, d=d, k=k: collc.all_gather(x, AG, axis=d - k) for d in (0, 3) for k in (0, 4)),
        (
            lambda x, s=s, c=c, k=k: collc.all_to_all(x, A2A, s - k, c - k, tiled=True)
            for s, c in ((0, 2), (1, 0), (1, 2)) for k in (0, 3)
        ),
        (lambda x, c=c, k=k: collc.all_to_all(x[:, :N], A2A, 1 - k, c - k) for c in (0, 1, 2) for k in (0, 3)),
    ]  # fmt: skip
    forms = [list(form) for form in forms]
    for found in run(lambda x: [[f(x) for f in form] for form in forms], x):
        for positive, negative in zip(found[::2], found[1::2], strict=True):
            equal(positive, negative)


def test_pytrees_move_together():
    x = integers(4, 8)

    def both(tree, library, on):
        return (
            library.psum_scatter(tree(0), on[0], scatter_dimension=0, tiled=True),
            library.all_gather(tree(3), on[1], axis=0, tiled=False),
            library.all_to_all(tree(0), on[2], 0, 0, tiled=True),
        )

    def tree(x):
        return lambda _: {"f": x.astype(jnp.float32), "b": [x.astype(jnp.bfloat16), x[:, :0], x.T[:4]]}

    equal(
        run(lambda x: both(tree(x), collc, (RS, AG, A2A)), x),
        run(lambda x: both(tree(x), lax_of_trees, ("x",) * 3), x),
    )
    equal(run(lambda x: collc.all_gather(x[0, 0], AG), x), run(lambda x: lax.all_gather(x[0, 0], "x"), x))


class lax_of_trees:
    """lax's psum_scatter refuses to scatter nothing."""

    @staticmethod
    def psum_scatter(tree, on, **how):
        return jax.tree.map(lambda x: lax.psum_scatter(x, on, **how) if x.size else x[: len(x) // N], tree)

    all_gather = staticmethod(lax.all_gather)
    all_to_all = staticmethod(lambda tree, on, s, c, tiled: jax.tree.map(lambda x: lax.all_to_all(x, on, s, c, tiled=tiled), tree))


@pytest.mark.parametrize(
    "text, sizes, order",
    [
        (BC, {"x": N}, "x"),
        ("tree.broadcast.relabel(shift=1) @ x", {"x": N}, "x"),
        ("native.broadcast.relabel(order=(2, 0, 1, 3)) @ x", {"x": N}, "x"),
        ("server.pull @ a >> tree.broadcast @ b", {"a": 2, "b": 3}, "ab"),
        ("tree.broadcast @ (b, a)", {"a": 2, "b": 3}, "ba"),
        ("(tree.broadcast | server.pull) @ b >> native.broadcast @ a", {"a": 3, "b": 2}, "ab"),
    ],
)
def test_pbroadcast_from_every_source(text, sizes, order):
    n = int(np.prod([*sizes.values()]))
    x = np.arange(n * 3, dtype=np.int32).reshape(*sizes.values(), 3)
    found = run(lambda x: [collc.pbroadcast(x, text, source=s) for s in range(n)], x, sizes=sizes)
    ranks = x.transpose(*("ab".index(a) for a in order), 2).reshape(n, 3) if "x" not in order else x
    for s, y in enumerate(found):
        assert (np.asarray(y) == ranks[s]).all()


# ---- what travels and what is accumulated ---------------------------------------------------------------


def model(text, sizes, x, wire):
    """The sums of x [ranks, size] in float32 where what travels is rounded to ``wire``, in NumPy."""
    program = flatten(parse(text), sizes)
    x = x.reshape(program.n, -1)
    piece = -(-x.shape[1] // program.cells)
    held = np.zeros((program.n, program.cells * piece), np.float32)
    held[:, : x.shape[1]] = x
    held = held.reshape(program.n, program.cells, piece)
    for step in program.dense_steps():
        sent = held[step.src, step.chunk].astype(wire).astype(np.float32)
        out = ~step.add
        held[step.src[out], step.chunk[out]] = sent[out]  # all replicas have the value that was sent
        colour = colours(program, step)
        for k in range(int(colour.max(initial=-1)) + 1):
            now = (colour == k) & step.add
            np.add.at(held, (step.dst[now], step.chunk[now]), sent[now])
        held[step.dst[out], step.chunk[out]] = sent[out]
    return held.reshape(program.n, -1)[:, : x.shape[1]]


NARROW = [
    (AR, {"x": 5}),
    ("tree.all_reduce @ x", {"x": 6}),
    ("tree.double_all_reduce @ x", {"x": 8}),
    ("server.shards(2) @ x", {"x": 4}),
    ("server.star.relabel(shift=1) @ x", {"x": 4}),
    ("ring.all_reduce.relabel(order=(2, 0, 1, 3)) @ x", {"x": 4}),
    ('hierarchical("a", "b")', {"a": 2, "b": 4}),
    ("ring.all_reduce @ b >> tree.all_reduce @ a", {"a": 3, "b": 2}),
]


@pytest.mark.parametrize("text, sizes", NARROW)
def test_sums_wider_than_what_travels(text, sizes):
    n = int(np.prod([*sizes.values()]))
    size = 240  # every chunk is whole, so that the model's cells are the device's
    x = np.random.default_rng(0).normal(size=(n, size)).astype(np.float32)
    narrow = x.astype(jnp.bfloat16)

    def body(x, narrow):
        return (
            collc.psum(x, text, wire="bfloat16"),
            collc.psum(narrow, text, accumulate=jnp.float32),
            collc.psum(narrow, text),
            collc.pmean(narrow, text, accumulate="float32"),
        )

    shaped = [v.reshape(*sizes.values(), size) for v in (x, narrow)]
    found = run(body, *shaped, sizes=sizes)
    wire, kept, plain, mean = (np.asarray(y).reshape(n, size) for y in found)
    for y in (wire, kept, plain, mean):
        assert (y == y[0]).all()  # bit for bit
    np.testing.assert_array_equal(wire, model(text, sizes, x, jnp.bfloat16))
    total = model(text, sizes, narrow.astype(np.float32), jnp.bfloat16)
    assert kept.dtype == jnp.bfloat16
    np.testing.assert_array_equal(kept, total.astype(jnp.bfloat16))
    np.testing.assert_array_equal(mean, (total / n).astype(jnp.bfloat16))
    # To add in float32 and to round what travels is nearer to the truth than to add in bfloat16.
    truth = narrow.astype(np.float64).sum(0)
    assert np.abs(kept[0] - truth).mean() <= np.abs(plain[0] - truth).mean()


def test_the_lowered_text_shows_both_dtypes():
    def text(body, dtype):
        mesh = cases.mesh_of({"x": N})
        return jax.jit(cases.on_ranks(body, mesh)).lower(jnp.zeros((N, 8), dtype)).as_text()

    def dtypes(op, text):
        # Greedy: the type of the operation stands last, after the types of its attributes.
        return set(re.findall(rf"stablehlo\.{op}.* : \(?tensor<(?:\d+x)*(\w+)>", text))

    kept = text(lambda x: collc.psum(x, AR, accumulate=jnp.float32), jnp.bfloat16)
    assert dtypes("collective_permute", kept) == {"bf16"}
    assert "f32" in dtypes("add", kept) and "bf16" not in dtypes("add", kept)
    wire = text(lambda x: collc.psum(x, AR, wire="bfloat16"), jnp.float32)
    assert dtypes("collective_permute", wire) == {"bf16"}
    assert "bf16" not in dtypes("add", wire)
    plain = text(lambda x: collc.psum(x, AR), jnp.bfloat16)
    assert dtypes("collective_permute", plain) == {"bf16"}
    assert "bf16" in dtypes("add", plain) and "f32" not in dtypes("add", plain)


def test_psum_scatter_accumulates():
    x = np.random.default_rng(1).normal(size=(N, 8)).astype(jnp.bfloat16)
    y = run(lambda x: collc.psum_scatter(x, RS, tiled=True, accumulate="float32"), x)
    whole = np.zeros((N, 2), np.float32)
    for c in range(N):  # chunk c sets out from rank c + 1
        total = x[(c + 1) % N, 2 * c : 2 * c + 2].astype(np.float32)
        for t in range(1, N):
            own = x[(c + 1 + t) % N, 2 * c : 2 * c + 2].astype(np.float32)
            total = own + total.astype(jnp.bfloat16).astype(np.float32)
        whole[c] = total
    np.testing.assert_array_equal(np.asarray(y), whole.astype(jnp.bfloat16))


def test_other_dtypes_are_left_alone():
    """Integers and complex numbers are neither rounded nor made real by accumulate= and wire=."""
    x = integers(6, top=1 << 26)

    def tree(x):
        return {"i": x, "c": (x % 1000 + 2j * (x % 777)).astype(jnp.complex64), "h": (x % 3).astype(jnp.bfloat16)}

    plain = run(lambda x: lax.psum(tree(x), "x"), x)
    equal(run(lambda x: collc.psum(tree(x), AR, accumulate="float32"), x), plain)
    equal(run(lambda x: collc.psum(tree(x), AR, wire="bfloat16"), x), plain)
    equal(run(lambda x: collc.psum(tree(x), AR, wire="float32"), x), plain)


@pytest.mark.parametrize("name", ["one_shot", "doubling"])
def test_replicas_that_would_drift_apart_are_refused(name):
    schedule = getattr(zoo, name) @ "x"
    found = verify(schedule, x=N)
    assert (found.consistent, found.narrow) == (name == "doubling", False)
    with pytest.raises(ScheduleError, match=r"collc.psum: zoo.*different orders.*consistent: yes"):
        trace(lambda x: collc.psum(x, schedule, **({} if name == "one_shot" else {"wire": "bfloat16"})), integers(2))
    if name == "doubling":
        trace(lambda x: collc.psum(x, schedule), integers(2))
        with pytest.raises(ScheduleError, match="sums kept wider than what travels"):
            trace(lambda x: collc.psum(x, schedule, accumulate="float32"), integers(2))


def test_one_shot_of_one():
    @cl.all_reduce
    def shout(n):
        r, t = cl.ranks(n)[None, :], cl.ranks(n)[1:, None]
        yield cl.add(cl.ALL, r, (r + t) % n)

    with pytest.raises(ScheduleError, match="drift apart"):
        trace(lambda x: collc.pmean(x, shout @ "x"), integers(2))
    trace(lambda x: collc.psum(x, shout @ "x"), integers(2)[:1], sizes={"x": 1})


# ---- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, words, body",
    [
        (MeshError, "collc.psum: ring.all_reduce @ xx is placed on 'xx'.*Did you mean x?",
         lambda x: collc.psum(x, "ring.all_reduce @ xx")),
        (ScheduleError, "collc.psum: place the schedule on an axis: ring.all_reduce @",
         lambda x: collc.psum(x, parse("ring.all_reduce"))),
        (ScheduleError, "collc.psum needs partial -> replica.*ring.reduce_scatter @ x is",
         lambda x: collc.psum(x, RS)),
        (ScheduleError, "collc.all_gather needs shard -> replica", lambda x: collc.all_gather(x, AR)),
        (ScheduleError, "no schedule 'ring.al_reduce'. Did you mean ring.all_reduce",
         lambda x: collc.psum(x, "ring.al_reduce @ x")),
        (PlanError, "collc.psum: no plan here", lambda x: collc.psum(x)),
        (PlanError, "collc.psum: no plan here", lambda x: collc.psum(x, "x")),
        (DataError, r"collc.psum_scatter: dimension 0 of shape \(6,\) does not divide over 4 ranks. Pad it to 8",
         lambda x: collc.psum_scatter(x, RS, tiled=True)),
        (DataError, r"dimension 0 of shape \(6,\) has to be 4, one for each rank; or say tiled=True",
         lambda x: collc.psum_scatter(x, RS)),
        (DataError, r"collc.all_to_all: dimension 0 of shape \(6,\)", lambda x: collc.all_to_all(x, A2A, tiled=True)),
        (DataError, "collc.psum_scatter: a scalar has no dimension to split over 4 ranks",
         lambda x: collc.psum_scatter(x[0], RS)),
        (DataError, "collc.all_to_all: a scalar", lambda x: collc.all_to_all(x[0], A2A)),
        (DataError, r"collc.all_gather: a value of shape \(\) has no dimension 0",
         lambda x: collc.all_gather(x[0], AG, tiled=True)),
        (DataError, r"collc.all_gather: a value of shape \(4, 6\) has no dimension 2",
         lambda x: collc.all_gather(x, AG, axis=2)),
        (DataError, r"collc.psum_scatter: a value of shape \(6,\) has no dimension 1",
         lambda x: collc.psum_scatter(x, RS, scatter_dimension=1)),
        (DataError, r"collc.all_to_all: a value of shape \(4,\) has no dimension -2",
         lambda x: collc.all_to_all(x[:4], A2A, 0, -2)),
        (DataError, "all_gather: to is 'varying' or 'invarying', not 'same'",
         lambda x: collc.all_gather(x, AG, to="same")),
        (DataError, "source is one of the ranks 0 to 3, not 4", lambda x: collc.pbroadcast(x, BC, source=4)),
        (DataError, "source is one of the ranks 0 to 3, not -1", lambda x: collc.pbroadcast(x, BC, source=-1)),
        (DataError, "source is one of the ranks 0 to 3, not 0.0", lambda x: collc.pbroadcast(x, BC, source=0.0)),
        (DataError, "specs= has no effect here", lambda x: collc.psum(x, AR, specs=P())),
        (DataError, "accumulate= takes a floating-point dtype, not 'int32'",
         lambda x: collc.psum(x, AR, accumulate="int32")),
        (DataError, "wire= takes a floating-point dtype, not 'bf17'", lambda x: collc.psum(x, AR, wire="bf17")),
        (ScheduleError, "wire= has no effect on native.all_reduce",
         lambda x: collc.psum(x, "native.all_reduce @ x", wire="bfloat16")),
    ],
)  # fmt: skip
def test_refusals(error, words, body):
    with pytest.raises(error, match=words):
        trace(body, jnp.zeros((N, 6)))


def test_outside_of_shard_map():
    with pytest.raises(MeshError, match="It runs inside jax.shard_map"):
        collc.psum(jnp.ones(3), AR)


def test_an_axis_that_is_not_manual():
    mesh = cases.mesh_of({"x": 2, "y": 2})
    f = jax.shard_map(
        lambda x: collc.psum(x, "ring.all_reduce @ y"),
        mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}, check_vma=False,
    )  # fmt: skip
    with pytest.raises(MeshError, match="'y' is an automatic axis here. Name it in axis_names="):
        jax.eval_shape(f, jnp.ones(4))


def test_plans_stand_for_schedules():
    mesh = cases.mesh_of({"a": 2, "b": 2})
    plan = collc.plan(mesh, {"a": "tree", "b": "ring"})
    x = np.arange(4 * 4 * 3, dtype=np.float32).reshape(2, 2, 4, 3)

    def ours(x):
        return (
            collc.psum(x, plan), collc.psum_scatter(x, plan, tiled=True), collc.all_gather(x, plan),
            collc.all_to_all(x, plan, tiled=True), collc.pbroadcast(x, plan, source=3),
        )  # fmt: skip

    def theirs(x):
        ab = ("a", "b")
        return (
            lax.psum(x, ab), lax.psum_scatter(x, ab, tiled=True), lax.all_gather(x, ab),
            lax.all_to_all(x, ab, 0, 0, tiled=True), lax.all_gather(x, ab)[3],
        )  # fmt: skip

    equal(run(ours, x, sizes=dict(plan.sizes)), run(theirs, x, sizes=dict(plan.sizes)))


def test_scopes_are_named():
    """So that a profiler's lines say which schedule they belong to."""
    mesh = cases.mesh_of({"a": 2, "b": 2})
    f = jax.jit(cases.on_ranks(lambda x: collc.psum(x, 'hierarchical("a", "b")'), mesh))
    text = f.lower(jnp.zeros((2, 2, 8))).compile().as_text()
    permutes = [line for line in text.splitlines() if " collective-permute" in line]
    assert permutes
    assert all(re.search(r'op_name="[^"]*collc/(ring|tree)\.\w+/[ab]/', line) for line in permutes)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_kinds_of_mesh(kind):
    mesh = cases.mesh_of({"x": N}, kind)
    x = integers(5).astype(np.float32)
    placed = jax.device_put(x, NamedSharding(mesh, P("x")))
    found = jax.jit(cases.on_ranks(lambda x: collc.psum(x, AR), mesh))(placed)
    np.testing.assert_array_equal(np.asarray(found), np.stack([x.sum(0)] * N))


def test_no_scope_leaks():
    """Parts that take turns do not name each other, nor what comes after."""
    mesh = cases.mesh_of({"x": N})
    two = f"{AR} | ring.all_reduce.reversed() @ x"
    f = jax.jit(cases.on_ranks(lambda x: jnp.sin(collc.psum(x, two)), mesh))
    text = f.lower(jnp.zeros((N, 8))).compile().as_text()
    names = re.findall(r'op_name="([^"]*)"', text)
    assert any(name.endswith("/sin") for name in names)
    assert all(name.count("collc/") <= 1 for name in names)
    assert not any("collc/" in name for name in names if name.endswith("/sin"))
    scopes = {m[1] for name in names if (m := re.search(r"(collc/[^/]*)/x/.*ppermute", name))}
    assert len(scopes) == 4
    after = jax.jit(lambda x: jnp.cos(x)).lower(jnp.zeros(3)).as_text(debug_info=True)
    assert "collc/" not in after
