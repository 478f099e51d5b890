"""Messages of many chunks: as exact as chunk by chunk, in code that does not grow with the chunks."""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import collc
from collc import language as cl
from collc.analysis.relative import messages
from collc.language import add, ranks
from collc.language.expand import expand
from collc.language.ir import Program, Step
from collc.language.library import load
from collc.language.parse import parse
from collc.language.states import KINDS
from collc.lowering import bulk, loops, orbits
from collc.lowering.ranks import Place
from collc.lowering.wire import Cast, Plain
from collc.receipts.hlo import count, parse_hlo
from collc.receipts.timing import per_device
from collc.schedules import halving

cases = load(Path(__file__).parent / "cases.py")

ORDER = ".relabel(order=(3, 0, 4, 1, 2))"
CASES = [
    (name + order, n)
    for name, sizes, orders in (
        ("halving.reduce_scatter", (4, 5, 13), (".relabel(shift=2)", ORDER)),
        ("halving.all_gather", (4, 5, 13), (".relabel(shift=2)", ORDER)),
        ("pat.reduce_scatter", (5, 8), (ORDER,)),
        ("pat.all_gather", (5, 8), (ORDER,)),
        ("bruck.all_to_all", (4, 5, 13), (".relabel(shift=2)", ORDER, ".reversed()")),
        ("pat.all_reduce | halving.all_reduce", (5,), ()),
    )
    for n in sizes
    for order in ("", *(orders if n == 5 else ()))
]


@pytest.fixture
def always(monkeypatch):
    """Few ranks have small messages: lowers these as large ones are."""
    monkeypatch.setattr(bulk, "FEW", 1)


@pytest.mark.parametrize("name, n", CASES)
def test_exact(name, n, always):
    cases.check(parse(name) @ "x", {"x": n}, wide=n == 5, lean=n > 8)


@pytest.mark.parametrize(
    "name, sizes",
    [
        ("halving.reduce_scatter @ a >> pat.all_reduce @ b >> halving.all_gather @ a", (4, 3)),
        ("bruck.all_to_all @ b >> bruck.all_to_all @ a", (3, 5)),
    ],
)
def test_meshes(name, sizes, always):
    cases.check(parse(name), dict(zip("ab", sizes, strict=True)), wide=False)


def program(n, seed):
    """Steps that mean nothing: messages of adds and copies, to cells that others read and add to."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(3):
        sends, copied, added = [], set(), set()
        for distance in rng.choice(np.arange(1, n), 2, replace=False):
            for chunk in rng.permutation(n)[: n - 1]:
                write, is_add = int(chunk - distance) % n, bool(rng.integers(2))
                if write in copied or (write in added and not is_add):
                    continue  # a race
                (added if is_add else copied).add(write)
                sends.append((is_add, int(chunk), int(distance)))
        verbs, chunks, distances = map(np.array, zip(*sends, strict=True))
        steps.append(Step(verbs, chunks, 0 * chunks, distances, orbit=True))
    return Program("noise", KINDS["all_reduce"], n, n, tuple(steps))


@pytest.mark.parametrize(
    "op, wire, relabels",
    [("sum", Plain(), ""), ("sum", Cast("bfloat16"), ORDER), ("max", Cast("bfloat16"), "")],
)
def test_the_same_as_chunk_by_chunk(op, wire, relabels, monkeypatch):
    """Bit for bit, for several operands: reads, roundings, adds and writes come in the same order."""
    n = 5
    (leaf,) = parse(f"ring.reduce_scatter{relabels} @ x").leaves()
    place = Place(leaf, {"x": n}, op, wire)
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(n, n, *shape)).astype(np.float32) for shape in ((3,), (1, 2))]
    programs = [program(n, seed) for seed in range(2)]

    def body(few):
        def all_of_them(xs):
            monkeypatch.setattr(bulk, "FEW", few)
            return [loops.run(orbits.lower(p, place, xs, None)) for p in programs]

        return all_of_them

    together, apart = (cases.run(body(few), xs, sizes={"x": n}) for few in (1, n))
    cases.equal(together, apart)


@cl.reduce_scatter
def thirds(n):
    """Two messages of many chunks in one step, which meet in the same cells: for n = 3^k."""
    r, far = ranks(n)[:, None], n
    while far > 1:
        near = far // 3
        o = ranks(far)[None, near:]
        yield add((r + o) % n, r, (r + o // near * near) % n)
        far = near


def test_messages_that_meet(always):
    cases.check(thirds @ "x", {"x": 9})


@pytest.mark.parametrize("name", ["halving.all_reduce @ x", "pat.all_reduce @ x"])
def test_replicas_stay_equal_on_a_narrow_wire(name, always):
    x = np.random.default_rng(0).normal(size=(6, 50)).astype(np.float32)
    y = np.asarray(cases.run(lambda x: collc.psum(x, name, wire="bfloat16"), x, sizes={"x": 6}))
    assert (y == y[0]).all()
    np.testing.assert_allclose(y[0], x.sum(0), atol=0.1)


def test_a_derivative_typed(always):
    x = np.random.default_rng(0).integers(1, 9, (5, 10)).astype(np.float32)

    def body(x):
        return jax.grad(lambda v: (collc.psum(v, "halving.all_reduce @ x") ** 2).sum())(x)

    y = cases.run(body, x, sizes={"x": 5}, check_vma=True)
    np.testing.assert_array_equal(np.asarray(y), np.broadcast_to(2 * x.sum(0), x.shape))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_automatic_axes_stay_untouched(kind, always):
    """Rows are moved along the dimension that is cut, whatever shards the others."""
    mesh = cases.mesh_of({"data": 4, "model": 2}, kind)
    spec = P(None, "model")
    x = jax.device_put(np.arange(96, dtype=np.float32).reshape(8, 12), NamedSharding(mesh, spec))
    known = spec if kind == AxisType.Auto else None

    def found(name):
        f = jax.jit(
            jax.shard_map(
                lambda x: collc.psum(x, f"{name}.all_reduce @ data", specs=known),
                mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"}, check_vma=False,
            )
        )  # fmt: skip
        with jax.set_mesh(mesh):
            np.testing.assert_array_equal(np.asarray(f(x)), 4 * np.asarray(x))
            all_of_them = parse_hlo(f.lower(x).compile().as_text())
        permutes = [c for c in all_of_them if c.kind == "collective-permute"]
        return permutes, count(c for c in all_of_them if c not in permutes)

    _, xlas = found("ring")  # jax 0.10 gathers what comes in where the axis is Explicit
    for name in ("halving", "pat"):
        permutes, others = found(name)
        assert others == xlas
        # Half of the columns are on each device, and a rank sends 2 (n - 1) / n of them.
        assert sum(c.bytes for c in permutes) == x.nbytes // 2 * 6 // 4


# ---- size of the code ---------------------------------------------------------------------------


def operations(name, n):
    """How many operations stand in the lowered code of a collective for n ranks."""
    mesh = AbstractMesh((n,), ("x",))
    f = jax.shard_map(
        per_device(name.split(".")[1], parse(name) @ "x"),
        mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False,
    )  # fmt: skip
    x = jax.ShapeDtypeStruct((n * n,), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    lowered = jax.jit(f).trace(x).lower(lowering_platforms=("cpu",))
    return lowered.as_text().count("stablehlo.")


@pytest.mark.parametrize("name", ["halving.all_reduce", "pat.all_reduce", "bruck.all_to_all"])
def test_code_grows_with_the_steps(name):
    """A step more for twice the ranks, and in bruck's each reads what arrived in all before it."""
    each = [operations(name, n) for n in (64, 128, 256)]
    assert each[0] < 160
    assert all(more - less <= 24 for less, more in itertools.pairwise(each))


def test_few_chunks_are_lowered_one_by_one():
    """Up to eight at once: halving's for 17 ranks."""
    (leaf,) = halving.reduce_scatter.leaves()
    assert not bulk.pays(messages(expand(leaf, 17)))
    assert bulk.pays(messages(expand(leaf, 18)))
