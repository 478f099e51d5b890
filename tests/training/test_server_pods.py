"""What a server sends on pods of H100s, and what its push runs beside."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import collc
from collc import consistency

pytestmark = pytest.mark.newest_only

WIDTH, LAYERS = 512, 2
SIZE = LAYERS * 2 * WIDTH * 4 * WIDTH * 4  # bytes of the parameters, float32
SMALL = 1 << 12  # bytes: of what decides whether gradients are finite, and of the loss


def found(mesh, server, tokens):
    """The receipt of a step that pulls, differentiates MLPs, and pushes; and the large collectives."""

    def loss_fn(layers, batch):
        x = batch
        for w in layers:
            x = x + jax.nn.relu(x @ w["up"]) @ w["down"]
        return jnp.mean((x - batch).astype(jnp.float32) ** 2)

    @jax.jit
    @collc.schedule(server.plan, batch="batch")
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.pull(), batch)
        return state.push(grads), collc.pmean(loss)

    def of(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    layer = {"up": of((WIDTH, 4 * WIDTH), P()), "down": of((4 * WIDTH, WIDTH), P())}
    state = jax.eval_shape(server.init, [layer] * LAYERS)
    batch = of((mesh.size * tokens, WIDTH), P(mesh.axis_names))
    traced = step.trace(state, batch)
    flags = {"xla_gpu_autotune_level": 0}
    receipt = collc.receipt(traced.lower().compile(compiler_options=flags), asked=traced)
    return receipt, [e for e in receipt.entries if e.collective.bytes > SMALL]


@pytest.mark.parametrize("servers", [1, 2])
def test_the_bottleneck_of_k_servers(pod, servers):
    """A server sends its part to 7 others, and gradients to the k - 1 other servers."""
    mesh = pod("h100", hosts=1, gpus=8)
    plan = collc.plan(mesh, {"gpu": "native", "host": "native"})
    receipt, _ = found(mesh, collc.server(plan, optax.adamw(3e-4), servers=servers), 512)
    assert receipt.unplanned == 0
    assert receipt.busiest.network == 0
    assert 0 <= receipt.busiest.nvlink - (7 + servers - 1) * SIZE / servers <= SMALL


@pytest.mark.parametrize("when", [consistency.Sync(), consistency.Delayed(1)])
def test_a_delayed_push_is_hidden(pod, when):
    mesh = pod("h100", {"data": 16}, hosts=2, gpus=8)
    server = collc.server(collc.plan(mesh, {"data": "native"}), optax.sgd(0.1), consistency=when)
    _, large = found(mesh, server, 4096)
    pushes = [e for e in large if e.collective.kind == "reduce-scatter"]
    assert sum(e.collective.bytes for e in pushes) == SIZE // 16
    assert {e.overlap == "hidden" for e in pushes} == {bool(when.late)}
