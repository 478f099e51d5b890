"""Receipts of steps on virtual CPU devices: what they say, and what they refuse."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import collc
from collc.errors import DataError, HloError, MeshError, ReceiptError
from collc.receipts.reading import receipt
from collc.receipts.receipt import scope

PLAN = "ring.reduce_scatter @ gpu >> tree.all_reduce @ host >> ring.all_gather @ gpu"


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("host", "gpu"), (AxisType.Auto,) * 2, devices=jax.devices()[:8])


def trace(mesh, body, shape=(64,), dtype=jnp.float32):
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(mapped).trace(jax.ShapeDtypeStruct(shape, dtype))


def summed(x):
    return collc.psum(x, PLAN)


def test_all_stages_give_one_receipt(mesh):
    traced = trace(mesh, summed)
    compiled = traced.lower().compile()
    own = receipt(traced)
    assert own.collectives == {"collective-permute": 8}
    assert own.differences == () and own.unplanned == 0
    assert set(own.seconds) == {"lower", "compile", "receipt"}
    assert own.sizes == {"host": 2, "gpu": 4} and own.pod is None and own.links is None
    assert [e.axes for e in own.entries] == [("gpu",), ("host",), ("host",), ("gpu",)]
    assert {e.by for e in own.entries} == {"plan"}
    assert own.memory.arguments == own.memory.outputs == 256 and own.memory.fits
    for other in (receipt(compiled, asked=traced), receipt(traced.lower(), asked=traced)):
        assert (other.entries, other.differences) == (own.entries, ())
    alone = receipt(compiled)
    assert alone.asked is None and alone.unplanned == 0
    assert alone.entries == tuple(replace(e, serves=()) for e in own.entries)
    text = receipt(compiled.as_text(), mesh={"host": 2, "gpu": 4})
    assert text.entries == alone.entries and text.memory is None
    assert {e.axes for e in receipt(compiled.as_text()).entries} == {None}


def test_the_receipt_of_nnx_jit(mesh):
    model = nnx.eval_shape(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)))

    @nnx.jit
    @collc.schedule(collc.plan(mesh, {"gpu": "ring", "host": "native"}), batch="batch")
    def step(model, batch):
        return collc.pmean(model(batch).sum())

    found = receipt(step.trace(model, jax.ShapeDtypeStruct((8, 4), jnp.float32)))
    assert found.collectives == {"collective-permute": 6, "all-reduce": 1}
    assert found.differences == ()


def test_partitioned_steps_are_unplanned(mesh):
    x = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=NamedSharding(mesh, P("gpu")))
    traced = jax.jit(lambda x: x.sum()).trace(x)
    for found in (receipt(traced), receipt(traced.lower().compile())):
        assert found.unplanned == 1
        assert [(e.by, e.axes) for e in found.entries] == [("XLA", ("gpu",))]
    (one,) = receipt(traced).differences
    assert one.what == "unplanned" and "all-reduce over gpu of 4 B f32" in one.text


def test_xla_on_cpu_sends_float32_where_bfloat16_was_asked(mesh):
    found = receipt(trace(mesh, summed, dtype=jnp.bfloat16))
    assert {d.what for d in found.differences} == {"upcast"}
    assert sum(d.count for d in found.differences) == 8 and found.unplanned == 0
    with pytest.raises(
        AssertionError, match=r"carries f32, not bf16 .collc/ring.reduce_scatter/gpu"
    ):
        found.expect(wire_dtype=jnp.bfloat16)


def test_expect(mesh):
    def step(x):
        return summed(x) + lax.pmean(x.sum(), "gpu")

    found = receipt(trace(mesh, step))
    same = found.expect(
        collectives={"collective-permute": 8, "all-reduce": 1},
        wire_dtype="float32",
        unplanned=0,
        differences=0,
        memory=1 << 20,
    )
    assert same is found
    with pytest.raises(ReceiptError, match="1 all-reduce, 8 collective-permute, not 8 collective"):
        found.expect(collectives={"collective-permute": 8})
    with pytest.raises(ReceiptError, match="0 collectives are unplanned, not 1"):
        found.expect(unplanned=1)
    with pytest.raises(ReceiptError, match="0 differences, not 2"):
        found.expect(differences=2)
    with pytest.raises(ReceiptError, match=r"a device needs .* not at most 8"):
        found.expect(memory=8)
    with pytest.raises(DataError, match="'float31' is no dtype"):
        found.expect(wire_dtype="float31")
    alone = receipt(trace(mesh, step).lower().compile().as_text())
    with pytest.raises(DataError, match="memory= has no effect"):
        alone.expect(memory=8)
    with pytest.raises(DataError, match="differences= has no effect"):
        alone.expect(differences=0)


def test_expect_refuses_what_it_cannot_compare(mesh):
    found = receipt(trace(mesh, summed))
    for odd, said in (
        ({"collectives": 8}, "takes executions by kind"),
        (
            {"collectives": {"allreduce": 1}},
            "HLO has no collective 'allreduce'. Did you mean all-r",
        ),
        ({"collectives": {"all-reduce": "1"}}, "has '1' for all-reduce"),
        ({"unplanned": "0"}, "unplanned= takes an integer"),
        ({"memory": "1GB"}, "memory= takes an integer"),
    ):
        with pytest.raises(DataError, match=said):
            found.expect(**odd)
    found.expect(collectives={"collective-permute": 8, "all-reduce": 0})


def test_constants_of_the_program_take_memory(mesh):
    table = np.arange(256 * 64, dtype=np.float32).reshape(256, 64)
    found = receipt(trace(mesh, lambda x: summed(table @ x)))
    assert found.memory.constants >= table.nbytes
    assert found.memory.total >= table.nbytes + found.memory.arguments


def test_text_from_before_partitioning_is_refused(mesh):
    x = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=NamedSharding(mesh, P("gpu")))
    lowered = jax.jit(lambda x: lax.with_sharding_constraint(x * 2, P()).sum()).lower
    with jax.set_mesh(mesh):
        text = lowered(x).as_text(dialect="hlo")
    with pytest.raises(HloError, match="before partitioning"):
        receipt(text)


def test_scalars_have_no_wire_dtype(mesh):
    def step(x):
        return collc.pmean(x.sum(), "ring.all_reduce @ gpu")

    receipt(trace(mesh, step)).expect(wire_dtype="bfloat16")


def test_refusals(mesh):
    traced = trace(mesh, summed)
    with pytest.raises(DataError, match="not int"):
        receipt(3)
    with pytest.raises(DataError, match="asked= has no effect"):
        receipt(traced, asked=traced)
    with pytest.raises(DataError, match="asked= takes what"):
        receipt(traced.lower(), asked=traced.jaxpr)
    text = traced.lower().compile().as_text()
    with pytest.raises(MeshError, match="has 4 devices, and the program runs on 8"):
        receipt(text, mesh={"gpu": 4})
    with pytest.raises(MeshError, match="it has 16 devices"):
        receipt(text, mesh={"gpu": 16})
    with pytest.raises(MeshError, match="needs mesh="):
        receipt(text, asked=traced)
    with pytest.raises(MeshError, match="goes over host, which the mesh"):
        receipt(text, asked=traced, mesh={"a": 2, "gpu": 4})
    with pytest.raises(MeshError, match=r"was compiled for \{'host': 2, 'gpu': 4\}"):
        receipt(traced, mesh={"host": 4, "gpu": 2})
    for mesh_ in (8, "host=2,gpu=4", {"a": 8.0}, {"a": -4, "b": -2}, {1: 8}):
        with pytest.raises(MeshError, match="mesh= takes a jax"):
            receipt(text, mesh=mesh_)
    with pytest.raises(HloError, match="HLO line"):
        receipt(text[: len(text) // 2])


def test_several_meshes_are_none():
    one = Mesh(jax.devices()[:2], "a")
    other = Mesh(jax.devices()[:2], "b")
    x = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(one, P("a")))
    y = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(other, P("b")))
    traced = jax.jit(lambda x, y: (x + y).sum()).trace(x, y)
    found = receipt(traced.lower().compile())
    assert found.sizes == {} and found.entries[0].axes is None
    with pytest.raises(MeshError, match="needs mesh="):
        receipt(traced)


@pytest.mark.parametrize(
    "op_name, whose",
    [
        ("", ""),
        ("jit(f)/shard_map/psum", "psum"),
        ("jit(f)/collc/ring.all_gather/gpu/r0-2/ppermute", "collc/ring.all_gather/gpu"),
        ("jit(f)/a/collc/native.all_reduce/host,gpu/psum", "collc/native.all_reduce/host,gpu"),
        (
            "jit(f)/jit(main)/transpose(jvp(block))/while/body/mlp/dot_general",
            "block/mlp/dot_general",
        ),
        ("jit(f)/checkpoint/rematted_computation/attention/dot", "attention/dot"),
    ],
)
def test_scopes(op_name, whose):
    assert scope(op_name) == whose


def test_functions_are_compiled_with_their_own_options(mesh):
    step = functools.partial(jax.jit, compiler_options={"xla_cpu_enable_fast_math": False})
    mapped = jax.shard_map(summed, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    traced = step(mapped).trace(jax.ShapeDtypeStruct((8,), jnp.float32))
    assert receipt(traced).differences == ()
