"""The oracle against NumPy one-liners, and the geometry of composites against lax's chunk order."""

import ml_dtypes
import numpy as np
import pytest

from collc.analysis.proof import prove
from collc.analysis.reference import collective, flat_cells, flatten, poison, run
from collc.errors import DataError, MeshError, ScheduleError
from collc.language.parse import parse

DTYPES = [np.int32, np.int64, np.uint8, np.float32, np.float64, ml_dtypes.bfloat16]


def tell_tale(n: int, cells: int) -> np.ndarray:
    """A different integer for each (rank, cell), whose sums differ too."""
    return np.random.default_rng(n).integers(0, 1 << 40, (n, cells))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_a_program_on_data(dtype, op):
    program = flatten(parse("ring.all_reduce"), {"": 4})
    data = (np.arange(4 * 4 * 2).reshape(4, 4, 2) % 7).astype(dtype)
    out = run(program, data, op)
    assert out.dtype == dtype
    want = collective("all_reduce", data, op)
    np.testing.assert_array_equal(out, want)
    assert (data == (np.arange(32).reshape(4, 4, 2) % 7).astype(dtype)).all()  # left as it was


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_held_is_poisoned(dtype):
    """Rank 1's chunk 0 is not used, so it may hold anything; an unfinished one shows."""
    program = flatten(parse("server.broadcast"), {"": 3})
    data = np.ones((3, 1), dtype)
    assert (run(program, data)[program.ends] == 1).all()
    cut = type(program)(program.name, program.kind, 3, 1, program.steps[:0])
    out = run(cut, data)
    assert out[0, 0] == 1
    rest = out[1:].astype(np.float64)
    assert (np.isnan(rest) if np.dtype(dtype).kind not in "iu" else rest > 80).all()
    assert poison(dtype).dtype == dtype


def test_own_value_first_then_in_the_order_of_the_rounds():
    """1e8 + 1 - 1e8 in float32 tells the orders apart."""
    program = flatten(parse("server.reduce"), {"": 4})
    data = np.array([[1e8], [1], [-1e8], [1]], np.float32)
    assert run(program, data)[0, 0] == np.float32(1e8) + np.float32(1) - np.float32(1e8) + 1 == 1


def test_data_that_does_not_fit():
    program = flatten(parse("ring.all_reduce"), {"": 4})
    with pytest.raises(DataError, match=r"needed is \[4, 4, ...\]"):
        run(program, np.zeros((4, 3)))
    with pytest.raises(DataError, match=r"no operation 'avg'. Known: max, min, sum."):
        run(program, np.zeros((4, 4)), op="avg")


def test_collectives():
    n = 3
    x = np.arange(n * 6 * 2).reshape(n, 6, 2)
    total = x[0] + x[1] + x[2]
    assert (collective("all_reduce", x) == total).all()
    np.testing.assert_array_equal(collective("all_reduce", x, "mean"), np.stack([total / 3] * 3))
    np.testing.assert_array_equal(collective("all_reduce", x, "max"), np.stack([x.max(0)] * 3))
    np.testing.assert_array_equal(collective("reduce_scatter", x), total.reshape(3, 2, 2))
    np.testing.assert_array_equal(collective("all_gather", x), np.stack([x.reshape(18, 2)] * 3))
    swapped = x.reshape(3, 3, 2, 2).swapaxes(0, 1).reshape(3, 6, 2)
    np.testing.assert_array_equal(collective("all_to_all", x), swapped)
    np.testing.assert_array_equal(collective("broadcast", x, root=2), x[[2, 2, 2]])
    np.testing.assert_array_equal(collective("scatter", x, root=1), x[1].reshape(3, 2, 2))
    np.testing.assert_array_equal(collective("gather", x, root=1)[1], x.reshape(18, 2))
    np.testing.assert_array_equal(collective("reduce", x, root=1)[1], total)
    assert (collective("reduce", x, root=1)[[0, 2]] == poison(x.dtype)).all()
    # Of several roots each has a part, of which the last may be short.
    split = collective("reduce", x, root=(2, 0))
    np.testing.assert_array_equal(np.concatenate([split[2, :3], split[0, 3:]]), total)
    assert (split[1] == poison(x.dtype)).all() and (split[2, 3:] == poison(x.dtype)).all()
    mixed = collective("broadcast", x[:, :5], root=(2, 0))
    np.testing.assert_array_equal(mixed[1], np.concatenate([x[2, :3], x[0, 3:5]]))
    assert collective("all_reduce", x.astype(np.int32)).dtype == np.int32
    with pytest.raises(DataError, match="does not divide over 3 ranks"):
        collective("reduce_scatter", np.zeros((3, 4)))
    with pytest.raises(DataError, match=r"Did you mean all_gather"):
        collective("allgather", x)


GEOMETRY = [
    # Every scatter order leaves rank (x, y) with the slot (x, y): equal to lax, no permutation.
    ("ring.reduce_scatter @ x >> ring.reduce_scatter @ y", 1),
    ("ring.reduce_scatter @ y >> ring.reduce_scatter @ x", 1),
    ("ring.reduce_scatter @ (x, y)", 1),
    ("ring.reduce_scatter @ (y, x)", 1),
    ("ring.all_gather @ (y, x)", 1),
    ("ring.all_gather @ y >> ring.all_gather @ x", 1),
    ("pairwise.all_to_all @ y >> pairwise.all_to_all @ x", 1),
    ("pairwise.all_to_all @ x >> pairwise.all_to_all @ y", 1),
    ("pairwise.all_to_all @ (y, x)", 1),
    ("(ring.reduce_scatter | ring.reduce_scatter.relabel(shift=1)) @ (x, y)", 2),
    ("ring.reduce_scatter @ x >> tree.double_all_reduce @ y >> ring.all_gather @ x", 2),
    ("ring.reduce_scatter @ (x, y) >> ring.all_gather @ y >> ring.all_gather @ x", 1),
    ("tree.double_all_reduce @ x >> server.shards(3) @ y", 6),
    ("server.shards(3) @ y | ring.all_reduce @ y", 2),
    ("tree.reduce @ x >> tree.reduce @ y", 1),
    ("tree.broadcast @ (x, y)", 1),
]


@pytest.mark.parametrize("text, m", GEOMETRY)
def test_composites_are_drop_ins(text, m):
    schedule = parse(text)
    sizes = {"x": 2, "y": 3} if len(schedule.axes) > 1 else {"y": 3}
    program = flatten(schedule, sizes)
    prove(program)
    n = program.n
    kind = program.kind.name
    frame = n if any(leaf.facing.scatters for leaf in schedule.leaves()) else 1
    frame = sizes["x"] if "double_all_reduce @ y" in text else frame
    assert program.chunks == frame * m
    assert flat_cells(schedule, sizes) == n * program.cells
    held = tell_tale(n, program.cells)
    out = run(program, held)
    cell = np.arange(program.cells)
    if kind == "all_to_all":
        s, d = np.divmod(cell, n * m)
        x = np.stack([held[r, s == r] for r in range(n)])
        got = np.stack([out[r, d // m == r] for r in range(n)])
        np.testing.assert_array_equal(got, collective(kind, x))
        return
    own = (cell // m)[None] == np.arange(n)[:, None]
    x = held[own].reshape(n, m) if kind == "all_gather" else held
    want = collective(kind, x)
    if kind == "reduce_scatter":
        np.testing.assert_array_equal(out[own].reshape(n, m), want)
    else:
        ends = program.ends
        np.testing.assert_array_equal(out[ends], want[ends])


def test_roots_move_with_their_relabelling():
    for text, *roots in [
        ("tree.reduce.relabel(shift=1) @ x", 1),
        ("tree.reduce.relabel(order=(2, 0, 1)) @ y", 2),
        ("tree.reduce.relabel(shift=1) @ x >> tree.reduce.relabel(shift=2) @ y", 5),
        ("tree.reduce.relabel(shift=4) @ (x, y)", 4),
        ("tree.broadcast.relabel(shift=4) @ (y, x)", 2),
        ("servers.push(2) @ y", 0, 1),
        ("servers.pull(3).relabel(order=(2, 0, 1)) @ y", 2, 0, 1),
        ("servers.push(3).relabel(shift=4) @ (x, y)", 4, 5, 0),
        ("servers.pull(3) @ (y, x)", 0, 3, 1),
        ("tree.reduce.relabel(shift=1) @ x >> servers.push(2) @ y", 3, 4),
        ("servers.pull(2).relabel(shift=1) @ y >> tree.broadcast @ x", 1, 2),
    ]:
        sizes = {"x": 2, "y": 3}
        program = flatten(parse(text), sizes)
        # In (y, x), rank 4 is y = 2, x = 0: so 2 in mesh order.
        assert program.roots == tuple(roots), text
        prove(program)


def test_what_cannot_be_flattened():
    for text, why in [
        ("native.all_reduce @ x", "XLA's own"),
        ("ring.reduce_scatter @ x >> ring.all_reduce @ y", "one collective on the whole mesh"),
    ]:
        with pytest.raises(ScheduleError, match=why):
            flatten(parse(text), {"x": 2, "y": 2})
    with pytest.raises(MeshError, match="axis 'x' has no size"):
        flatten(parse("ring.all_reduce @ x"), {"y": 2})
    with pytest.raises(MeshError, match="give one size"):
        flatten(parse("ring.all_reduce"), {"y": 2, "x": 2})
    with pytest.raises(ScheduleError, match="Flatten it on a smaller mesh"):
        flatten(parse("pairwise.all_to_all @ x"), {"x": 1000})
