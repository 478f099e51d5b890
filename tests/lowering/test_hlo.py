"""The optimised HLO holds what the certificate says, no round and no byte more."""

import re
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import collc
from collc.analysis.certificate import verify
from collc.language.library import load
from collc.language.parse import parse
from collc.lowering.primitive import bind
from collc.lowering.wire import Plain
from collc.receipts.hlo import count, parse_hlo
from collc.schedules import allpairs, bruck, doubling, server

cases = load(Path(__file__).parent / "cases.py")
zoo = load(Path(__file__).parents[1] / "zoo.py")

TORUS = (
    "ring.reduce_scatter @ a >> ring.all_reduce @ b >> ring.all_gather @ a"
    " | ring.reduce_scatter @ b >> ring.all_reduce @ a >> ring.all_gather @ b"
)
EXPLICIT = [
    (f"{name} @ x", {"x": n})
    for name in (
        "ring.all_reduce",
        "ring.reduce_scatter",
        "ring.all_gather",
        "ring.all_reduce.reversed()",
        "tree.reduce",
        "tree.broadcast",
        "tree.all_reduce",
        "tree.double_all_reduce",
        "tree.all_reduce.relabel(shift=2)",
        "server.star",
        "server.shards(3)",
        "pairwise.all_to_all",
        "ring.all_reduce.relabel(order=(1, 0, 2, 3, 4, 5, 6, 7))",
    )
    for n in (8, 5)
    if n == 8 or "order" not in name
] + [
    ('hierarchical("a", "b")', {"a": 2, "b": 4}),
    ('pairwise.two_level("a", "b")', {"a": 2, "b": 4}),
    ("ring.reduce_scatter @ a >> ring.reduce_scatter @ b", {"a": 2, "b": 3}),
    ("ring.all_reduce @ (b, a)", {"a": 2, "b": 3}),
    ("tree.all_reduce @ a", {"a": 3, "b": 2}),
    (
        "ring.reduce_scatter @ c >> tree.all_reduce @ (b, a) >> ring.all_gather @ c",
        {"a": 2, "b": 2, "c": 2},
    ),
]


def hlo(body, sizes, *shapes, dtype=jnp.float32):
    """The optimised HLO of a function of each rank's arrays of these shapes."""
    mesh = cases.mesh_of(sizes)
    xs = [jax.ShapeDtypeStruct((*sizes.values(), *shape), dtype) for shape in shapes]
    return jax.jit(cases.on_ranks(body, mesh)).lower(*xs).compile().as_text()


def of(schedule, sizes, size):
    """The HLO of a schedule on a buffer of ``size`` elements where it is whole."""
    certificate = verify(schedule, **sizes)
    if schedule.collective.before == "shard":
        size //= int(np.prod([sizes[a] for a in schedule.axes]))
    return hlo(
        lambda x: bind([x], certificate, op="sum", wire=Plain(), drop=False)[0], sizes, (size,)
    )


def sent(found, ranks):
    """The most bytes that a rank sends, by the pairs of the permutes."""
    total = np.zeros(ranks, np.int64)
    for c in found:
        for source, _ in c.partners:
            total[source] += c.bytes * c.count
    return int(total.max())


@pytest.mark.parametrize("name, sizes", EXPLICIT)
def test_rounds_and_bytes(name, sizes):
    schedule = parse(name)
    certificate = verify(schedule, **sizes)
    size = 240 if schedule.axes else 0
    found = parse_hlo(of(schedule, sizes, size))
    assert count(found) == {"collective-permute": certificate.rounds}
    assert Fraction(sent(found, int(np.prod([*sizes.values()]))), 4 * size) == certificate.sent


@pytest.mark.parametrize(
    "schedule",
    [
        allpairs.one_shot,
        allpairs.reduce_scatter,
        bruck.all_to_all,
        doubling.all_reduce,
        server.gather,
        zoo.chain,
    ],
    ids=str,
)
@pytest.mark.parametrize("n", [8, 5])
def test_rounds_of_other_shapes_of_step(schedule, n):
    found = parse_hlo(of(schedule @ "x", {"x": n}, 240))
    assert count(found) == {"collective-permute": verify(schedule, n=n).rounds}


@pytest.mark.parametrize("n", [8, 16])
def test_a_donated_ring_copies_no_whole_buffer(n):
    """Nor does its code grow with n; a ring that cannot write into its input does copy."""
    mesh = cases.mesh_of({"x": n})
    x = jax.ShapeDtypeStruct(
        (n * n * 1000,), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("x"))
    )

    def code(body):
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"), check_vma=False
        )
        return jax.jit(mapped, donate_argnums=0).lower(x).compile().as_text()

    def copies(text):
        whole = rf"f32\[({n * 1000}|{n},1000)\]"
        return len(re.findall(rf"= {whole}\S* copy\(", text))

    ring = parse("ring.all_reduce @ x")
    text = code(lambda x: collc.psum(x, ring))
    assert copies(text) == 0
    code_lines = text[text.index("\n%") :].splitlines()  # not the table of pytest's stack frames
    assert 100 < len(code_lines) <= 400
    assert copies(code(lambda x: collc.psum(x, ring) + x[::-1])) > 0


@pytest.mark.parametrize("n", [8, 5])
def test_parts_side_by_side(n):
    """A round of each part, but that XLA joins permutes of equal pairs."""
    schedule = parse("(ring.all_reduce | tree.all_reduce) @ x")
    found = parse_hlo(of(schedule, {"x": n}, 240))
    assert count(found) == {"collective-permute": verify(schedule, x=n).rounds}


@pytest.mark.parametrize("mesh", [{"a": 2, "b": 2}, {"a": 4, "b": 2}])
def test_torus(mesh):
    schedule = parse(TORUS)
    found = parse_hlo(of(schedule, mesh, 240))
    assert count(found) == {"collective-permute": verify(schedule, **mesh).rounds}


def lines(text):
    """The number of instructions; without the tables of source lines, which depend on the caller's."""
    return sum(" = " in line for line in text.splitlines())


@pytest.mark.parametrize("name", ["ring.reduce_scatter", "ring.all_gather", "ring.all_reduce"])
def test_a_ring_does_not_grow(name):
    schedule = parse(name) @ "x"
    assert lines(of(schedule, {"x": 8}, 480)) == lines(of(schedule, {"x": 16}, 480))


def bodies(text):
    """The number of while loops, and the permutes written in the whole text."""
    return len(re.findall(r"= .* while\(", text)), len(
        re.findall(r" collective-permute(?:-start)?\(", text)
    )


def test_a_two_way_ring_shares_its_loops():
    one = parse("ring.all_reduce") @ "x"
    two = parse("ring.all_reduce | ring.all_reduce.reversed()") @ "x"
    assert bodies(of(one, {"x": 8}, 480)) == (2, 2)
    assert bodies(of(two, {"x": 8}, 480)) == (2, 4)
    found = parse_hlo(of(two, {"x": 8}, 480))
    assert len({c.partners for c in found}) == 2
    # Half of the buffer goes each way.
    assert {c.bytes for c in found} == {480 * 4 // 8 // 2}


def test_one_message_for_several_operands_of_a_dtype():
    """Leaves of a pytree share a buffer; sizes that n does not divide are padded to it, no more."""
    text = hlo(lambda a, b: collc.psum([a, b], "ring.all_reduce @ x"), {"x": 8}, (5,), (3, 2))
    (scatter, gather) = parse_hlo(text)
    assert scatter.bytes == gather.bytes == 2 * 4  # ceil(11 / 8) elements
    assert scatter.count == gather.count == 7


def test_nothing_is_sent_for_nothing():
    text = hlo(lambda a: collc.psum({"a": a}, "ring.all_reduce @ x"), {"x": 8}, (0, 3))
    assert parse_hlo(text) == ()
    assert parse_hlo(hlo(lambda a: collc.psum(a, "tree.all_reduce @ x"), {"x": 1}, (4,))) == ()


@pytest.mark.parametrize(
    "ours, lax_s",
    [
        (lambda x: collc.psum(x, "native.all_reduce @ x"), lambda x: lax.psum(x, "x")),
        (lambda x: collc.pmax(x, "native.all_reduce @ x"), lambda x: lax.pmax(x, "x")),
        (
            lambda x: collc.psum_scatter(x, "native.reduce_scatter @ x", tiled=True),
            lambda x: lax.psum_scatter(x, "x", tiled=True),
        ),
        (lambda x: collc.all_gather(x, "native.all_gather @ x"), lambda x: lax.all_gather(x, "x")),
    ],
    ids=["psum", "pmax", "psum_scatter", "all_gather"],
)
def test_native_is_lax(ours, lax_s):
    def shown(f):
        return [
            (c.kind, c.dtypes, c.bytes, c.partners, c.count)
            for c in parse_hlo(hlo(f, {"x": 8}, (16,)))
        ]

    assert shown(ours) == shown(lax_s) != []


def test_layers_that_do_not_divide_are_not_padded():
    """[3, 16] over 4 ranks: 12 numbers a rank, as a flat leaf has it, and not a layer of 16."""
    mesh = jax.make_mesh((2, 4), ("host", "gpu"))
    plan = collc.plan(mesh, {"gpu": "native", "host": "native"})
    step = jax.jit(collc.schedule(plan, batch="x")(lambda x: collc.psum(x[0])))
    x = jnp.arange(8 * 3 * 16.0).reshape(8, 3, 16)
    text = step.lower(x).compile().as_text()
    assert re.search(r"f32\[(1,)?12\]\S* reduce-scatter", text)
    np.testing.assert_array_equal(step(x), x.sum(0))
