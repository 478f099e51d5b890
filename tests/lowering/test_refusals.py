"""What the public functions refuse, and how they say it."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import collc
from collc.errors import DataError, MeshError, PlanError, ScheduleError
from collc.language.library import load
from collc.language.parse import parse

cases = load(Path(__file__).parent / "cases.py")
zoo = load(Path(__file__).parents[1] / "zoo.py")

N = 4
AR, RS, AG = "ring.all_reduce @ x", "ring.reduce_scatter @ x", "ring.all_gather @ x"
A2A, BC = "pairwise.all_to_all @ x", "tree.broadcast @ x"

equal = cases.equal
run = functools.partial(cases.run, sizes={"x": N})
trace = functools.partial(cases.trace, sizes={"x": N})


@pytest.mark.parametrize(
    "error, words, body",
    [
        (
            MeshError,
            "collc.psum: ring.all_reduce @ xx is placed on 'xx'.*Did you mean x?",
            lambda x: collc.psum(x, "ring.all_reduce @ xx"),
        ),
        (
            ScheduleError,
            "collc.psum: place the schedule on an axis: ring.all_reduce @",
            lambda x: collc.psum(x, parse("ring.all_reduce")),
        ),
        (
            ScheduleError,
            "collc.psum needs partial -> replica.*ring.reduce_scatter @ x is",
            lambda x: collc.psum(x, RS),
        ),
        (
            ScheduleError,
            "collc.all_gather needs shard -> replica",
            lambda x: collc.all_gather(x, AR),
        ),
        (
            ScheduleError,
            "no schedule 'ring.al_reduce'. Did you mean ring.all_reduce",
            lambda x: collc.psum(x, "ring.al_reduce @ x"),
        ),
        (PlanError, "collc.psum: no plan here", lambda x: collc.psum(x)),
        (PlanError, "collc.psum: no plan here", lambda x: collc.psum(x, "x")),
        (PlanError, "write 'ring.all_reduce @ x'", lambda x: collc.psum(x, "ring")),
        (
            DataError,
            r"collc.psum_scatter: dimension 0 of shape \(6,\) does not divide over 4 ranks. Pad it to 8",
            lambda x: collc.psum_scatter(x, RS, tiled=True),
        ),
        (
            DataError,
            r"dimension 0 of shape \(6,\) has to be 4, one for each rank; or say tiled=True",
            lambda x: collc.psum_scatter(x, RS),
        ),
        (
            DataError,
            r"collc.all_to_all: dimension 0 of shape \(6,\)",
            lambda x: collc.all_to_all(x, A2A, tiled=True),
        ),
        (
            DataError,
            "collc.psum_scatter: a scalar has no dimension to split over 4 ranks",
            lambda x: collc.psum_scatter(x[0], RS),
        ),
        (DataError, "collc.all_to_all: a scalar", lambda x: collc.all_to_all(x[0], A2A)),
        (
            DataError,
            r"collc.all_gather: a value of shape \(\) has no dimension 0",
            lambda x: collc.all_gather(x[0], AG, tiled=True),
        ),
        (
            DataError,
            r"collc.all_gather: a value of shape \(4, 6\) has no dimension 2",
            lambda x: collc.all_gather(x, AG, axis=2),
        ),
        (
            DataError,
            r"collc.psum_scatter: a value of shape \(6,\) has no dimension 1",
            lambda x: collc.psum_scatter(x, RS, scatter_dimension=1),
        ),
        (
            DataError,
            r"collc.all_to_all: a value of shape \(4,\) has no dimension -2",
            lambda x: collc.all_to_all(x[:4], A2A, 0, -2),
        ),
        (
            DataError,
            "all_gather: to is 'varying' or 'invarying', not 'same'",
            lambda x: collc.all_gather(x, AG, to="same"),
        ),
        (
            DataError,
            "source is one of the ranks 0 to 3, not 4",
            lambda x: collc.pbroadcast(x, BC, source=4),
        ),
        (
            DataError,
            "source is one of the ranks 0 to 3, not -1",
            lambda x: collc.pbroadcast(x, BC, source=-1),
        ),
        (
            DataError,
            "source is one of the ranks 0 to 3, not 0.0",
            lambda x: collc.pbroadcast(x, BC, source=0.0),
        ),
        (DataError, "specs= has no effect here", lambda x: collc.psum(x, AR, specs=P())),
        (
            DataError,
            "accumulate= takes a floating-point dtype or None, not 'int32'",
            lambda x: collc.psum(x, AR, accumulate="int32"),
        ),
        (
            DataError,
            "wire= takes a floating-point dtype or None, not 'bf17'",
            lambda x: collc.psum(x, AR, wire="bf17"),
        ),
        (
            ScheduleError,
            "wire= has no effect on native.all_reduce",
            lambda x: collc.psum(x, "native.all_reduce @ x", wire="bfloat16"),
        ),
    ],
)
def test_refusals(error, words, body):
    with pytest.raises(error, match=words):
        trace(body, jnp.zeros((N, 6)))


def test_outside_of_shard_map():
    with pytest.raises(MeshError, match=r"It runs inside jax.shard_map"):
        collc.psum(jnp.ones(3), AR)


def test_an_axis_that_is_not_manual():
    mesh = cases.mesh_of({"x": 2, "y": 2})
    f = jax.shard_map(
        lambda x: collc.psum(x, "ring.all_reduce @ y"),
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P("x"),
        axis_names={"x"},
        check_vma=False,
    )
    with pytest.raises(MeshError, match=r"'y' is an automatic axis here. Name it in axis_names="):
        jax.eval_shape(f, jnp.ones(4))


def test_nothing_is_lowered_without_a_proof():
    from types import SimpleNamespace

    from collc import language as cl
    from collc.errors import ProofError
    from collc.lowering.primitive import bind
    from collc.lowering.wire import Plain

    @cl.all_reduce
    def half(n):
        yield cl.add(cl.ALL, 1, 0)

    with pytest.raises(ProofError, match=r"half.*lacks the addend"):
        trace(lambda x: collc.psum(x, half @ "x"), jnp.ones((N, 4)))
    proved = collc.verify(collc.parse(AR), x=4)
    fake = SimpleNamespace(schedule=half @ "x", sizes=proved.sizes, trusted=())
    with pytest.raises(ProofError, match="nothing is lowered without a certificate"):
        trace(lambda x: bind([x], fake, op="sum", wire=Plain())[0], jnp.ones((N, 4)))


@pytest.mark.parametrize(
    "call",
    [
        lambda k: collc.psum(k, AR),
        lambda k: collc.pmax(k, AR),
        lambda k: collc.all_gather(k, AG),
        lambda k: collc.pbroadcast(k, BC),
    ],
)
def test_keys_do_not_travel(call):
    with pytest.raises(DataError, match=r"dtype key<\w+> cannot travel"):
        trace(lambda x: call(jax.random.key(0)), jnp.ones((N, 4)))
    with pytest.raises(DataError, match="'words' is no array"):
        trace(lambda x: call("words"), jnp.ones((N, 4)))


@pytest.mark.parametrize(
    "on, words",
    [
        (3, "not 3"),
        (("x", "x"), "names an axis twice"),
        ((), "not ()"),
        ({"x": "ring"}, "not {'x'"),
    ],
)
def test_what_is_no_axis_nor_schedule(on, words):
    with pytest.raises(ScheduleError, match=re.escape(words)):
        trace(lambda x: collc.psum(x, on), jnp.ones((N, 4)))


def test_booleans_are_not_scattered():
    with pytest.raises(DataError, match="booleans have no sum"):
        trace(lambda x: collc.psum_scatter(x > 0, RS, tiled=True), jnp.ones((N, 4)))
