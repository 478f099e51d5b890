"""Derivatives, batching and control flow are those of the lax namesakes, under both check_vma."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import collc
from collc.errors import MeshError
from collc.language.library import load

cases = load(Path(__file__).parent / "cases.py")

N = 4
RS, AG, AR = "ring.reduce_scatter @ x", "ring.all_gather @ x", "ring.all_reduce @ x"
A2A, BC = "pairwise.all_to_all @ x", "tree.broadcast @ x"


def lax_psum(x):
    return lax.psum(x, "x")


# Ours and lax's, on a rank's [8, 3].
PAIRS = {
    "psum": (lambda x: collc.psum(x, AR), lax_psum),
    "psum_tree": (lambda x: collc.psum(x, "tree.double_all_reduce @ x"), lax_psum),
    "psum_native": (lambda x: collc.psum(x, "native.all_reduce @ x"), lax_psum),
    "pmean": (lambda x: collc.pmean(x, AR), lambda x: lax.pmean(x, "x")),
    "psum_scatter": (
        lambda x: collc.psum_scatter(x, RS, tiled=True),
        lambda x: lax.psum_scatter(x, "x", tiled=True),
    ),
    "psum_scatter_0": (
        lambda x: collc.psum_scatter(x[:4], RS),
        # What lax.psum_scatter(x[:4], "x") is: that one fails under vmap with in_axes=1.
        lambda x: lax.psum_scatter(x[:4], "x", tiled=True)[0],
    ),
    "all_gather": (lambda x: collc.all_gather(x, AG), lambda x: lax.all_gather(x, "x")),
    "all_gather_1": (
        lambda x: collc.all_gather(x, "native.all_gather @ x", axis=1, tiled=True),
        lambda x: lax.all_gather(x, "x", axis=1, tiled=True),
    ),
    "all_to_all": (
        lambda x: collc.all_to_all(x, A2A, 0, 1, tiled=True),
        lambda x: lax.all_to_all(x, "x", 0, 1, tiled=True),
    ),
    "all_to_all_0": (
        lambda x: collc.all_to_all(x[:4], A2A),
        lambda x: lax.all_to_all(x[:4], "x", 0, 0),
    ),
}


def broadcast_by_sum(x, source):
    """lax.pbroadcast does not run on CPU; this is the same, and so are its derivatives."""
    return lax.psum(jnp.where(lax.axis_index("x") == source, x, jnp.zeros_like(x)), "x")


def on_x(f, check_vma):
    """f on N ranks; what comes out is stacked over them, whatever its type."""

    def body(x):
        return jax.tree.map(lambda y: jnp.asarray(y)[None], f(x[0]))

    return cases.quick(
        jax.shard_map(
            body,
            mesh=cases.mesh_of({"x": N}),
            in_specs=P("x"),
            out_specs=P("x"),
            check_vma=check_vma,
        )
    )


def numbers(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(N, *shape)), jnp.float32)


def loss(g):
    """Of each rank's own weights, so that a cotangent that goes to the wrong rank is noticed."""

    def of(x):
        y = g(jnp.sin(x))
        weight = 1 + lax.axis_index("x") * 0.5 + jnp.arange(y.size).reshape(y.shape) / y.size
        return jnp.sum(weight * y * y)

    return of


def transforms(g):
    """What is compared, all in one compilation."""
    scalar = loss(g)

    def step(carry, x):
        y = jnp.sum(jnp.tanh(g(x * carry)))
        return carry + 0 * x, y

    def value(x):
        v = jnp.cos(x)
        batch = jnp.stack([x, 2 * x, v])
        square = jnp.stack([batch, -batch])
        return {
            "value": g(x),
            "grad": jax.grad(scalar)(x),
            "value_and_grad": jax.value_and_grad(scalar)(x),
            "jvp": jax.jvp(g, (x,), (v,)),
            "vjp": jax.vjp(g, x)[1](g(v)),
            "vmap": jax.vmap(g)(batch),
            "vmap_1": jax.vmap(g, in_axes=1, out_axes=1)(jnp.moveaxis(batch, 0, 1)),
            "vmap_last": jax.vmap(g, in_axes=-1)(jnp.moveaxis(batch, 0, -1)),
            "vmap_vmap": jax.vmap(jax.vmap(g), in_axes=1)(square),
            "vmap_grad": jax.vmap(jax.grad(scalar))(batch),
            "scan": lax.scan(step, jnp.cos(x), batch),
            "grad_scan": jax.grad(lambda x: lax.scan(step, x, batch)[1].sum())(x),
            "remat": jax.grad(jax.checkpoint(scalar))(x),
            "grad_grad": jax.grad(lambda x: jnp.sum(jax.grad(scalar)(x) ** 2))(x),
            "linearize": jax.linearize(g, x)[1](v),
        }

    return value


def equal(ours, theirs):
    paths = jax.tree_util.tree_leaves_with_path(theirs)
    for (path, b), a in zip(paths, jax.tree.leaves(ours), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5, err_msg=str(path))


@functools.cache
def transformed(g, check_vma):
    return on_x(transforms(g), check_vma)(numbers(8, 3))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", PAIRS)
def test_equal_to_lax(name, check_vma):
    ours, theirs = PAIRS[name]
    equal(transformed(ours, check_vma), transformed(theirs, check_vma))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name, source", [(BC, 0), (BC, 2), ("native.broadcast @ x", 1)])
def test_pbroadcast(name, source, check_vma):
    x = numbers(5, 2)
    found = on_x(transforms(lambda x: collc.pbroadcast(x, name, source=source)), check_vma)(x)
    equal(found, on_x(transforms(lambda x: broadcast_by_sum(x, source)), check_vma)(x))
    np.testing.assert_array_equal(found["value"], np.stack([np.asarray(x)[source]] * N))


@pytest.mark.parametrize("check_vma, each", [(True, 1), (False, 8)])
@pytest.mark.parametrize(
    "name", ["ring.all_reduce @ x", "tree.all_reduce @ x", "native.all_reduce @ x"]
)
def test_the_gradient_of_psum(name, check_vma, each):
    """1 where the result is typed as one value for all ranks; else as many as there are ranks."""

    def body(x):
        return jax.grad(lambda x: collc.psum(x, name).sum())(x)

    mesh = cases.mesh_of({"x": 8})
    f = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=check_vma)
    assert (np.asarray(jax.jit(f)(jnp.ones(16))) == each).all()


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("pair", ["psum", "psum_scatter", "all_gather", "all_to_all"])
def test_hessian(pair, check_vma):
    ours, theirs = (on_x(jax.hessian(loss(g)), check_vma) for g in PAIRS[pair])
    x = numbers(4, 1)
    equal(ours(x), theirs(x))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("ours, theirs", [(collc.pmax, lax.pmax), (collc.pmin, lax.pmin)])
def test_maxima_have_no_derivative(ours, theirs, check_vma):
    def message(g):
        with pytest.raises(NotImplementedError) as e:
            on_x(jax.grad(lambda x: g(x).sum()), check_vma)(numbers(3))
        return str(e.value)

    assert message(lambda x: ours(x, AR)) == message(lambda x: theirs(x, "x"))
    # Where nothing is to be derived, they take part.
    f = on_x(jax.grad(lambda x: (x * ours(lax.stop_gradient(x), AR)).sum()), check_vma)
    g = on_x(jax.grad(lambda x: (x * theirs(lax.stop_gradient(x), "x")).sum()), check_vma)
    equal(f(numbers(3)), g(numbers(3)))


@pytest.mark.parametrize("check_vma", [True, False])
def test_several_leaves(check_vma):
    """Some are batched and some not, some are derived and some not, some are integers."""

    def f(g):
        def value(x):
            def total(a, b):
                y = g({"a": a, "b": b, "i": jnp.arange(3)})
                return jnp.sum(y["a"] ** 2) * jnp.sum(y["b"]) * y["i"].sum()

            b = x[0]
            return (
                jax.grad(total)(x, b),
                jax.grad(total, 1)(x, b),
                jax.vmap(total, (0, None))(jnp.stack([x, -x]), b),
                jax.vmap(total, (None, 0))(x, x),
                jax.vmap(jax.grad(total, (0, 1)), (2, 1))(
                    jnp.stack([x, -x], 2), jnp.stack([b, b], 1)
                ),
            )

        return on_x(value, check_vma)

    x = numbers(4, 3)
    equal(f(lambda t: collc.psum(t, AR))(x), f(lambda t: lax.psum(t, "x"))(x))


@pytest.mark.parametrize("check_vma", [True, False])
def test_two_axes(check_vma):
    """Over all axes, and over one of two, where the other keeps its own sums."""
    mesh = cases.mesh_of({"a": 2, "b": 2})
    text = 'hierarchical("a", "b")'
    x = numbers(5)

    def f(g):
        def body(x):
            return jax.value_and_grad(lambda x: jnp.sum(jnp.sin(g(x)) * (1 + lax.axis_index("b"))))(
                x
            )[1]

        spec = P(("a", "b"))
        return cases.quick(
            jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
        )

    equal(f(lambda x: collc.psum(x, text))(x), f(lambda x: lax.psum(x, ("a", "b")))(x))
    equal(f(lambda x: collc.psum(x, "ring.all_reduce @ b"))(x), f(lambda x: lax.psum(x, "b"))(x))
    for order in (("a", "b"), ("b", "a")):
        ours = f(
            lambda x, o=order: collc.all_gather(
                x, f"ring.all_gather @ ({', '.join(o)})", to="invarying"
            )
        )
        # Without types to= means nothing; jax 0.10 differs there, 0.12 does not.
        to = {"to": "invarying"} if check_vma else {}
        theirs = f(lambda x, o=order, to=to: lax.all_gather(x, o, **to))
        equal(ours(x), theirs(x))


# ---- types --------------------------------------------------------------------------------------


def typed(f, out_specs, check_vma=True):
    mesh = cases.mesh_of({"x": N})
    return jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=out_specs, check_vma=check_vma)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: collc.psum(x, AR),
        lambda x: collc.pmean({"a": x}, "tree.all_reduce @ x")["a"],
        lambda x: collc.pmax(x, "native.all_reduce @ x"),
        lambda x: collc.pbroadcast(x, BC),
        lambda x: collc.all_gather(x, AG, to="invarying"),
    ],
    ids=["psum", "pmean", "pmax", "pbroadcast", "all_gather"],
)
def test_proved_replication_is_typed(f):
    jax.eval_shape(typed(f, P()), numbers(4))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x,
        lambda x: collc.psum_scatter(x[0], RS, tiled=True),
        lambda x: collc.all_gather(x, AG),
        lambda x: collc.all_to_all(x[0], A2A, tiled=True),
    ],
    ids=["none", "psum_scatter", "all_gather", "all_to_all"],
)
def test_what_varies_is_typed_so(f):
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(typed(f, P()), numbers(4))


def test_an_axis_that_is_not_reduced_stays():
    mesh = cases.mesh_of({"a": 2, "b": 2})

    def body(x):
        return collc.psum(x, "ring.all_reduce @ a")

    f = jax.shard_map(body, mesh=mesh, in_specs=P(("a", "b")), out_specs=P("b"))
    assert jax.eval_shape(f, numbers(3)).shape == (2, 3)
    f = jax.shard_map(body, mesh=mesh, in_specs=P(("a", "b")), out_specs=P())
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(f, numbers(3))


# ---- jaxprs -------------------------------------------------------------------------------------


def equations(jaxpr):
    """All equations, of inner jaxprs too."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns")):
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def collectives(f, check_vma=False):
    jaxpr = jax.make_jaxpr(typed(f, P("x"), check_vma))(numbers(8))
    assert "ppermute" not in str(jaxpr)
    return [
        (e.params["kind"], str(e.params["schedule"]), len(e.invars))
        for e in equations(jaxpr)
        if e.primitive.name == "collc_collective"
    ]


def test_one_equation_with_the_name():
    def tree(x):
        return {"a": x, "b": x[0], "i": jnp.arange(3)}

    found = collectives(lambda x: collc.psum(tree(x[0]), AR)["a"])
    assert found == [("all_reduce", AR, 2)]  # an operand for each dtype
    shown = str(jax.make_jaxpr(typed(lambda x: collc.psum(x, AR), P("x"), False))(numbers(2)))
    assert shown.count("collc_collective") == 1
    assert "ring.all_reduce @ x" in shown


@pytest.mark.parametrize(
    "f, dual",
    [
        (
            lambda x: collc.psum(x, "tree.all_reduce @ x"),
            ("all_reduce", "(tree.all_reduce @ x).reversed()"),
        ),
        (
            lambda x: collc.psum_scatter(x, RS, tiled=True),
            ("all_gather", "(ring.reduce_scatter @ x).reversed()"),
        ),
        (lambda x: collc.all_gather(x, AG), ("reduce_scatter", "(ring.all_gather @ x).reversed()")),
        (
            lambda x: collc.all_to_all(x, A2A, tiled=True),
            ("all_to_all", "(pairwise.all_to_all @ x).reversed()"),
        ),
        (lambda x: collc.pbroadcast(x, BC), ("reduce", "(tree.broadcast @ x).reversed()")),
    ],
)
def test_the_transpose_is_the_dual(f, dual):
    _, back = collectives(lambda x: jax.grad(lambda x: f(x).sum())(x[0])[None])
    kind, text = dual
    assert back[0] == kind
    assert collc.parse(back[1]) == collc.parse(text)


def test_typed_reductions_need_no_transpose():
    """Under check_vma the cotangent of a sum arrives whole: nothing is sent for it."""
    found = collectives(lambda x: jax.grad(lambda x: collc.psum(x, AR).sum())(x), check_vma=True)
    assert len(found) == 1


def test_a_vmap_axis_that_hides_the_mesh_s_is_refused():
    f = jax.vmap(lambda u: collc.psum(u, "ring.all_reduce @ x"), axis_name="x")
    with pytest.raises(MeshError, match="vmap has an axis 'x' here, which hides the mesh's"):
        jax.eval_shape(typed(f, P("x"), check_vma=False), numbers(2))
