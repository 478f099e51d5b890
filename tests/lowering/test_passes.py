"""Schedules that passes have rewritten, on devices: exact in value, and as many rounds as proved."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import collc
from collc.analysis.certificate import verify
from collc.language.library import load
from collc.language.parse import parse
from collc.lowering.primitive import bind
from collc.lowering.wire import Plain
from collc.receipts.hlo import count, parse_hlo

cases = load(Path(__file__).parent / "cases.py")

SLICED = [
    "tree.reduce.through(Pipeline(3))",
    "tree.broadcast.through(Pipeline(2))",
    "tree.double_all_reduce.through(Pipeline(2))",
    "chain.all_reduce.through(Pipeline(4))",
    "chain.all_reduce.reversed().through(Pipeline(2))",
    "binomial.all_reduce.relabel(shift=1).through(Pipeline(2))",
    "server.shards(2).through(Pipeline(3), Coalesce())",
    "rack.all_reduce((0, 1, 2), (3, 4)).through(Pipeline(2))",
    "allpairs.two_shot.through(Rounds())",
    "bruck.all_to_all.through(Rounds())",
    "ring.all_reduce.through(Roll())",
    "tree.reduce.through(Rounds()) | chain.reduce.through(Pipeline(2))",
]
STAGGERED = [
    "(ring.reduce_scatter @ a >> tree.all_reduce @ b >> ring.all_gather @ a).through(Pipeline(3))",
    "(halving.reduce_scatter @ b >> server.shards(2) @ a >> pat.all_gather @ b).through(Pipeline(2))",
    "(tree.double_all_reduce.through(Pipeline(2)) @ a >> chain.all_reduce @ b).through(Pipeline(2))",
    "(native.reduce_scatter @ b >> ring.all_reduce @ a >> native.all_gather @ b).through(Pipeline(4))",
    'torus("a", "b").through(Pipeline(2))',
]


@pytest.mark.parametrize("text", SLICED)
@pytest.mark.parametrize("n", [1, 5])
def test_slices(text, n):
    if "rack" in text and n != 5:
        text = text.replace("(0, 1, 2), (3, 4)", f"{tuple(range(n))}")
    # All operations and dtypes where a pass stands alone, one for each pass.
    wide = n == 5 and text in (SLICED[0], *SLICED[-4:-1])
    cases.check(parse(text) @ "x", {"x": n}, wide=wide, lean=n != 5)


@pytest.mark.parametrize("half", ["push", "pull"])
def test_slices_of_several_roots(half):
    cases.check(parse(f"servers.{half}(2).through(Pipeline(3)) @ x"), {"x": 5}, wide=False)


@pytest.mark.parametrize("text", STAGGERED)
@pytest.mark.parametrize("sizes", [{"a": 2, "b": 3}, {"a": 1, "b": 2}])
def test_staggered(text, sizes):
    cases.check(parse(text), sizes, wide=False, lean=sizes["a"] != 2)


@pytest.mark.parametrize(
    "text, sizes",
    [(f"({text}) @ x", {"x": 5}) for text in SLICED] + [(s, {"a": 4, "b": 2}) for s in STAGGERED],
)
def test_rounds(text, sizes):
    certificate = verify(parse(text), **sizes)

    def body(x):
        return bind([x], certificate, op="sum", wire=Plain(), drop=False)[0]

    k = 5 * 24 if certificate.schedule.collective.before == "outbox" else 240
    x = jax.ShapeDtypeStruct((*sizes.values(), k), jnp.float32)
    lowered = jax.jit(cases.on_ranks(body, cases.mesh_of(sizes))).lower(x)
    found = count(parse_hlo(lowered.compile().as_text()))
    # XLA joins permutes of equal pairs, as side by side parts have.
    assert found["collective-permute"] <= certificate.rounds
    if "torus" not in text and "|" not in text:
        assert found["collective-permute"] == certificate.rounds


def test_derivatives_go_through_the_dual():
    sliced = parse("tree.double_all_reduce.through(Pipeline(2)) @ x")
    x = np.arange(8.0 * 6, dtype=np.float32).reshape(8, 6)

    def loss(on, x):
        return (on(x) * jnp.arange(6.0)).sum()

    def of(on):
        f = jax.shard_map(
            jax.grad(lambda x: loss(on, x)), mesh=cases.mesh_of({"x": 8}),
            in_specs=P("x"), out_specs=P("x"), check_vma=False,
        )  # fmt: skip
        return np.asarray(jax.jit(f)(x))

    np.testing.assert_array_equal(
        of(lambda x: collc.psum(x, sliced)), of(lambda x: jax.lax.psum(x, "x"))
    )


def test_a_plan_takes_slices():
    mesh = cases.mesh_of({"host": 2, "gpu": 4})
    plan = collc.plan(mesh, {"gpu": "ring", "host": "tree.double_all_reduce.through(Pipeline(2))"})
    x = np.arange(8 * 5, dtype=np.float32).reshape(8, 5)
    f = jax.shard_map(
        lambda x: collc.psum(x, plan), mesh=mesh, in_specs=P(("host", "gpu")),
        out_specs=P(("host", "gpu")), check_vma=False,
    )  # fmt: skip
    np.testing.assert_array_equal(jax.jit(f)(x), np.broadcast_to(x.sum(0), x.shape))
