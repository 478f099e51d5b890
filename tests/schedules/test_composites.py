"""What torus.py, hierarchical.py and native.py claim, on lists of meshes."""

import math
from fractions import Fraction
from pathlib import Path

import pytest

import collc
from collc.errors import CollcError
from collc.language.library import load
from collc.language.parse import parse
from collc.schedules import hierarchical, native, ring, torus, tree

counting = load(Path(__file__).parent / "counting.py")
flat, part = counting.flat, counting.part
AXES = ("w", "x", "y", "z")
MESHES = [
    (1,), (2,), (5,), (8,),
    (1, 1), (1, 4), (4, 1), (2, 2), (2, 8), (3, 4), (4, 3), (4, 4), (5, 2),
    (2, 2, 2), (2, 3, 4), (4, 1, 3), (3, 3, 3), (4, 4, 4), (2, 2, 2, 2), (2, 3, 1, 4),
]  # fmt: skip


def on(shape):
    """The mesh of that shape."""
    return dict(zip(AXES, shape))


def ids(shape):
    return "x".join(map(str, shape))


@pytest.mark.parametrize("shape", MESHES, ids=ids)
def test_torus(shape):
    """Each rank sends 2(N - 1)/N of the buffer, and every part takes as many steps."""
    sizes = on(shape)
    schedule = torus.torus(*sizes)
    ranks, steps = math.prod(shape), sum(2 * (a - 1) for a in shape)
    c = collc.verify(schedule, **sizes)
    assert c.steps == steps and c.rounds == len(shape) * steps
    assert c.sent == c.received == c.bound.sent == part(ranks)
    assert c.depth == sum(a - 1 for a in shape)
    assert c.consistent and c.narrow
    found = flat(schedule, **sizes)
    assert found.steps == steps
    assert {*found.sent} == {*found.received} == {part(ranks)}


@pytest.mark.parametrize("shape", [(2, 2), (4, 4), (2, 2, 2), (3, 3, 3)], ids=ids)
def test_on_a_cube_every_dimension_works_all_the_time(shape):
    """In each step as much travels along one axis as along every other."""
    sizes = on(shape)
    steps = counting.along(flat(torus.torus(*sizes), **sizes), sizes)
    for step in steps:
        assert len({*step.values()}) == 1 and all(step.values())


@pytest.mark.parametrize("shape", [(2, 4), (3, 4), (5, 2), (2, 3, 4)], ids=ids)
def test_on_any_torus_all_dimensions_begin_and_end_at_once(shape):
    """Where sides differ, parts reach their next axis at different times: some axes idle between."""
    sizes = on(shape)
    steps = counting.along(flat(torus.torus(*sizes), **sizes), sizes)
    shortest = min(shape) - 1
    for step in (*steps[:shortest], *steps[-shortest:]):
        assert all(step.values())


@pytest.mark.parametrize("shape", MESHES, ids=ids)
def test_hierarchical(shape):
    """Each axis works on 1/n of the buffer of the axis inside it, whose size is n."""
    sizes = on(shape)
    schedule = hierarchical.hierarchical(*sizes)
    outermost, *inner = shape
    top = collc.verify(tree.double_all_reduce, n=outermost)
    sent, buffer, by_axis = Fraction(0), 1, {}
    for axis, size in reversed([*sizes.items()][1:]):
        by_axis[axis] = part(size, buffer)
        sent += by_axis[axis]
        buffer *= size
    c = collc.verify(schedule, **sizes)
    assert c.steps == sum(2 * (a - 1) for a in inner) + top.steps
    assert c.rounds == sum(2 * (a - 1) for a in inner) + top.rounds
    assert c.sent == sent + top.sent / buffer
    assert c.depth == sum(a - 1 for a in inner) + top.depth
    assert c.consistent and c.narrow
    found = flat(schedule, **sizes)
    assert found.steps == c.steps and max(found.sent) == c.sent
    # The trees send 2(n - 1) S of what reaches them, over all ranks; rings the same by axis.
    ranks = math.prod(shape)
    totals = {axis: ranks * share for axis, share in by_axis.items()}
    totals["w"] = Fraction(ranks * 2 * (outermost - 1), outermost * buffer)
    steps = counting.along(found, sizes)
    assert {axis: sum(step[axis] for step in steps) for axis in sizes} == totals


@pytest.mark.parametrize("m, g", [shape for shape in MESHES if len(shape) == 2])
def test_two_rings(m, g):
    """2(g - 1)/g S inside, 2(m - 1)/m S/g between: optimal as a whole."""
    rings = parse("ring.reduce_scatter @ gpu >> ring.all_reduce @ host >> ring.all_gather @ gpu")
    c = collc.verify(rings, host=m, gpu=g)
    assert c.rounds == 2 * (g - 1) + 2 * (m - 1)
    assert c.sent == part(g) + part(m, g) == part(m * g)
    steps = counting.along(flat(rings, host=m, gpu=g), {"host": m, "gpu": g})
    by_axis = {axis: sum(step[axis] for step in steps) for axis in ("host", "gpu")}
    assert by_axis == {"host": m * g * part(m, g), "gpu": m * g * part(g)}


def test_one_axis_is_no_composite():
    assert torus.torus("x") == ring.all_reduce @ "x"
    assert hierarchical.hierarchical("x") == tree.double_all_reduce @ "x"


@pytest.mark.parametrize("family, axes", [
    (torus.torus, ()), (torus.torus, ("x", "x")),
    (hierarchical.hierarchical, ()), (hierarchical.hierarchical, ("x", "x")),
])  # fmt: skip
def test_no_axis_and_one_axis_twice(family, axes):
    with pytest.raises(CollcError):
        _ = family(*axes).type


@pytest.mark.parametrize("kind", [
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast",
])  # fmt: skip
def test_native_is_trusted_and_goes_flat_over_several_axes(kind):
    leaf = getattr(native, kind)
    for placed in (leaf @ "w", leaf @ ("w", "x"), leaf @ ("y", "w", "x")):
        c = collc.verify(placed, w=2, x=3, y=4)
        assert (c.steps, c.rounds) == (1, 0)
        assert c.trusted and c.sent is c.depth is c.consistent is None
        assert c.bound is not None
        assert parse(str(placed)) == placed
