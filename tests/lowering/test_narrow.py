"""A narrow wire: what the certificate says of replicas holds in both engines, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import collc
from collc import language as cl
from collc.errors import ScheduleError
from collc.language import ALL, add, copy, ranks
from collc.language.expand import relabelled
from collc.lowering import orbits, tables

N = 4


@cl.all_reduce
def busy(n):
    """Ranks copy a chunk out and add to it in the same step: what they add to is what they kept."""
    c = ranks(n)
    m = [(c + k) % n for k in range(4)]
    yield add(c, m[1], c), add(c, m[3], m[2])
    yield copy(c, c, m[1]), copy(c, m[2], m[3]), add(c, c, m[2]), add(c, m[2], c)
    yield add(c, m[1], m[3]), add(c, m[3], m[1])


@cl.all_reduce
def one_shot(n):
    yield add(ALL, ranks(n)[:, None], (ranks(n)[:, None] + ranks(n)[None, 1:]) % n)


def total(schedule, x, **how):
    mesh = Mesh(np.array(jax.devices()[:N]), ("x",))

    def body(v):
        return collc.psum(v[0], schedule, **how)[None]

    return np.asarray(
        jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))(
            x
        )
    )


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
@pytest.mark.parametrize("engine", ["orbits", "tables"])
def test_replicas_are_equal_where_the_certificate_says_so(order, engine, monkeypatch):
    if engine == "tables":
        monkeypatch.setattr(
            orbits,
            "lower",
            lambda program, place, *values: tables.lower(
                relabelled(program, place.names), place, *values
            ),
        )
    schedule = busy.relabel(order=order) @ "x"
    assert collc.verify(schedule, x=N).narrow
    x = np.random.default_rng(0).normal(size=(N, 64)).astype(np.float32)
    y = total(schedule, x, wire=jnp.bfloat16)
    assert (y == y[0]).all()
    np.testing.assert_allclose(y[0], x.sum(0), atol=0.05)


def test_inconsistent_on_request_only():
    x = np.arange(N * 3, dtype=np.float32).reshape(N, 3)
    with pytest.raises(ScheduleError, match="or say inconsistent=True"):
        total(one_shot @ "x", x)
    assert (total(one_shot @ "x", x, inconsistent=True) == x.sum(0)).all()
    # The largest is the same in any order.
    mesh = Mesh(np.array(jax.devices()[:N]), ("x",))
    most = jax.shard_map(
        lambda v: collc.pmax(v, one_shot @ "x"), mesh=mesh, in_specs=P("x"), out_specs=P()
    )
    assert (most(x) == x.max(0)).all()
    # What is not proved the same is not typed so.
    loose = jax.shard_map(
        lambda v: collc.psum(v, one_shot @ "x", inconsistent=True),
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(loose, x)
