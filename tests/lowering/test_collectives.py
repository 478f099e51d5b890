"""The public functions: what they take and what they return, compared with their lax namesakes."""

import functools
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
from collc.language.library import load

cases = load(Path(__file__).parent / "cases.py")
zoo = load(Path(__file__).parents[1] / "zoo.py")

N = 4
AR, RS, AG = "ring.all_reduce @ x", "ring.reduce_scatter @ x", "ring.all_gather @ x"
A2A, BC = "pairwise.all_to_all @ x", "tree.broadcast @ x"

equal = cases.equal
run = functools.partial(cases.run, sizes={"x": N})
trace = functools.partial(cases.trace, sizes={"x": N})


def integers(*shape, seed=0, top=100):
    return np.random.default_rng(seed).integers(1, top, (N, *shape))


# ---- pytrees, dtypes, constants -----------------------------------------------------------------


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


@functools.cache
def reduced_by_lax():
    def theirs(x):
        real = {k: v for k, v in mixed(x).items() if k in REAL}
        return (
            lax.psum(mixed(x), "x"),
            lax.pmean(mixed(x), "x"),
            lax.pmax(real, "x"),
            lax.pmin(real, "x"),
        )

    return run(theirs, integers(6))


@pytest.mark.parametrize(
    "text", [AR, "tree.double_all_reduce @ x", "server.shards(2) @ x", "native.all_reduce @ x"]
)
def test_any_pytree(text):
    def ours(x):
        real = {k: v for k, v in mixed(x).items() if k in REAL}
        return (
            collc.psum(mixed(x), text),
            collc.pmean(mixed(x), text),
            collc.pmax(real, text),
            collc.pmin(real, text),
        )

    equal(run(ours, integers(6)), reduced_by_lax())


@pytest.mark.parametrize(
    "constant",
    [
        1,
        2.5,
        True,
        np.float32(3),
        np.arange(3),
        np.array([True, False]),
        {"a": 1, "b": (2, 3.0)},
        [],
        None,
    ],
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
    truths = any(np.issubdtype(jnp.result_type(v), np.bool_) for v in jax.tree.leaves(constant))
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


# ---- dimensions ---------------------------------------------------------------------------------

BOTH = [
    *[
        (
            lambda x, d=d, t=t: collc.psum_scatter(
                x if t else x[:, :N], RS, scatter_dimension=d, tiled=t
            ),
            lambda x, d=d, t=t: lax.psum_scatter(
                x if t else x[:, :N], "x", scatter_dimension=d, tiled=t
            ),
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
        for s, c, t in (
            (0, 0, True),
            (0, 1, True),
            (1, 0, True),
            (1, 2, True),
            (0, 2, True),
            (1, 1, True),
            (1, 0, False),
            (1, 1, False),
            (1, 2, False),
        )
    ],
]


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
            for d in (0, 1)
            for k in (0, 3)
        ),
        (
            lambda x, d=d, k=k: collc.all_gather(x, AG, axis=d - k, tiled=True)
            for d in (0, 2)
            for k in (0, 3)
        ),
        (lambda x, d=d, k=k: collc.all_gather(x, AG, axis=d - k) for d in (0, 3) for k in (0, 4)),
        (
            lambda x, s=s, c=c, k=k: collc.all_to_all(x, A2A, s - k, c - k, tiled=True)
            for s, c in ((0, 2), (1, 0), (1, 2))
            for k in (0, 3)
        ),
        (
            lambda x, c=c, k=k: collc.all_to_all(x[:, :N], A2A, 1 - k, c - k)
            for c in (0, 1, 2)
            for k in (0, 3)
        ),
    ]
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
        return lambda _: {
            "f": x.astype(jnp.float32),
            "b": [x.astype(jnp.bfloat16), x[:, :0], x.T[:4]],
        }

    equal(
        run(lambda x: both(tree(x), collc, (RS, AG, A2A)), x),
        run(lambda x: both(tree(x), lax_of_trees, ("x",) * 3), x),
    )
    equal(
        run(lambda x: collc.all_gather(x[0, 0], AG), x),
        run(lambda x: lax.all_gather(x[0, 0], "x"), x),
    )


class lax_of_trees:
    """lax's psum_scatter refuses to scatter nothing."""

    @staticmethod
    def psum_scatter(tree, on, **how):
        return jax.tree.map(
            lambda x: lax.psum_scatter(x, on, **how) if x.size else x[: len(x) // N], tree
        )

    all_gather = staticmethod(lax.all_gather)
    all_to_all = staticmethod(
        lambda tree, on, s, c, tiled: jax.tree.map(
            lambda x: lax.all_to_all(x, on, s, c, tiled=tiled), tree
        )
    )


@pytest.mark.parametrize(
    "text, sizes, order",
    [
        (BC, {"x": N}, "x"),
        ("tree.broadcast.relabel(shift=1) @ x", {"x": N}, "x"),
        ("native.broadcast.relabel(order=(2, 0, 1, 3)) @ x", {"x": N}, "x"),
        ("server.broadcast @ a >> tree.broadcast @ b", {"a": 2, "b": 3}, "ab"),
        ("tree.broadcast @ (b, a)", {"a": 2, "b": 3}, "ba"),
        ("(tree.broadcast | server.broadcast) @ b >> native.broadcast @ a", {"a": 3, "b": 2}, "ab"),
    ],
)
def test_pbroadcast_from_every_source(text, sizes, order):
    n = int(np.prod([*sizes.values()]))
    x = np.arange(n * 3, dtype=np.int32).reshape(*sizes.values(), 3)
    found = run(lambda x: [collc.pbroadcast(x, text, source=s) for s in range(n)], x, sizes=sizes)
    ranks = x.transpose(*("ab".index(a) for a in order), 2).reshape(n, 3) if "x" not in order else x
    for s, y in enumerate(found):
        assert (np.asarray(y) == ranks[s]).all()


def test_plans_stand_for_schedules():
    mesh = cases.mesh_of({"a": 2, "b": 2})
    plan = collc.plan(mesh, {"a": "tree", "b": "ring"})
    x = np.arange(4 * 4 * 3, dtype=np.float32).reshape(2, 2, 4, 3)

    def ours(x):
        return (
            collc.psum(x, plan),
            collc.psum_scatter(x, plan, tiled=True),
            collc.all_gather(x, plan),
            collc.all_to_all(x, plan, tiled=True),
            collc.pbroadcast(x, plan, source=3),
        )

    def theirs(x):
        ab = ("a", "b")
        return (
            lax.psum(x, ab),
            lax.psum_scatter(x, ab, tiled=True),
            lax.all_gather(x, ab),
            lax.all_to_all(x, ab, 0, 0, tiled=True),
            lax.all_gather(x, ab)[3],
        )

    equal(run(ours, x, sizes=dict(plan.sizes)), run(theirs, x, sizes=dict(plan.sizes)))


def test_scopes_are_named():
    """So that a profiler's lines say which schedule they belong to."""
    mesh = cases.mesh_of({"a": 2, "b": 2})
    f = jax.jit(cases.on_ranks(lambda x: collc.psum(x, 'hierarchical("a", "b")'), mesh))
    text = f.lower(jnp.zeros((2, 2, 8))).compile().as_text()
    permutes = [line for line in text.splitlines() if " collective-permute" in line]
    assert permutes
    assert all(
        re.search(r'op_name="[^"]*collc/(ring|tree)\.\w+/[ab]/(\S*/)?r\d+', line)
        for line in permutes
    )


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
