"""Receipts of plain JAX steps on pods, against what one counts by hand.

A step is two matrix products, x @ up [512, 2048] and its relu @ down [2048, 512], in float32, with
a mean squared error and plain gradient descent; no schedule of collc's is in it.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from collc.receipts.reading import receipt

pytestmark = pytest.mark.newest_only

D, H, B = 512, 2048, 256
WEIGHT = 4 * D * H  # bytes of one of the two
HOSTS, GPUS = 2, 8


def mse(params, x, y, kept=lambda v: v):
    up, down = params
    hidden = kept(jax.nn.relu(kept(x @ up)))
    return ((kept(hidden @ down) - y) ** 2).mean()


def updated(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def compiled_for(mesh, step, weights, data, donate=False):
    """The receipt of step(params, x, y), the weights and the batch sharded so."""

    def shaped(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    params = shaped((D, H), weights[0]), shaped((H, D), weights[1])
    outs = jax.tree.map(lambda p: p.sharding, params), NamedSharding(mesh, P())
    jitted = jax.jit(step, out_shardings=outs, donate_argnums=(0,) if donate else ())
    with jax.set_mesh(mesh):
        return receipt(jitted.trace(params, shaped((B, D), data), shaped((B, D), data)))


def rows(found):
    """(kind, axes, bytes, executions), in a fixed order."""
    return sorted(
        (e.collective.kind, e.axes, e.collective.bytes, e.collective.count) for e in found.entries
    )


def flops(batch):
    """Two products forward; backward each gives a weight's gradient, the second also its input's."""
    return 2 * batch * D * H * 5


def test_data_parallel_by_the_partitioner(pod):
    """Both gradients and the loss are summed over all devices; XLA may combine them."""
    mesh = pod("h100", hosts=HOSTS, gpus=GPUS)

    def step(params, x, y):
        loss, grads = jax.value_and_grad(mse)(params, x, y)
        return updated(params, grads), loss

    found = compiled_for(mesh, step, (P(), P()), P(("host", "gpu")))
    assert set(found.collectives) == {"all-reduce"}
    assert {e.axes for e in found.entries} == {("host", "gpu")}
    assert sum(e.collective.bytes for e in found.entries) == 2 * WEIGHT + 4
    assert found.unplanned == found.collectives["all-reduce"]
    # A ring through 16 GPUs: 14 of its links are NVLink, 2 the network, for each collective.
    each = 2 * (16 - 1) * (2 * WEIGHT + 4) / 16
    assert found.links.nvlink == pytest.approx(14 * each, abs=1)
    assert found.links.network == pytest.approx(2 * each, abs=1)
    assert found.module.flops == flops(B // 16)
    own = 4 * (B // 16) * D  # x, and y
    assert found.memory.arguments == 2 * WEIGHT + 2 * own
    # The outputs: the weights, the loss, and XLA's table of three pointers.
    assert found.memory.outputs == 2 * WEIGHT + 4 + 24
    assert found.memory.aliased == 0 and found.memory.fits


def test_donation_shows_in_the_memory(pod):
    mesh = pod("h100", hosts=1, gpus=GPUS)

    def step(params, x, y):
        loss, grads = jax.value_and_grad(mse)(params, x, y)
        return updated(params, grads), loss

    found = compiled_for(mesh, step, (P(), P()), P("gpu"), donate=True)
    assert found.memory.aliased == 2 * WEIGHT


def test_data_parallel_by_lax(pod):
    """What the program asks for by itself is planned, and what XLA combines is named."""
    mesh = pod("h100", hosts=HOSTS, gpus=GPUS)
    axes = ("host", "gpu")

    @jax.shard_map(in_specs=(P(), P(axes), P(axes)), out_specs=P(), check_vma=False)
    def step(params, x, y):
        loss, grads = jax.value_and_grad(mse)(params, x, y)
        return updated(params, lax.pmean(grads, axes)), lax.pmean(loss, axes)

    found = compiled_for(mesh, step, (P(), P()), P(axes))
    assert found.unplanned == 0 and {e.by for e in found.entries} == {"program"}
    assert sum(e.collective.bytes for e in found.entries) == 2 * WEIGHT + 4
    assert sorted((a.bytes, a.count) for a in found.asked) == [(4, 1), (WEIGHT, 1), (WEIGHT, 1)]
    assert {d.what for d in found.differences} <= {"merged"}
    missing = 3 - sum(found.collectives.values())
    assert bool(missing) == bool(found.differences)


def test_fsdp(pod):
    """Both weights are gathered, once for both passes; both gradients are reduced and scattered."""
    mesh = pod("h100", hosts=1, gpus=GPUS)

    def step(params, x, y):
        def kept(v):
            return lax.with_sharding_constraint(v, P("gpu"))

        def loss(params):
            whole = lax.with_sharding_constraint(params, P())
            return mse(whole, x, y, kept)

        loss, grads = jax.value_and_grad(loss)(params)
        return updated(params, lax.with_sharding_constraint(grads, P("gpu"))), loss

    found = compiled_for(mesh, step, (P("gpu"), P("gpu")), P("gpu"))
    gathered = [e.collective for e in found.entries if e.collective.kind == "all-gather"]
    assert sum(c.bytes for c in gathered) == 2 * WEIGHT
    scattered = [e.collective for e in found.entries if e.collective.kind == "reduce-scatter"]
    assert sum(c.bytes for c in scattered) == 2 * WEIGHT // GPUS
    assert found.collectives["all-reduce"] == 1
    assert set(found.collectives) == {"all-gather", "reduce-scatter", "all-reduce"}
    assert found.unplanned == sum(found.collectives.values())
    # n - 1 shards of each weight over each of n links of NVLink, twice; and the loss.
    assert found.links.network == 0
    shards = 2 * 2 * GPUS * (GPUS - 1) * WEIGHT // GPUS
    assert shards <= found.links.nvlink <= shards + 4 * GPUS * (GPUS - 1)
    assert found.memory.arguments == 2 * WEIGHT // GPUS + 2 * 4 * (B // GPUS) * D
    assert found.module.flops == flops(B // GPUS)


def test_tensor_parallel(pod):
    """One sum of the activations within hosts forward, none backward; the gradients over hosts."""
    mesh = pod("h100", hosts=HOSTS, gpus=GPUS)

    def step(params, x, y):
        loss, grads = jax.value_and_grad(mse)(params, x, y)
        return updated(params, grads), loss

    found = compiled_for(mesh, step, (P(None, "gpu"), P("gpu", None)), P("host"))
    within = [e.collective for e in found.entries if e.axes == ("gpu",)]
    assert [(c.kind, c.bytes, c.count) for c in within] == [("all-reduce", 4 * (B // HOSTS) * D, 1)]
    between = [e.collective for e in found.entries if e.axes == ("host",)]
    assert {c.kind for c in between} == {"all-reduce"}
    assert sum(c.bytes for c in between) == 2 * WEIGHT // GPUS + 4
    assert len(within) + len(between) == len(found.entries)
    assert found.module.flops == flops(B // HOSTS) // GPUS


def test_a_scan_of_layers_multiplies(pod):
    """Megatron's two sums a layer, in a scan: forward and backward, once for each layer."""
    mesh = pod("h100", hosts=1, gpus=GPUS)
    layers = 6

    def step(params, x, y):
        def loss(params):
            def layer(x, own):
                up, down = own
                return x + jax.nn.relu(x @ up) @ down, None

            out, _ = lax.scan(layer, x, params)
            return ((out - y) ** 2).mean()

        loss, grads = jax.value_and_grad(loss)(params)
        return updated(params, grads), loss

    def shaped(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    params = (
        shaped((layers, D, H), P(None, None, "gpu")),
        shaped((layers, H, D), P(None, "gpu", None)),
    )
    outs = jax.tree.map(lambda p: p.sharding, params), NamedSharding(mesh, P())
    x = shaped((B, D), P())
    found = receipt(jax.jit(step, out_shardings=outs).trace(params, x, x))
    assert rows(found) == [("all-reduce", ("gpu",), 4 * B * D, layers)] * 2
    assert found.module.flops == layers * 2 * B * D * H * 6 // GPUS
