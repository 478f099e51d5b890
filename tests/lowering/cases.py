"""What the tests of lowering share: meshes, tell-tale data, quick compilation, and the battery's check.

Loaded with ``library.load``, by path: tests are no package.
"""

import functools
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import collc
from collc.analysis import reference
from collc.analysis.certificate import verify
from collc.language.algebra import Schedule
from collc.language.expand import permutation
from collc.lowering.primitive import bind
from collc.lowering.wire import Plain

DTYPES = ("float32", "bfloat16", "int32")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
# The public function of a kind, where it has one, in the form in which dimension 0 is what is cut.
PUBLIC: dict[str, Callable[..., Any]] = {
    "all_reduce": collc.psum,
    "reduce_scatter": functools.partial(collc.psum_scatter, tiled=True),
    "all_gather": functools.partial(collc.all_gather, tiled=True),
    "all_to_all": functools.partial(collc.all_to_all, tiled=True),
    "broadcast": collc.pbroadcast,
}


def mesh_of(sizes: Mapping[str, int], kind: AxisType = AxisType.Auto) -> Mesh:
    """A mesh of the first devices."""
    devices = np.array(jax.devices()[: math.prod(sizes.values())]).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(kind,) * len(sizes))


def on_ranks(
    body: Callable[..., Any], mesh: Mesh, *, check_vma: bool = False
) -> Callable[..., Any]:
    """``body`` on every rank: global arrays [mesh..., shape...], of which a rank sees its [shape...]."""
    k = len(mesh.axis_names)

    def local(*xs: Any) -> Any:
        out = body(*jax.tree.map(lambda x: x.reshape(x.shape[k:]), xs))
        return jax.tree.map(lambda y: jnp.reshape(y, (1,) * k + jnp.shape(y)), out)

    spec = P(*mesh.axis_names)
    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)


def run(
    body: Callable[..., Any], *xs: Any, sizes: Mapping[str, int], check_vma: bool = False
) -> Any:
    """What ``body`` makes of arrays [mesh..., ...] on a mesh of these sizes."""
    return quick(on_ranks(body, mesh_of(sizes), check_vma=check_vma))(*xs)


def trace(body: Callable[..., Any], *xs: Any, sizes: Mapping[str, int]) -> Any:
    """The shapes of what ``run`` returns; nothing is compiled."""
    return jax.eval_shape(on_ranks(body, mesh_of(sizes)), *xs)


def equal(ours: Any, theirs: Any) -> None:
    """Pytrees of equal structure, shapes, dtypes and values."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(a.astype(np.complex128), b.astype(np.complex128))


@functools.cache
def _cheap() -> dict[str, Any]:
    """Options under which XLA:CPU compiles three times as fast, of those that this version has."""
    found = {}
    for option, value in {
        "xla_backend_optimization_level": 0,
        "xla_cpu_use_fusion_emitters": False,
    }.items():
        try:
            jax.jit(lambda x: x + 1, compiler_options={option: value})(0)
        except jax.errors.JaxRuntimeError:
            continue
        found[option] = value
    return found


def quick(f: Callable[..., Any]) -> Callable[..., Any]:
    """``jit`` for functions that run once: what is saved is the compilation."""
    return jax.jit(f, compiler_options=_cheap())


def tell_tale(
    kind: str, op: str, dtype: str, ranks: int, shape: tuple[int, ...], seed: int = 0
) -> np.ndarray:
    """A number for each rank and place that no other has, [ranks, *shape], of which all sums are exact.

    bfloat16 holds integers to 256: there each place of a sum is carried by one rank, the others have
    zeros. Maxima are of negative numbers and minima of positive ones, to neither of which a zero,
    as those get who receive nothing, may come in.
    """
    size = math.prod(shape)
    rng = np.random.default_rng([seed, ranks, size])
    if dtype == "bfloat16":
        values = (rng.permutation(ranks * size) % 256 + 1).reshape(ranks, size)
        if op == "sum" and kind in ("all_reduce", "reduce_scatter", "reduce"):
            values = values * ((np.arange(ranks)[:, None] + seed + np.arange(size)) % ranks == 0)
    else:
        top = 1 << (19 if dtype == "float32" else 24)
        values = 1 + rng.choice(top - 1, ranks * size, replace=False)
    values = -values if op == "max" else values
    return values.reshape(ranks, *shape).astype(jnp.dtype(dtype))


def grouped(x: np.ndarray, axes: tuple[str, ...], order: tuple[str, ...]) -> np.ndarray:
    """[mesh..., shape...] as [groups, ranks linear in ``order``, shape...]."""
    others = [a for a in axes if a not in order]
    k = len(axes)
    x = x.transpose(*(axes.index(a) for a in (*others, *order)), *range(k, x.ndim))
    lead = x.shape[: len(others)], x.shape[len(others) : k]
    return x.reshape(*map(math.prod, lead), *x.shape[k:])


def ungrouped(x: np.ndarray, sizes: Mapping[str, int], order: tuple[str, ...]) -> np.ndarray:
    """The way back."""
    others = [a for a in sizes if a not in order]
    now = [*others, *order]
    x = x.reshape(*(sizes[a] for a in now), *x.shape[2:])
    k = len(now)
    return x.transpose(*(now.index(a) for a in sizes), *range(k, x.ndim))


def roots_of(
    schedule: Schedule, sizes: Mapping[str, int], order: tuple[str, ...]
) -> tuple[int, ...]:
    """The rank of each root, linear in ``order``."""
    at: dict[str, np.ndarray] = dict.fromkeys(order, np.zeros(1, int))
    for leaf in schedule.leaves():
        if leaf.facing.name in ROOTED:
            shape = [sizes[a] for a in leaf.axes]
            ranks = permutation(leaf.relabels, math.prod(shape))[: leaf.roots]
            at.update(zip(leaf.axes, np.unravel_index(ranks, shape), strict=True))
    each = np.broadcast_arrays(*(at[a] for a in order))
    return tuple(np.ravel_multi_index(each, [sizes[a] for a in order]).tolist())


def check(
    schedule: Schedule,
    sizes: Mapping[str, int],
    order: tuple[str, ...] | None = None,
    *,
    wide: bool = True,
    lean: bool = False,
) -> None:
    """Proof, NumPy reference and devices agree, exactly, on what the placed schedule does.

    One compilation serves all sizes and dtypes. ``order``: the axes in the order in which ranks and
    chunks are linear, that of the mesh by default. ``wide``: also max and min, and another dtype
    for each size. ``lean``: one size and dtype, and what NumPy makes of the cells, no pytree.
    """
    order = order or tuple(a for a in sizes if a in schedule.axes)
    certificate = verify(schedule, **sizes)
    kind = certificate.schedule.collective.name
    n = math.prod(sizes[a] for a in order)
    groups = math.prod(sizes.values()) // n
    lead = n if kind in ("reduce_scatter", "scatter", "all_to_all") else 1
    seed = zlib.crc32(f"{schedule}{n}".encode()) % 997

    def data(op: str, dtype: str, *shape: int) -> np.ndarray:
        """[groups, n, ...]"""
        parts = [tell_tale(kind, op, dtype, n, shape, seed + g) for g in range(groups)]
        return np.stack(parts)

    reference_data = flat = None
    if not certificate.trusted:
        flat = reference.flatten(schedule, {a: sizes[a] for a in order})
        per_rank = int(flat.starts.any(axis=0).sum())  # of all cells
        if not whole(flat.kind.before):
            per_rank //= n
        reference_data = data("sum", "int32", per_rank, 2)
    dtypes = [DTYPES[(i + n) % 3] for i in range(3)]
    parts = [1, max(n - 1, 1), n + 2]  # each smaller than n, or not divisible by it, but for n = 1
    # Separate operands of one call, by operation.
    operands: dict[str, list[np.ndarray]] = {
        "sum": [data("sum", d, lead * p) for p, d in zip(parts, dtypes, strict=True)]
        + [data("sum", dtypes[0], 0)]
    }
    # The last has a dimension that is carried along.
    operands["sum"].append(
        reference_data if reference_data is not None else data("sum", dtypes[1], lead * 3, 2)
    )
    if wide and kind in ("all_reduce", "reduce_scatter", "reduce"):
        operands["max"] = [data("max", dtypes[2], lead * (n + 1))]
        operands["min"] = [data("min", dtypes[0], lead * (n + 1))]
    # And leaves of a pytree, which travel together by dtype.
    if lean:
        operands = {"sum": operands["sum"][2:3] + operands["sum"][-1:]}
    leaves = [
        data("sum", d, lead * p)
        for i, d in enumerate(DTYPES if wide else dtypes[:1])
        for p in (0, 1, n + i)
    ]
    roots = roots_of(schedule, sizes, order) if kind in ROOTED else (0,)
    public = PUBLIC.get(kind)
    several = len(roots) > 1  # none of which has the whole
    if lean or certificate.consistent is False or several:
        public = None
    source = {"source": roots[0]} if kind == "broadcast" else {}

    def body(operands: Any, leaves: Any) -> Any:
        alone = {
            op: bind(xs, certificate, op=op, wire=Plain(), drop=False)
            for op, xs in operands.items()
        }
        return alone, public(leaves, schedule, **source) if public else None

    mesh = mesh_of(sizes)
    inputs = jax.tree.map(lambda x: ungrouped(x, sizes, order), (operands, leaves))
    outputs = quick(on_ranks(body, mesh))(*inputs)
    alone, joined = jax.tree.map(lambda y: grouped(np.asarray(y), tuple(sizes), order), outputs)

    for op, xs in operands.items():
        for x, y in zip(xs, alone[op], strict=True):
            compare(kind, op, roots, x, y)
    if public:
        for x, y in zip(leaves, joined, strict=True):
            compare(kind, "sum", roots, x, y)
    if flat is not None:
        assert flat.roots == roots
        for x, y in zip(reference_data, alone["sum"][-1], strict=True):
            as_reference(flat, x, y)


def whole(state: str) -> bool:
    """Whether a rank's operand is the whole buffer, with a place for each cell."""
    return state in ("partial", "root", "replica")


def compare(kind: str, op: str, roots: tuple[int, ...], x: np.ndarray, y: np.ndarray) -> None:
    """Outputs [groups, n, ...] are what the collective makes of inputs [groups, n, ...], bit for bit."""
    for xs, ys in zip(x, y, strict=True):
        want = reference.collective(kind, xs, op, roots)
        held: Any = slice(None)
        if kind in ("reduce", "gather"):
            held = reference.rooted(roots, want.shape[1]) == np.arange(len(xs))[:, None]
        assert ys.dtype == xs.dtype
        assert ys.shape == want.shape, (ys.shape, want.shape)
        np.testing.assert_array_equal(
            ys[held].astype(np.float64),
            want[held].astype(np.float64),
            f"{op} of {xs.dtype} {xs.shape}",
        )


def as_reference(flat: Any, x: np.ndarray, y: np.ndarray) -> None:
    """What the devices made of the cells x [n, cells that a rank starts with, 2], NumPy makes too."""
    cells = np.zeros((flat.n, flat.cells, 2), x.dtype)
    for r in range(flat.n):
        starts = flat.starts[r]
        cells[r, starts] = x[r][starts] if whole(flat.kind.before) else x[r][: starts.sum()]
    held = reference.run(flat, cells)
    for r in range(flat.n):
        ends = flat.ends[r]
        if ends.any():
            got = y[r].reshape(-1, 2)
            np.testing.assert_array_equal(
                got[ends] if whole(flat.kind.after) else got, held[r, ends]
            )


assert ml_dtypes  # gives NumPy its bfloat16
