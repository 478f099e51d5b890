"""What a schedule is said to ask for is what its lowering asks of lax, send by send."""

import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import collc
from collc.analysis.certificate import verify
from collc.language.library import contents, load, modules
from collc.language.parse import parse
from collc.language.states import KINDS
from collc.lowering import primitive
from collc.lowering.account import asked
from collc.lowering.sends import Asked
from collc.lowering.wire import Cast, Plain

cases = load(Path(__file__).parent / "cases.py")
zoo = load(Path(__file__).parents[1] / "zoo.py")

COMPOSITES = [
    ('hierarchical("a", "b")', {"a": 2, "b": 4}),
    ('hierarchical("a", "b").through(Pipeline(3))', {"a": 3, "b": 2}),
    ('pairwise.two_level("a", "b")', {"a": 2, "b": 4}),
    ('torus("a", "b")', {"a": 2, "b": 3}),
    ("ring.reduce_scatter @ a >> ring.reduce_scatter @ b", {"a": 2, "b": 3}),
    ("ring.all_gather @ b >> ring.all_gather @ a", {"a": 2, "b": 3}),
    ("ring.all_reduce @ (b, a)", {"a": 2, "b": 3}),
    ("tree.all_reduce @ (b, a)", {"a": 2, "b": 3, "c": 2}),
    (
        "native.reduce_scatter @ c >> tree.all_reduce @ (b, a) >> ring.all_gather @ c",
        {"a": 2, "b": 2, "c": 2},
    ),
    ("native.all_to_all @ b >> bruck.all_to_all @ a", {"a": 2, "b": 3}),
    ("ring.all_reduce @ a | tree.all_reduce @ a | native.all_reduce @ a", {"a": 5}),
    ("ring.all_reduce.relabel(order=(1, 0, 2)) @ a", {"a": 3, "b": 2}),
    ("tree.all_reduce.relabel(shift=2) @ b", {"a": 2, "b": 5}),
]


def library():
    for short, module in modules().items():
        for name, s in contents(module).items():
            if isinstance(s, collc.language.algebra.Schedule) and not s.axes:
                yield pytest.param(s, id=f"{short}.{name}")


def lowered(body, sizes, *xs):
    """What the code of the primitive asks of lax."""

    def inline(*values):
        closed = jax.make_jaxpr(body)(*values)
        (eqn,) = [e for e in closed.jaxpr.eqns if e.primitive.name == primitive.OURS]
        return primitive._code(*values, **eqn.params)

    return asked(jax.make_jaxpr(cases.on_ranks(inline, cases.mesh_of(sizes)))(*xs))


def totals(found):
    """By all that an operation is, without who asked for it."""
    total: dict[Asked, int] = {}
    for a in found:
        key = replace(a, count=None, scope="", plan=False)
        total[key] = total.get(key, 0) + (a.count or 0)
    return total


def check(schedule, sizes, shape, dtype="float32", op="sum", wire=Plain(), accumulate=None):  # noqa: B008
    certificate = verify(schedule, **sizes)
    if schedule.collective not in (KINDS["all_reduce"], KINDS["broadcast"], KINDS["reduce"]):
        ranks = certificate.schedule.axes and math.prod(sizes[a] for a in schedule.axes)
        shape = (shape[0] * ranks, *shape[1:])

    def body(x):
        return primitive.bind([x], certificate, op=op, wire=wire, accumulate=accumulate)

    x = jax.ShapeDtypeStruct((*sizes.values(), *shape), dtype)
    ours = asked(jax.make_jaxpr(cases.on_ranks(body, cases.mesh_of(sizes)))(x))
    assert all(a.plan and a.scope.startswith("collc/") for a in ours)
    theirs = lowered(body, sizes, x)
    assert not any(a.plan for a in theirs)
    assert totals(ours) == totals(theirs)
    return ours


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("schedule", list(library()))
def test_library(schedule, n):
    ours = check(schedule @ "x", {"x": n, "y": 2}, (17, 2))
    assert bool(ours) == (n > 1)


@pytest.mark.parametrize("name, sizes", COMPOSITES)
@pytest.mark.parametrize("size", [1, 24, 37])
def test_composites(name, sizes, size):
    assert check(parse(name), sizes, (size,))


def test_dtypes_on_the_wire():
    ring, sizes = parse("ring.all_reduce @ x"), {"x": 4}
    wires = {
        ("float32", Plain(), None): "f32",
        ("bfloat16", Plain(), None): "bf16",
        ("float32", Cast("bfloat16"), None): "bf16",
        ("bfloat16", Plain(), "float32"): "bf16",
        ("int32", Cast("bfloat16"), None): "s32",
    }
    for (dtype, wire, accumulate), name in wires.items():
        ours = check(ring, sizes, (16,), dtype, wire=wire, accumulate=accumulate)
        assert {a.dtype for a in ours} == {name}
    native = parse("native.all_reduce @ x")
    assert {a.dtype for a in check(native, sizes, (16,), "bfloat16", accumulate="float32")} == {
        "f32"
    }
    assert {a.kind for a in check(parse("native.reduce_scatter @ x"), sizes, (16,), op="max")} == {
        "all-to-all"
    }


def test_every_field():
    plan = parse("ring.reduce_scatter @ b >> native.all_reduce @ a >> ring.all_gather @ b")
    mesh = cases.mesh_of({"a": 2, "b": 3, "c": 1})

    def step(x, i):
        def body(c, _):
            return lax.ppermute(collc.psum(c, plan), "a", [(1, 0)]), lax.psum(c.sum(), ("b", "a"))

        y, sums = lax.scan(body, x, None, length=5)
        y = lax.while_loop(lambda v: v.sum() < 1, lambda v: lax.pmax(v, "b"), y)
        y = lax.cond(i > 0, lambda v: lax.psum(v, "a"), lambda v: v, y)
        z = jax.checkpoint(jax.jit(lambda v: lax.all_gather(v, "b")))(y)
        return lax.psum_scatter(z, "b"), sums, lax.psum(y, "c"), lax.axis_index("a")

    specs = (jax.P(), jax.P())
    jaxpr = jax.make_jaxpr(
        jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=False)
    )(jnp.zeros(6), 1)
    ring = ((0, 1), (1, 2), (2, 0))
    assert asked(jaxpr) == (
        Asked(
            "collective-permute", ("b",), ring, "f32", 2, 10, "collc/ring.reduce_scatter/b", True
        ),
        Asked("all-reduce", ("a",), None, "f32", 2, 5, "collc/native.all_reduce/a", True, "add"),
        Asked("collective-permute", ("b",), ring, "f32", 2, 10, "collc/ring.all_gather/b", True),
        Asked("collective-permute", ("a",), ((1, 0),), "f32", 6, 5, "ppermute", False),
        Asked("all-reduce", ("a", "b"), None, "f32", 1, 5, "psum", False, "add"),
        Asked("all-reduce", ("b",), None, "f32", 6, None, "pmax", False, "max"),
        Asked("all-reduce", ("a",), None, "f32", 6, 1, "psum", False, "add"),
        Asked("all-gather", ("b",), None, "f32", 18, 1, "all_gather", False),
        Asked("reduce-scatter", ("b",), None, "f32", 6, 1, "reduce_scatter", False, "add"),
    )


def test_groups_of_ranks():
    mesh = cases.mesh_of({"a": 4})

    def step(x):
        return lax.psum(x, "a", axis_index_groups=[[0, 2], [1, 3]])

    jaxpr = jax.make_jaxpr(
        jax.shard_map(step, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    )(jnp.zeros((2, 2), bool))
    assert asked(jaxpr) == (
        Asked("all-reduce", ("a",), ((0, 2), (1, 3)), "s32", 4, 1, "psum", False, "add"),
    )
