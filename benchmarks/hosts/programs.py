"""What is compared: XLA's own psum over all devices, and collc's plans, alone and in a train step."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import collc
from collc.models import transformer
from collc.receipts.compare import MERGED
from collc.receipts.timing import per_device, zeros
from hosts.account import crossing
from hosts.names import AGAIN, PSUM

AXES = ("host", "gpu")
# By the name in the report: what a plan takes for each axis, and schedules over both.
PLANS = {
    "native, native": {"gpu": "native", "host": "native"},
    "native, ring": {"gpu": "native", "host": "ring"},
    "native, halving": {"gpu": "native", "host": "halving"},
    "native, allpairs": {"gpu": "native", "host": "allpairs.two_shot"},
    "native, doubling": {"gpu": "native", "host": "doubling"},
    "ring, ring": {"gpu": "ring", "host": "ring"},
    "ring, tree": {"gpu": "ring", "host": "tree"},
}
SCHEDULES = {
    "hierarchical": 'hierarchical("host", "gpu")',
    "torus": 'torus("host", "gpu")',
    "flat ring": "ring.all_reduce @ (host, gpu)",
}
SIZE, BATCH, TIME = "small", 1, 64  # of the model; examples for each device, and their length


class Program(NamedTuple):
    """A compiled program, what it is called on, and what it sends by its receipt in one call.

    ``call`` waits for its result; it takes its last one, the first time ``start``. ``alike``: the
    receipt is what the plan says, but for sums that XLA does as one.
    """

    call: Callable[[Any], Any]
    start: Any
    account: dict[str, Any]
    alike: bool


def reductions(mesh: Mesh, size: int) -> dict[str, Program]:
    """Float32 all-reduces of ``size`` bytes for each device, by name."""
    x = zeros(mesh, mesh.size * size // 4)
    spread = PartitionSpec(AXES)

    def made(on: Any) -> Program:
        body = per_device("all_reduce", on)
        mapped = jax.shard_map(body, mesh=mesh, in_specs=spread, out_specs=spread, check_vma=False)

        def call(run: Any, _: None) -> None:
            jax.block_until_ready(run(x))  # and let go: a kept one costs the next call fresh pages

        return _program(mesh, jax.jit(mapped), (x,), call)

    schedules = {name: collc.parse(text) for name, text in SCHEDULES.items()}
    plans = {name: collc.plan(mesh, axes) for name, axes in PLANS.items()}
    found = {name: made(on) for name, on in {PSUM: AXES, **plans, **schedules}.items()}
    return {**found, AGAIN: found[PSUM]}


def steps(mesh: Mesh) -> dict[str, Program]:
    """Train steps of the language model of float32, by what reduces their gradients."""
    config = dataclasses.replace(transformer.SIZES[SIZE], scan=True)
    graph, params = nnx.split(transformer.Transformer(config, rngs=nnx.Rngs(0)))
    tx = optax.adamw(1e-3)
    whole = NamedSharding(mesh, PartitionSpec())
    params = jax.tree.map(np.asarray, params)
    state = jax.jit(lambda: (params, tx.init(params)), out_shardings=whole)()
    text = np.random.default_rng(0).integers(0, 256, (BATCH * mesh.size, TIME + 1), np.uint8)
    spread = NamedSharding(mesh, PartitionSpec(AXES))
    text = jax.make_array_from_callback(text.shape, spread, lambda index: text[index])

    def step(pmean: Callable[[Any], Any], of_grads: Callable[[Any], Any]) -> Callable[..., Any]:
        def step(state: Any, text: Any) -> Any:
            params, opt = state

            def loss_of(params: Any) -> Any:
                return transformer.loss(nnx.merge(graph, params), text)

            loss, grads = jax.value_and_grad(loss_of)(params)
            updates, opt = tx.update(of_grads(grads), opt, params)
            return (optax.apply_updates(params, updates), opt), pmean(loss)

        return step

    def call(run: Any, last: tuple[Any, Any]) -> tuple[Any, Any]:
        return jax.block_until_ready(run(last[0], text))

    def made(function: Callable[..., Any]) -> Program:
        return _program(mesh, jax.jit(function), (state, text), call, (state, None))

    own = partial(jax.lax.pmean, axis_name=AXES)
    by_hand = jax.shard_map(
        step(own, own),
        mesh=mesh, in_specs=(PartitionSpec(), spread.spec), out_specs=PartitionSpec(),
        check_vma=False,
    )  # fmt: skip
    found = {PSUM: made(by_hand)}
    for name in (*PLANS, *SCHEDULES):
        plan = collc.plan(mesh, PLANS.get(name, PLANS["native, native"]))
        schedule = collc.parse(SCHEDULES[name]) if name in SCHEDULES else None
        decorated = collc.schedule(plan, batch="text")
        # The loss goes by the plan: of a schedule in parts, XLA would drop those without the number.
        found[name] = made(decorated(step(collc.pmean, partial(collc.pmean, schedule=schedule))))
    return {**found, AGAIN: found[PSUM]}


def barrier(mesh: Mesh) -> Callable[[], None]:
    """Returns once every device of every host has called it."""
    x = zeros(mesh, mesh.size)
    spread = PartitionSpec(AXES)
    summed = per_device("all_reduce", AXES)
    mapped = jax.shard_map(summed, mesh=mesh, in_specs=spread, out_specs=spread, check_vma=False)
    run = jax.jit(mapped).lower(x).compile()

    def wait() -> None:
        jax.block_until_ready(run(x))

    return wait


def _program(
    mesh: Mesh,
    function: Any,
    given: tuple[Any, ...],
    call: Callable[[Any, Any], Any],
    start: Any = None,
) -> Program:
    traced = function.trace(*given)
    compiled = traced.lower().compile()
    receipt = collc.receipt(compiled, asked=traced)
    host_of = np.array([device.process_index for device in mesh.devices.flat], np.int64)
    alike = all(each.what == MERGED for each in receipt.differences)
    return Program(lambda last: call(compiled, last), start, crossing(receipt, host_of), alike)
