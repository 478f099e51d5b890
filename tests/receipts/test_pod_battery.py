"""Every library schedule, compiled for H100s: what runs is what its plan asks for, byte by byte."""

import math

import jax
import jax.numpy as jnp
import pytest

from collc.analysis.certificate import verify
from collc.language.algebra import Schedule
from collc.language.library import contents, find, modules
from collc.lowering.primitive import bind
from collc.lowering.wire import Cast, Plain
from collc.receipts.reading import receipt

pytestmark = pytest.mark.newest_only

FAMILIES = [
    'hierarchical("host", "gpu")',
    'pairwise.two_level("host", "gpu")',
    "rack.all_reduce((0, 1, 2, 3), (4, 5, 6, 7)) @ gpu",
    'torus("host", "gpu")',
    "server.shards(3) @ gpu",
]
LIBRARY = [
    f"{short}.{name}"
    for short, module in modules().items()
    for name, value in contents(module).items()
    if isinstance(value, Schedule)
]


def compiled(mesh, schedule, *, dtype=jnp.bfloat16, wire=Plain(), elements=40):  # noqa: B008
    """The receipt and the proof of a schedule on ``elements`` for each device and chunk."""
    certificate = verify(schedule, **dict(mesh.shape))

    def body(x):
        return bind([x], certificate, op="sum", wire=wire, drop=False)[0]

    spec = jax.P()
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.ShapeDtypeStruct((elements * math.prod(mesh.shape.values()),), dtype)
    return receipt(jax.jit(mapped).trace(x)), certificate


def check(found, certificate):
    found.expect(wire_dtype="bfloat16", unplanned=0)
    if certificate.trusted:
        assert found.differences == ()
        return
    sent = sum(e.collective.bytes * e.collective.count for e in found.entries)
    assert sent == sum(a.bytes * a.count for a in found.asked)
    if {d.what for d in found.differences} == {"merged"}:
        # XLA joins permutes of equal pairs that do not wait for each other, of the parts of a `|`.
        assert "|" in str(certificate.schedule.normal)
        assert sum(found.collectives.values()) < certificate.rounds
        return
    assert found.differences == ()
    assert found.collectives == {"collective-permute": certificate.rounds}


@pytest.mark.parametrize(
    "name, axes", [(s, "(host, gpu)") for s in LIBRARY] + [(s, "gpu") for s in LIBRARY[::3]]
)
def test_two_hosts(pod, name, axes):
    check(*compiled(pod("h100", hosts=2), find(f"{name} @ {axes}")))


@pytest.mark.parametrize("name", FAMILIES)
def test_families(pod, name):
    check(*compiled(pod("h100", hosts=2), find(name)))


@pytest.mark.parametrize("name", ["ring.all_reduce", "tree.all_reduce", "halving.all_reduce"])
def test_float32_travels_as_bfloat16_where_asked(pod, name):
    mesh = pod("h100", hosts=2)
    check(*compiled(mesh, find(f"{name} @ gpu"), dtype=jnp.float32, wire=Cast("bfloat16")))


@pytest.mark.parametrize("name", LIBRARY)
def test_64_hosts(pod, name):
    """Over all 512 GPUs or else over the hosts, where that takes at most 64 rounds."""
    for axes in ("(host, gpu)", "host"):
        schedule = find(f"{name} @ {axes}")
        if verify(schedule, host=64, gpu=8).rounds <= 64:
            return check(*compiled(pod("h100", hosts=64), schedule, elements=8))
    pytest.skip("more than 64 rounds")
