"""What travels and what is accumulated are told apart, and replicas stay equal bit for bit."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import collc
from collc import language as cl
from collc.analysis.certificate import verify
from collc.analysis.reference import flatten
from collc.analysis.rounds import colours
from collc.errors import ScheduleError
from collc.language.library import load
from collc.language.parse import parse

cases = load(Path(__file__).parent / "cases.py")

N = 4
AR, RS, AG = "ring.all_reduce @ x", "ring.reduce_scatter @ x", "ring.all_gather @ x"
A2A, BC = "pairwise.all_to_all @ x", "tree.broadcast @ x"

equal = cases.equal
run = functools.partial(cases.run, sizes={"x": N})
trace = functools.partial(cases.trace, sizes={"x": N})


def integers(*shape, seed=0, top=100):
    return np.random.default_rng(seed).integers(1, top, (N, *shape))


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
        held[step.src[out], step.chunk[out]] = sent[
            out
        ]  # all replicas have the value that was sent
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
        return {
            "i": x,
            "c": (x % 1000 + 2j * (x % 777)).astype(jnp.complex64),
            "h": (x % 3).astype(jnp.bfloat16),
        }

    plain = run(lambda x: lax.psum(tree(x), "x"), x)
    equal(run(lambda x: collc.psum(tree(x), AR, accumulate="float32"), x), plain)
    equal(run(lambda x: collc.psum(tree(x), AR, wire="bfloat16"), x), plain)
    equal(run(lambda x: collc.psum(tree(x), AR, wire="float32"), x), plain)


@pytest.mark.parametrize("name", ["allpairs.one_shot", "doubling.all_reduce"])
def test_replicas_that_would_drift_apart_are_refused(name):
    schedule = parse(name) @ "x"
    found = verify(schedule, x=N)
    assert (found.consistent, found.narrow) == (name == "doubling.all_reduce", False)
    with pytest.raises(ScheduleError, match=r"collc.psum: .*different orders.*consistent: yes"):
        trace(
            lambda x: collc.psum(
                x, schedule, **({} if name == "allpairs.one_shot" else {"wire": "bfloat16"})
            ),
            integers(2),
        )
    if name == "doubling.all_reduce":
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
