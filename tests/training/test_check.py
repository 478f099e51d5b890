"""The replication check: what varies, and which sums it refuses."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from collc.errors import StepError
from collc.training.check.replication import check
from collc.training.check.values import user_line

from .stand_in import AXES, BOTH, NONE, W, X, bind, checked, here, loss, mesh, refusal

# -- what varies ----------------------------------------------------------------------------------


def test_unreduced_gradients_vary_and_the_chain_names_lines():
    def step(w, x):
        y = x @ w
        value, grads = jax.value_and_grad(loss)(w, x)
        return w - grads, value, y, x, w

    found = checked(step)
    assert found.varying == (BOTH, BOTH, BOTH, BOTH, NONE)
    assert found.chains[0][0].startswith(here(loss, "return"))
    assert found.chains[0][-1] == here(step, "return w - grads") + " in step"
    assert found.chains[2] == (here(step, "y = x @ w") + " in step",)
    assert found.chains[3] == ("an argument",)
    assert found.chains[4] == ()


@pytest.mark.parametrize("pmean", [lax.pmean, bind])
def test_reduced_gradients_do_not_vary(pmean):
    def step(w, x):
        value, grads = jax.value_and_grad(loss)(w, x)
        return w - pmean(grads, ("host", "gpu")), pmean(value, ("gpu",))

    found = checked(step)
    assert found.varying == (NONE, frozenset({"host"}))
    assert found.notes == ()


def test_per_example_outputs_vary():
    assert checked(lambda w, x: (x @ w - 1) ** 2).varying == (BOTH,)


def test_constants_and_replicated_values_do_not():
    assert checked(lambda w, x: (jnp.ones(3) * 2, w.sum(), jnp.arange(3))).varying == (NONE,) * 3


def test_axis_index_taints():
    def step(w, x):
        return w + lax.axis_index("gpu"), w + lax.axis_index(("host", "gpu"))

    assert checked(step).varying == (frozenset({"gpu"}), BOTH)
    assert checked(step).chains[0] == (here(step, "lax.axis_index") + " in step",)


@pytest.mark.parametrize(
    "collective, varying",
    [
        (lambda w, x: lax.psum(x, "gpu"), {"host"}),
        (lambda w, x: lax.pmax(x, ("gpu", "host")), set()),
        (lambda w, x: lax.pmin(x, "host"), {"gpu"}),
        (lambda w, x: lax.all_gather(x, "gpu"), {"host"}),
        (lambda w, x: lax.all_gather(x, "gpu", tiled=True), {"host"}),
        (lambda w, x: lax.pbroadcast(x, ("gpu",), 0), {"host"}),
        (lambda w, x: lax.psum_scatter(jnp.tile(x, (4, 1)), "gpu", tiled=True), BOTH),
        (lambda w, x: lax.all_to_all(jnp.tile(w, (4, 1)), "gpu", 0, 0), {"gpu"}),
        (lambda w, x: lax.ppermute(w, "gpu", [(0, 1)]), {"gpu"}),
        (lambda w, x: lax.ppermute(w, "gpu", [(i, (i + 1) % 4) for i in range(4)]), set()),
        (lambda w, x: lax.pshuffle(w, "gpu", [1, 0, 3, 2]), set()),
        (lambda w, x: lax.pshuffle(x, "gpu", [1, 0, 3, 2]), BOTH),
        (lambda w, x: lax.psum(x, "gpu", axis_index_groups=[[0, 1], [2, 3]]), BOTH),
        (lambda w, x: lax.all_gather(x, "gpu", axis_index_groups=[[0, 1], [2, 3]]), BOTH),
        (lambda w, x: bind(x, axes=("gpu",), op="max"), {"host"}),
        (lambda w, x: bind(x, axes=("gpu",), kind="all_gather", op="sum"), {"host"}),
        (lambda w, x: bind(x, axes=("gpu",), kind="broadcast", op="sum"), {"host"}),
        (lambda w, x: bind(x, axes=("gpu",), kind="reduce", op="sum"), BOTH),
        (lambda w, x: bind(w, axes=("gpu",), kind="scatter", op="sum"), {"gpu"}),
        (lambda w, x: bind(w, axes=("gpu",), kind="gather", op="sum"), {"gpu"}),
        (lambda w, x: bind(w, axes=("gpu",), kind="all_to_all", op="sum"), {"gpu"}),
        (lambda w, x: bind(x, axes=("gpu",), kind="reduce_scatter", op="sum"), BOTH),
    ],
)
def test_each_collective(collective, varying):
    assert checked(collective).varying == (frozenset(varying),)


def test_typed_collectives_have_the_same_rules():
    """Under check_vma=True jax binds psum_invariant and pvary instead."""
    seen = []

    def step(w, x):
        y = lax.pcast(w, "gpu", to="varying") + x
        return lax.psum(x, "gpu"), y, lax.pmax(x, "gpu"), lax.all_gather(x, "gpu")

    def body(w, x):
        seen.append(check(jax.make_jaxpr(step)(w, x), [NONE, BOTH], AXES))
        return x

    spec = P(("host", "gpu"))
    jax.eval_shape(jax.shard_map(body, mesh=mesh(), in_specs=(P(), spec), out_specs=spec), W, X)
    assert seen[0].varying == ({"host"}, BOTH, {"host"}, {"host"})
    names = {e.primitive.name for e in jaxpr_eqns(seen[0])}
    assert {"psum_invariant", "pvary"} <= names


def jaxpr_eqns(found):
    return getattr(found.jaxpr, "jaxpr", found.jaxpr).eqns


# -- sums of what is the same ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "psum, name",
    [(lax.psum, "lax.psum"), (partial(bind, op="sum"), "collc.psum")],
    ids=["lax", "ours"],
)
def test_a_second_sum_is_refused_with_its_line(psum, name):
    def step(w, x):
        once = psum(jax.grad(loss)(w, x), "gpu")
        return psum(once, "gpu")  # the second

    message = refusal(step)
    assert message.startswith(here(step, "# the second"))
    assert f"{name} sums over gpu" in message
    assert "multiplies it by 4. Drop the second reduction, or use pmean." in message


def test_a_sum_over_two_axes_of_which_one_is_reduced():
    message = refusal(lambda w, x: lax.psum(lax.psum(x, "gpu"), ("host", "gpu")))
    assert "lax.psum sums over host and gpu" in message
    assert "the same on all ranks of gpu: the sum multiplies it by 4" in message


def test_a_scattered_sum_of_the_same_is_refused():
    def step(w, x):
        return lax.psum_scatter(jnp.tile(w, 4), "gpu", tiled=True)

    assert "lax.psum_scatter sums over gpu" in refusal(step)


def test_constants_may_be_summed():
    def step(w, x):
        count = lax.psum(jnp.ones(()), ("host", "gpu")) * lax.psum(1, "gpu")
        return lax.psum(x.sum(), ("host", "gpu")) / count

    assert checked(step).varying == (NONE,)


def test_a_psum_of_groups_is_refused_too():
    groups = [[0, 1], [2, 3]]
    message = refusal(lambda w, x: lax.psum(w, "gpu", axis_index_groups=groups))
    assert "multiplies it by 2" in message


@pytest.mark.parametrize("reduce", [lax.pmean, lax.psum, bind])
@pytest.mark.parametrize("jit", [False, True])
def test_a_loss_reduced_inside_grad_is_refused(reduce, jit):
    def step(w, x):
        def wrong(w):
            return reduce(loss(w, x), ("host", "gpu"))  # inside

        return lax.pmean(jax.grad(jax.jit(wrong) if jit else wrong)(w), ("host", "gpu"))

    message = refusal(step)
    assert "loss reduced inside grad" in message
    assert "Differentiate the local loss, reduce after" in message
    assert message.startswith(here(step, "# inside"))


def test_a_reduced_metric_beside_the_loss_is_no_reduced_loss():
    """Its cotangent is zero, also where scan has made an array of it."""

    def step(w, x):
        def body(c, t):
            y = t @ w
            return (c[0] + y**2, lax.pmean(y, ("host", "gpu"))), y

        def total(w):
            (out, metric), _ = lax.scan(lambda c, t: body(c, t * w), (0.0, 0.0), x)
            return out, metric

        grads, metric = jax.grad(total, has_aux=True)(w)
        return lax.pmean(grads, ("host", "gpu")), metric

    assert checked(step).varying == (NONE, NONE)


def test_zero_cotangents_and_unused_sums_do_no_harm():
    def step(w, x):
        lax.psum(w, "gpu")
        _, vjp = jax.vjp(lambda w: (loss(w, x), lax.psum(loss(w, x), "gpu")), w)
        return vjp((jnp.ones(()), jnp.zeros(())))

    assert checked(step).varying == (BOTH,)


def test_the_mean_of_the_same_is_right_and_noted():
    def step(w, x):
        y = lax.pmean(x.sum(), ("host", "gpu"))
        return lax.pmean(w, "gpu"), lax.pmean({"a": y}, ("host", "gpu")), lax.psum(w, "gpu") * 0.25

    found = checked(step)
    assert found.varying == (NONE,) * 3
    assert len(found.notes) == 2  # by source line
    assert "mean over gpu of what is already the same there" in found.notes[0]


# -- what is refused besides ----------------------------------------------------------------------


def test_collectives_under_a_varying_predicate():
    def branch(w, x):
        return lax.cond(x[0, 0] > 0, lambda w: lax.pmax(x, "gpu").sum() * w, lambda w: w, w)  # cond

    def deeper(w, x):
        def inner(w):
            return lax.fori_loop(0, 2, lambda i, c: bind(c * x.sum()), w)

        return lax.cond(x[0, 0] > 0, jax.jit(inner), lambda w: w, w)

    def nested(w, x):
        def inner(w):
            return lax.cond(w[0] > 0, lambda: lax.psum(x, "gpu").sum(0), lambda: w)

        return lax.cond(x[0, 0] > 0, inner, lambda w: w, w)

    def body(w, x):
        return lax.while_loop(lambda c: c.sum() < 3, lambda c: lax.pmean(c + 1, "host"), x)

    def test(w, x):
        return lax.while_loop(lambda c: lax.pmax(c + x, "gpu").sum() < 3, lambda c: c + 1, 0.0)

    message = refusal(branch)
    assert message.startswith(here(branch, "# cond"))
    assert "lax.pmax over gpu stands inside a cond" in message
    assert "differs between the ranks of gpu" in message
    assert "ranks would wait for each other for ever" in message
    assert "collc.pmean over host and gpu" in refusal(deeper)
    assert "inside a while" in refusal(body)
    assert "since test_check.py" in refusal(nested)
    # The test varies over host only: ranks of one host agree.
    assert checked(test).varying == (frozenset({"host"}),)


@pytest.mark.parametrize(
    "permute", [lambda x: lax.pshuffle(x, "gpu", [1, 0, 3, 2]), partial(bind, axes=("gpu",))]
)
def test_a_permute_waits_for_all_devices(permute):
    """Not only for those of its axis: hosts that part ways would hang as well."""

    def step(w, x):
        return lax.cond(lax.axis_index("host") == 0, lambda: permute(x), lambda: x)

    assert "differs between the ranks of host (since test_check.py" in refusal(step)


def test_a_collective_under_a_uniform_predicate_passes():
    def step(w, x):
        return lax.cond(w[0] > 0, lambda: lax.psum(x, ("host", "gpu")), lambda: jnp.zeros((2, 3)))

    assert checked(step).varying == (NONE,)


def test_unknown_higher_order_primitives_are_refused():
    apply = Primitive("apply_twice")
    apply.def_abstract_eval(lambda x, **_: x)
    inner = jax.make_jaxpr(jnp.sin)(W)
    for param in (inner, (inner, (inner,))):
        assert "'apply_twice' calls a function" in refusal(lambda w, x: apply.bind(w, f=param))  # noqa: B023


def test_unknown_primitives_with_an_axis_are_refused():
    strange = Primitive("strange_sum")
    strange.def_abstract_eval(lambda x, **_: x)
    message = refusal(lambda w, x: strange.bind(x, axis_name="gpu"))
    assert "'strange_sum' works over gpu" in message
    assert checked(lambda w, x: strange.bind(x, axis_name="b", name="gpu")).varying == (BOTH,)


def test_an_unknown_kind_of_ours_is_refused():
    assert "'exotic'" in refusal(lambda w, x: bind(x, kind="exotic"))


def test_mutable_references_are_refused():
    def step(w, x):
        ref = jax.new_ref(w)
        ref[...] += 1
        return ref[...]

    assert "mutable reference" in refusal(step)


def test_a_nested_shard_map_is_refused():
    def step(w, x):
        return jax.shard_map(jnp.sin, mesh=half, in_specs=P(), out_specs=P(), check_vma=False)(w)

    half = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    jaxpr = jax.make_jaxpr(step)(W, X)
    with pytest.raises(StepError, match=r"shard_map inside a decorated step"):
        check(jaxpr, [NONE, BOTH], AXES)


def test_the_number_of_arguments():
    with pytest.raises(StepError, match="1 arguments, not 2"):
        check(jax.make_jaxpr(jnp.sin)(W), [NONE, NONE], AXES)


def test_user_line():
    jaxpr = jax.make_jaxpr(lambda w: jnp.sin(w))(W)
    (eqn,) = getattr(jaxpr, "jaxpr", jaxpr).eqns
    assert user_line(eqn) == here(test_user_line, "jnp.sin(w)") + " in <lambda>"
