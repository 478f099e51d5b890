"""The collectives of programs as XLA prints them: kept texts of both jax versions, and this one's."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collc.errors import HloError
from collc.language.library import load
from collc.receipts.hlo import Collective, CollectivePermute, count, parse, parse_hlo

written = load(Path(__file__).parent / "written.py")

RING = tuple((r, (r + 1) % 8) for r in range(8))
ALL = (tuple(range(8)),)
ROWS = ((0, 1, 2, 3), (4, 5, 6, 7))
COLUMNS = ((0, 4), (1, 5), (2, 6), (3, 7))

VERSIONS = pytest.mark.parametrize("version", ["0.10", "0.12"])


@VERSIONS
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_printed_loop(platform, version):
    """scan of 5: a ring of 8 GPUs in each of 2 hosts, or of 4 CPU devices; and a product."""
    found = parse(written.fixture(f"loop-{platform}-{version}"))
    cuda = platform == "cuda"
    n, devices = (8, 16) if cuda else (4, 8)
    ring = tuple((r, r - r % n + (r + 1) % n) for r in range(devices))
    (c,) = found.collectives
    assert isinstance(c, CollectivePermute)
    assert (c.pairs, c.count, c.shapes) == (ring, 5, ((256, 256),))
    # XLA:CPU permutes bfloat16 as float32.
    assert (c.dtypes, c.bytes) == ((("bf16",), 2**17) if cuda else (("f32",), 2**18))
    assert (c.asynchronous, c.kernel) == ((True, "nccl") if cuda else (False, ""))
    assert [w.flops for w in c.beside if w.flops] == ([2 * 256**3] if cuda else [])
    assert c.op_name.endswith(
        "while/body/" + ("closed_call" if version == "0.10" else "eval_jaxpr") + "/ppermute"
    )
    assert (found.name, found.scheduled, found.devices) == ("jit_loop", True, devices)
    assert (found.cuda, found.in_flight) == (cuda, 1)
    assert (found.flops, found.flops_exact) == (5 * 2 * 256**3, True)


@VERSIONS
def test_a_printed_fsdp_step(version):
    """4 layers of [1024, 1024] in bfloat16, sharded over 16 GPUs, 128 rows on each, with remat."""
    found = parse(written.fixture(f"fsdp-cuda-{version}"))
    layer = 2 * 1024 * 1024
    everyone = (tuple(range(16)),)
    shown = [(c.kind, c.count, c.bytes, c.partners, c.operands) for c in found.collectives]
    gather = ("all-gather", 4, layer, everyone, (("bf16", (64, 1024)),))
    assert shown == [
        gather,
        ("all-reduce", 1, 4, everyone, (("f32", ()),)),
        gather,
        ("reduce-scatter", 4, layer // 16, everyone, (("bf16", (1024, 1024)),)),
    ]
    product = 2 * 128 * 1024 * 1024  # forward, again in backward, and the two of backward itself
    assert found.flops == 4 * 4 * product
    assert [w.flops for w in found.collectives[3].beside] == (
        [product, 0] if version == "0.10" else []
    )
    # 0.12 leaves what waits at once without start and done
    waits = [not c.asynchronous for c in found.collectives]
    assert waits == ([False] * 4 if version == "0.10" else [False, False, True, True])


def mutants(text: str):
    """Texts with a line less; each of these is what something else needs."""
    lines = text.splitlines(keepends=True)
    for k, line in enumerate(lines):
        if "-done(" in line or "-start(" in line or " while(" in line or "-permute(" in line:
            yield "".join(lines[:k] + lines[k + 1 :])


@VERSIONS
def test_no_missing_line_goes_unnoticed(version):
    for name in (f"loop-cuda-{version}", f"loop-cpu-{version}", f"fsdp-cuda-{version}"):
        found = list(mutants(written.fixture(name)))
        assert found
        for text in found:
            with pytest.raises(HloError, match="no line above it defines its operand"):
                parse_hlo(text)


# ---- what this jax and XLA:CPU print ------------------------------------------------------------


def mesh(*shape: int) -> Mesh:
    devices = jax.devices()[:8]
    assert len(devices) == 8, "run with XLA_FLAGS=--xla_force_host_platform_device_count=8"
    names = {1: ("x",), 2: ("h", "g")}[len(shape)]
    return Mesh(np.array(devices).reshape(shape), names, axis_types=(AxisType.Auto,) * len(shape))


def read(f, *args) -> tuple[Collective, ...]:
    return parse_hlo(f.lower(*args).compile().as_text())


def compiled(f, *shape: int, dtype=jnp.float32) -> tuple[Collective, ...]:
    m = mesh(*(shape or (8,)))
    spec = P(m.axis_names)
    g = jax.shard_map(f, mesh=m, in_specs=spec, out_specs=spec, check_vma=False)
    return read(jax.jit(g), jnp.zeros(64, dtype))


@pytest.mark.parametrize(
    ("f", "kind", "bytes_"),
    [
        (lambda v: lax.psum(v, "x"), "all-reduce", 32),
        (lambda v: lax.psum_scatter(v, "x", tiled=True), "reduce-scatter", 4),
        (lambda v: lax.all_gather(v, "x", tiled=True), "all-gather", 256),
        (lambda v: lax.all_to_all(v, "x", 0, 0, tiled=True), "all-to-all", 32),
    ],
)
def test_live_grouped(f, kind, bytes_):
    (found,) = compiled(f)
    assert (found.kind, found.bytes, found.partners, found.count) == (kind, bytes_, ALL, 1)
    assert (sum(shape[0] for _, shape in found.operands), found.asynchronous) == (8, False)
    assert "shard_map" in found.op_name


def test_live_axes():
    (g,) = compiled(lambda v: lax.psum(v, "g"), 2, 4)
    (h,) = compiled(lambda v: lax.all_gather(v, "h", tiled=True), 2, 4)
    assert (g.partners, h.partners) == (ROWS, COLUMNS)


def permute(v):
    return lax.ppermute(v, "x", RING)


def test_live_permutes():
    (found,) = compiled(permute, dtype=jnp.int8)
    assert (type(found), found.partners) == (CollectivePermute, RING)
    assert (found.dtypes, found.shapes, found.bytes) == (("s8",), ((8,),), 8)


@pytest.mark.parametrize("trips", [1, 2, 7, 40])
def test_live_loop(trips):
    (found,) = compiled(lambda v: lax.fori_loop(0, trips, lambda i, c: permute(c) * 1.5 + i, v))
    assert (found.count, found.partners, found.bytes) == (trips, RING, 32)


def test_live_unrolled_loop_and_nested_scan():
    f = lambda v: lax.fori_loop(0, 7, lambda i, c: permute(c) + i, v, unroll=2)  # noqa: E731
    assert count(compiled(f)) == {"collective-permute": 7}

    def nested(v):
        def outer(c, _):
            c = lax.scan(lambda c, _: (permute(c) * 2, None), c, None, length=5)[0]
            return lax.psum(c, "x"), None

        return lax.scan(outer, v, None, length=3)[0]

    assert count(compiled(nested)) == {"collective-permute": 15, "all-reduce": 3}


def test_live_gradient_of_a_scan():
    """The backward loop, which XLA rebuilds ("wide."), permutes the other way round."""

    def loss(v):
        step = lambda c, y: (jnp.sin(permute(c) * y), None)  # noqa: E731
        return lax.scan(step, v, jnp.arange(7.0))[0].sum()

    forward, backward = compiled(jax.grad(loss))
    assert (forward.count, forward.partners) == (7, RING)
    assert backward.count == 7
    assert sorted(backward.partners) == sorted((t, s) for s, t in RING)


def test_live_data_dependent_loop_and_branch_are_refused():
    with pytest.raises(HloError, match="does not know how often"):
        compiled(lambda v: lax.while_loop(lambda c: c.sum() < 9, lambda c: permute(c) + 1, v))
    with pytest.raises(HloError, match="different collectives"):
        compiled(lambda v: lax.cond(v[0] > 3, lambda u: lax.psum(u, "x"), lambda u: u * 2, v))


def test_live_automatic_partitioning():
    m = mesh(2, 4)
    f = jax.jit(
        lambda a, b: a @ b,
        in_shardings=(NamedSharding(m, P(None, "g")), NamedSharding(m, P("g", None))),
        out_shardings=NamedSharding(m, P()),
    )
    ones = jnp.ones((16, 16))
    (found,) = read(f, ones, ones)
    assert (found.kind, found.partners, found.bytes) == ("all-reduce", ROWS, 1024)
