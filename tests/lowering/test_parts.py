"""Whole leaves from shards, and their gradients back: what travels, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import collc
from collc.errors import DataError, MeshError
from collc.lowering.account import asked

# Rank 0 has 1, the others 1/256: in bfloat16 sums the small ones vanish.
SMALL = jnp.asarray([[1.0], *[[2.0**-8]] * 7], jnp.bfloat16)
EXACT = float(jnp.bfloat16((1 + 7 * 2.0**-8) / 8))


def plan_of(algorithm):
    mesh = jax.make_mesh((8,), ("gpu",), devices=jax.devices()[:8])
    return collc.plan(mesh, {"gpu": algorithm})


def shard(dtype=jnp.bfloat16, **options):
    """[8], one number at each rank, as it is outside a step."""
    return collc.Shard(jnp.arange(8, dtype=dtype).reshape(8, 1), (8,), ("gpu",), **options)


def in_step(plan, function):
    return jax.jit(collc.schedule(plan, batch="x")(function))


def loss(p, x):
    return (collc.all_gather(p) * x[0]).sum()


@pytest.mark.parametrize("algorithm", ["ring", "halving", "native"])
def test_gradients_of_narrow_shards_are_added_in_float32(algorithm):
    step = in_step(plan_of(algorithm), lambda p, x: jax.grad(loss)(p, x))
    for k in range(8):
        found = step(shard(), jnp.roll(SMALL, k, 0))
        assert found.value.dtype == jnp.bfloat16
        assert set(np.asarray(found.value, np.float32).reshape(-1)) == {EXACT}


def test_narrow_shards_are_gathered_as_they_are():
    def sent(function):
        return {
            a.dtype
            for a in asked(jax.make_jaxpr(in_step(plan_of("ring"), function))(shard(), SMALL))
        }

    assert sent(lambda p, x: collc.all_gather(p)) == {"bf16"}
    assert sent(lambda p, x: jax.grad(loss)(p, x)) == {"bf16", "f32"}

    def pulled(p, x):  # what transposes the gradient gathers again
        _, back = jax.vjp(lambda x: jax.grad(loss)(p, x), x)
        return collc.Ranked(back(p))

    assert sent(pulled) == {"bf16", "f32"}


@pytest.mark.parametrize("shape", [(), (3,), (3, 7), (2, 3, 5)])
def test_parts_lie_with_the_first_dimension_fastest(shape):
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    params = {"w": jnp.asarray(whole)}
    parts = collc.server(plan_of("ring"), optax.sgd(1.0)).init(params).params["w"].value
    np.testing.assert_array_equal(np.ravel(parts)[: whole.size], np.ravel(whole, order="F"))


def test_gradients_of_narrow_shards_of_servers_too():
    step = in_step(plan_of("native"), lambda p, x: jax.grad(loss)(p, x))
    star = collc.Shard(jnp.zeros((8, 8), jnp.bfloat16), (8,), ("gpu",), servers=1)
    for k in range(8):
        found = step(star, jnp.roll(SMALL, k, 0))
        np.testing.assert_array_equal(np.asarray(found.value, np.float32)[0], EXACT)


def test_wide_shards_travel_as_they_are():
    step = in_step(plan_of("ring"), lambda p, x: jax.grad(loss)(p, x))
    found = asked(jax.make_jaxpr(step)(shard(jnp.float32), SMALL.astype(jnp.float32)))
    assert {a.dtype for a in found} == {"f32"}


def test_what_cannot_be_gathered():
    plan = plan_of("ring")
    with pytest.raises(
        MeshError, match=r"collc.Shard over gpu.*there is no mesh here.*collc.schedule"
    ):
        collc.all_gather(shard(), plan)
    with pytest.raises(DataError, match="among the shards there is a leaf that is none"):
        in_step(plan, lambda p, x: collc.all_gather({"a": p, "b": x}))(shard(), SMALL)
    with pytest.raises(
        MeshError, match=r"'ring' is taken as an axis.*write 'ring.all_gather @ gpu'"
    ):
        in_step(plan, lambda p, x: collc.all_gather(p, "ring"))(shard(), SMALL)
    with pytest.raises(
        MeshError, match=r"lie over gpu, but the schedule is over host. Take the plan"
    ):
        in_step(plan, lambda p, x: collc.all_gather(p, "host"))(shard(), SMALL)
    with pytest.raises(DataError, match="no effect on the shards of servers=2"):
        in_step(plan, lambda p, x: collc.all_gather(p, "ring.all_gather @ gpu"))(
            shard(servers=2), SMALL
        )


@pytest.mark.parametrize(
    "name",
    "psum pmean pmax pmin psum_scatter all_to_all pbroadcast sync".split(),
)
def test_other_collectives_take_no_shards(name):
    function = getattr(collc, name)
    with pytest.raises(DataError, match=rf"collc.{name}: there is a collc.Shard.*state.push"):
        in_step(plan_of("ring"), lambda p, x: function({"a": [p, x]}))(shard(), SMALL)


def test_value_and_grad_of_a_plan_takes_no_shards():
    plan = plan_of("ring")
    with pytest.raises(DataError, match=r"collc.pmean: there is a collc.Shard"):
        jax.jit(collc.value_and_grad(loss, plan, batch="x"))(shard(), SMALL)
