"""Axes that stay with XLA: no byte more on them than in the plain step, the plan's on the others."""

import functools
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import collc
from collc.errors import DataError
from collc.language.library import load
from collc.receipts.hlo import count, parse_hlo

cases = load(Path(__file__).parent / "cases.py")

KINDS = [AxisType.Auto, AxisType.Explicit]


def loss_of(kind, which):
    """The loss of a device. With Explicit axes JAX wants to be told how a sharded sum comes out."""
    out = P(None, None) if kind == AxisType.Explicit and which == 0 else None

    def loss(w, x):
        y = jnp.matmul(jnp.tanh(x @ w["a"]), w["b"], out_sharding=out) + w["c"]
        return jnp.mean((y - 1) ** 2)

    return loss


def weights():
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.normal(size=shape) / 4, jnp.float32)
        for name, shape in {"a": (24, 32), "b": (32, 40), "c": (40,)}.items()
    }


def shardings(axis):
    """Columns then rows, with the bias whole; and rows then columns, with the bias sharded."""
    return [
        {"a": P(None, axis), "b": P(axis, None), "c": P()},
        {"a": P(axis, None), "b": P(None, axis), "c": P(axis)},
    ]


def put(mesh, tree, specs):
    return jax.tree.map(
        lambda v, s: jax.device_put(v, NamedSharding(mesh, s)),
        tree,
        specs,
        is_leaf=lambda s: isinstance(s, P),
    )


def plain(step, mesh, manual):
    """``step`` reduced by lax over the manual axes."""

    def body(w, x):
        return jax.tree.map(lambda y: lax.pmean(y, manual), step(w, x))

    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(P(), P(manual)),
        out_specs=P(),
        axis_names=set(manual),
        check_vma=False,
    )


def collectives(f, *args):
    text = jax.jit(f).lower(*args).compile().as_text()
    return parse_hlo(text)


def along(found, mesh, axes):
    """The collectives among devices that differ on these axes alone, and the others, without names.

    XLA joins and splits all-reduces, so what counts is the bytes by kind.
    """
    coordinates = np.stack(np.unravel_index(np.arange(mesh.devices.size), mesh.devices.shape))
    inside: Counter = Counter()
    outside: Counter = Counter()
    for c in found:
        differ = {
            mesh.axis_names[i]
            for group in c.partners
            for i in range(len(mesh.axis_names))
            if len(set(coordinates[i][list(group)])) > 1
        }
        (inside if differ <= set(axes) else outside)[c.kind] += c.bytes * c.count
    return inside, outside


def compare(ours, theirs, mesh, manual, *args):
    """Equal results; the automatic axes' collectives equal; on the others the plan's permutes alone."""
    with jax.set_mesh(mesh):
        mine, xlas = collectives(ours, *args), collectives(theirs, *args)
        a, b = jax.jit(ours)(*args), jax.jit(theirs)(*args)
    auto = [axis for axis in mesh.axis_names if axis not in manual]
    my_auto, my_manual = along(mine, mesh, auto)
    xla_auto, xla_manual = along(xlas, mesh, auto)
    assert my_auto == xla_auto
    assert set(my_manual) == {"collective-permute"} and set(xla_manual) == {"all-reduce"}
    for one, two in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(two), rtol=1e-4, atol=1e-6)
    return mine, my_manual["collective-permute"], xla_manual["all-reduce"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", ["model", "fsdp"])
@pytest.mark.parametrize("which", [0, 1])
def test_value_and_grad(kind, axis, which):
    mesh = cases.mesh_of({"data": 4, axis: 2}, kind)
    plan = collc.plan(mesh, {"data": "ring"})
    specs = shardings(axis)[which]
    w = put(mesh, weights(), specs)
    # FSDP splits the batch over its axis, too; on an Explicit mesh JAX has no rule for that product.
    split = ("data", axis) if axis == "fsdp" and kind == AxisType.Auto else "data"
    x = jax.device_put(jnp.arange(16 * 24.0).reshape(16, 24) / 100, NamedSharding(mesh, P(split)))
    loss = loss_of(kind, which)
    ours = collc.value_and_grad(loss, plan, specs=specs if kind == AxisType.Auto else None)
    step = plain(jax.value_and_grad(loss), mesh, ("data",))
    _, permuted, reduced = compare(ours, step, mesh, ("data",), w, x)
    # A ring sends 2 (n - 1) / n of what is on a device; dimensions here divide, the loss is padded.
    size = reduced // 4 - 1
    assert permuted == 6 * 4 * (size // 4 + 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", [0, 1])
def test_pmean_in_a_shard_map(kind, which):
    """Without a step: the caller's own shard_map over one axis of two, typed and untyped."""
    mesh = cases.mesh_of({"data": 4, "model": 2}, kind)
    specs = shardings("model")[which]
    w = put(mesh, weights(), specs)
    x = jax.device_put(jnp.ones((16, 24)), NamedSharding(mesh, P("data")))
    known = specs if kind == AxisType.Auto else None
    loss = loss_of(kind, which)

    def body(w, x):
        w = jax.tree.map(lambda v: lax.pcast(v, ("data",), to="varying"), w)
        return collc.pmean(jax.grad(loss)(w, x), "ring.all_reduce @ data", specs=known)

    for check_vma in (True, False):
        ours = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P(),
            axis_names={"data"},
            check_vma=check_vma,
        )
        compare(ours, plain(jax.grad(loss), mesh, ("data",)), mesh, ("data",), w, x)


def test_three_axes():
    """The hierarchical plan on two of three axes."""
    for kind in KINDS:
        mesh = cases.mesh_of({"host": 2, "gpu": 2, "model": 2}, kind)
        plan = collc.plan(mesh, {"gpu": "ring", "host": "tree"})
        specs = shardings("model")[0]
        w = put(mesh, weights(), specs)
        x = jax.device_put(jnp.ones((8, 24)) * 0.1, NamedSharding(mesh, P(("host", "gpu"))))
        loss = loss_of(kind, 0)
        ours = collc.value_and_grad(loss, plan, specs=specs if kind == AxisType.Auto else None)
        step = plain(jax.value_and_grad(loss), mesh, ("host", "gpu"))
        found, _, _ = compare(ours, step, mesh, ("host", "gpu"), w, x)
        rounds = plan.certificate("all_reduce").rounds
        # XLA may join the messages of several leaves that go the same way, never split them.
        assert rounds <= count(found)["collective-permute"] <= 4 * rounds


class Net(nnx.Module):
    def __init__(self, rngs):
        normal = nnx.initializers.normal(0.3)
        self.a = nnx.Param(normal(rngs.params(), (24, 32)), out_sharding=(None, "model"))
        self.b = nnx.Param(normal(rngs.params(), (32, 40)), out_sharding=("model", None))
        self.c = nnx.Param(jnp.zeros(40), out_sharding=("model",))

    def __call__(self, x):
        return jnp.tanh(x @ self.a[...]) @ self.b[...] + self.c[...]


def test_flax_metadata():
    """The partitioning that Flax keeps beside the variables is known without specs=."""
    mesh = cases.mesh_of({"data": 4, "model": 2})
    plan = collc.plan(mesh, {"data": "ring"})

    def loss(model, x):
        return jnp.mean((model(x) - 1) ** 2)

    with jax.set_mesh(mesh):
        model = Net(nnx.Rngs(0))
        graph, state = nnx.split(model)
        state = jax.tree.map(
            lambda v, s: jax.device_put(v, NamedSharding(mesh, s)),
            state,
            nnx.get_partition_spec(state),
        )
        x = jax.device_put(jnp.ones((16, 24)), NamedSharding(mesh, P("data")))

        def ours(state, x):
            value, grads = collc.value_and_grad(loss, plan)(nnx.merge(graph, state), x)
            return value, nnx.to_pure_dict(grads)

        def one(state, x):
            value, grads = nnx.value_and_grad(loss)(nnx.merge(graph, state), x)
            return value, nnx.to_pure_dict(grads)

        compare(ours, plain(one, mesh, ("data",)), mesh, ("data",), state, x)


def test_no_dimension_is_free():
    """Where every dimension is sharded, the inner part of one is cut."""
    mesh = cases.mesh_of({"data": 2, "a": 2, "b": 2})
    specs = P("a", "b")
    x = jax.device_put(jnp.arange(8 * 12.0).reshape(8, 12), NamedSharding(mesh, specs))

    def over(psum):
        def body(x):
            return psum(x * (1 + lax.axis_index("data")))

        return jax.shard_map(
            body, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"}, check_vma=False
        )

    ours = over(lambda x: collc.psum(x, "ring.all_reduce @ data", specs=specs))
    with jax.set_mesh(mesh):
        found = collectives(ours, x)
        np.testing.assert_array_equal(np.asarray(jax.jit(ours)(x)), np.asarray(x) * 3)
    assert set(count(found)) == {"collective-permute"}
    assert sum(c.bytes * c.count for c in found) == 8 * 12 * 4 // 4


@pytest.mark.parametrize(
    "specs, words",
    [
        (None, r"shape \(24, 32\) .* automatic axes model: .*unknown inside jit. Say specs="),
        ([P()], "specs= has to be a pytree like the value"),
        (
            {"a": P(None, None, "model"), "b": P(), "c": P()},
            r"more entries than .* shape \(24, 32\)",
        ),
    ],
)
def test_unknown_sharding_is_refused(specs, words):
    mesh = cases.mesh_of({"data": 4, "model": 2})
    f = jax.shard_map(
        functools.partial(collc.pmean, schedule="ring.all_reduce @ data", specs=specs),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        axis_names={"data"},
        check_vma=False,
    )
    with pytest.raises(DataError, match=words):
        jax.eval_shape(f, weights())


def test_native_needs_no_specs():
    """XLA's own collectives leave the sharding alone, whatever it is."""
    mesh = cases.mesh_of({"data": 4, "model": 2})
    w = put(mesh, weights(), shardings("model")[0])

    def over(psum):
        return jax.shard_map(
            psum, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"}, check_vma=False
        )

    with jax.set_mesh(mesh):
        ours = collectives(over(lambda w: collc.psum(w, "native.all_reduce @ data")), w)
        theirs = collectives(over(lambda w: lax.psum(w, "data")), w)
    assert [(c.kind, c.bytes, c.partners) for c in ours] == [
        (c.kind, c.bytes, c.partners) for c in theirs
    ]


def test_a_gather_leaves_sharded_dimensions_alone():
    # Auto only: on an Explicit mesh lax's own all_gather fails here on jax 0.10.
    mesh = cases.mesh_of({"data": 4, "model": 2})
    x = jax.device_put(jnp.arange(4 * 6 * 8.0).reshape(24, 8), NamedSharding(mesh, P("data", None)))
    w = jax.device_put(jnp.arange(12.0).reshape(6, 2), NamedSharding(mesh, P("model", None)))

    def body(x, w):
        return collc.all_gather(w * x.sum(), "ring.all_gather @ data")

    f = jax.jit(
        jax.shard_map(
            body, mesh=mesh, in_specs=(P("data"), P()), out_specs=P(), axis_names={"data"},
            check_vma=False,
        )
    )  # fmt: skip
    with jax.set_mesh(mesh):
        found = parse_hlo(f.lower(x, w).compile().as_text())
        assert count(found) == {"collective-permute": 3}
        assert {c.bytes for c in found} == {w.nbytes // 2}
        sums = np.asarray(x).reshape(4, -1).sum(1)
        np.testing.assert_array_equal(f(x, w), sums[:, None, None] * np.asarray(w))
