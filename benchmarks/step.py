"""A decorated train step against the same step written by hand with ``jax.shard_map``.

    python benchmarks/step.py            prints the report and writes it to reports/step.md
    python benchmarks/step.py --print    prints it only

The step is that of the Transformer of ``models/``, with AdamW, on host=2, gpu=4. By hand it uses the
native collectives that collc's plan is made of. What is compared takes turns.
"""

import functools
import gc
import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import common

MESH = {"host": 2, "gpu": 4}
SIZE, TIME, PER_DEVICE = "mini", 64, 2  # of the model; bytes of an example; examples
RUNS = 7  # turns of runs for one of traces, which take longer
MOST_RUN, MOST_TRACE, MOST_EXPLICIT = 1.02, 1.5, 2.0


def by_hand(mesh: Any) -> Callable[..., Any]:
    """(model, optimizer, batch) -> mean loss, in plain JAX."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax import lax
    from jax.sharding import PartitionSpec as P

    from collc.models import transformer

    ranks = math.prod(MESH.values())

    def pmean(tree: Any) -> Any:
        """Scattered over gpu, summed over host, gathered over gpu: what the native plan does."""
        leaves, form = jax.tree.flatten(tree)
        size, rows = MESH["gpu"], []
        for x in leaves:
            x = x.reshape(1) if x.ndim == 0 else x
            if short := -x.shape[0] % size:
                x = jnp.pad(x, [(0, short), *[(0, 0)] * (x.ndim - 1)])
            rows.append(x.reshape(size, -1, *x.shape[1:]))
        parts = lax.psum([lax.psum_scatter(x, "gpu", tiled=True) for x in rows], "host")
        whole = [lax.all_gather(x, "gpu", tiled=True) for x in parts]
        flat = [
            y.reshape(-1, *y.shape[2:])[: math.prod(x.shape[:1])] for x, y in zip(leaves, whole)
        ]
        means = [y.reshape(x.shape) / ranks for x, y in zip(leaves, flat)]
        return jax.tree.unflatten(form, means)

    def train_step(model: Any, optimizer: Any, batch: jax.Array) -> jax.Array:
        graph, state = nnx.split((model, optimizer))

        @functools.partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=(P(), P(tuple(MESH))),
            out_specs=P(),
            check_vma=False,
        )
        def per_device(state: Any, batch: jax.Array) -> Any:
            model, optimizer = nnx.merge(graph, state)
            loss, grads = nnx.value_and_grad(transformer.loss)(model, batch)
            optimizer.update(model, pmean(grads))
            return pmean(loss), nnx.state((model, optimizer))

        loss, state = per_device(state, batch)
        nnx.update((model, optimizer), state)
        return loss

    return train_step


def decorated(plan: Any) -> Callable[..., Any]:
    """The same with collc."""
    from flax import nnx

    import collc
    from collc.models import transformer

    @collc.schedule(plan, batch="batch")
    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        loss, grads = nnx.value_and_grad(transformer.loss)(model, batch)
        optimizer.update(model, collc.pmean(grads))
        return collc.pmean(loss)

    return train_step


def measure(iterations: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec

    import collc
    from collc.models import transformer
    from collc.receipts.timing import in_turns, ratio

    mesh = jax.make_mesh(
        tuple(MESH.values()), tuple(MESH), (jax.sharding.AxisType.Auto,) * len(MESH)
    )
    native = collc.plan(mesh, dict.fromkeys(MESH, "native"))
    explicit = collc.plan(mesh, {"gpu": "ring", "host": "tree"})
    makers = {
        "by hand": lambda: by_hand(mesh),
        "native": lambda: decorated(native),
        "explicit": lambda: decorated(explicit),
    }

    def pure(step: Callable[..., Any], graph: Any) -> Callable[..., Any]:
        """State in, state out, so that ``jax.jit`` can trace, compile and run it."""

        def run(state: Any, batch: jax.Array) -> Any:
            model, optimizer = nnx.merge(graph, state)
            loss = step(model, optimizer, batch)
            return loss, nnx.state((model, optimizer))

        return run

    model = transformer.Transformer(transformer.SIZES[SIZE], rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))
    state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
    text = np.random.default_rng(0).integers(0, 256, (PER_DEVICE * mesh.size, TIME + 1))
    batch = jax.device_put(
        jnp.asarray(text, jnp.uint8), NamedSharding(mesh, PartitionSpec(tuple(MESH)))
    )

    def trace(name: str, cold: bool) -> Callable[[], float]:
        def call() -> float:
            if cold:
                jax.clear_caches()
            fresh = jax.jit(pure(makers[name](), graph))
            gc.collect()  # what others have left behind is not collected on this one's time
            began = time.perf_counter()
            fresh.trace(state, batch)
            return time.perf_counter() - began

        return call

    def run(name: str) -> Callable[[], float]:
        def call() -> float:
            began = time.perf_counter()
            jax.block_until_ready(compiled[name](state, batch))
            return time.perf_counter() - began

        return call

    compiled = {
        name: jax.jit(pure(make(), graph)).lower(state, batch).compile()
        for name, make in makers.items()
    }
    results = {name: f(state, batch) for name, f in compiled.items()}
    apart = jax.tree.map(
        lambda a, b: float(jnp.max(jnp.abs(a - b))), results["by hand"], results["native"]
    )
    found = {name: common.operations(f.as_text()) for name, f in compiled.items()}
    ours, theirs = found["native"], found["by hand"]
    compiled["itself"] = jax.jit(pure(by_hand(mesh), graph)).lower(state, batch).compile()
    running = in_turns({name: run(name) for name in compiled}, RUNS * iterations)
    tracing = in_turns({name: trace(name, cold=True) for name in makers}, iterations, warmup=1)
    again = in_turns({name: trace(name, cold=False) for name in makers}, 2 * iterations)
    return {
        "parameters": transformer.parameters(model),
        "apart": max(jax.tree.leaves(apart)),
        "operations": {name: ops.total() for name, ops in found.items()},
        "more": {f"{op} {kind}": n for (op, kind), n in sorted((ours - theirs).items())},
        "fewer": {f"{op} {kind}": n for (op, kind), n in sorted((theirs - ours).items())},
        "run": {name: 1000 * float(np.median(s)) for name, s in running.items()},
        "trace": {name: 1000 * float(np.median(s)) for name, s in tracing.items()},
        "again": {name: 1000 * float(np.median(s)) for name, s in again.items()},
        "again ratio": {n: ratio(s, again["by hand"]) for n, s in again.items()},
        "run ratio": {n: ratio(s, running["by hand"]) for n, s in running.items()},
        "trace ratio": {n: ratio(s, tracing["by hand"]) for n, s in tracing.items()},
    }


def report(found: dict[str, Any], iterations: int) -> list[str]:
    run, trace, again = found["run ratio"], found["trace ratio"], found["again ratio"]
    different = sum(found["more"].values()) + sum(found["fewer"].values())
    promises = [
        ("instructions of the optimised HLO that differ", different, 0),
        ("run time, native", run["native"], MOST_RUN),
        ("trace time, native", trace["native"], MOST_TRACE),
        ("trace time, explicit schedules", trace["explicit"], MOST_EXPLICIT),
        ("trace time again, native", again["native"], MOST_TRACE),
        ("trace time again, explicit schedules", again["explicit"], MOST_EXPLICIT),
    ]
    lines = [
        *common.prose(
            f"One step of the `{SIZE}` Transformer ({found['parameters']:,} parameters, AdamW,",
            f"{PER_DEVICE} examples of {TIME} bytes per device) on 8 virtual CPU devices as host=2,",
            "gpu=4. *By hand*: `jax.shard_map(check_vma=False)` with the native collectives that a plan",
            'of `{"gpu": "native", "host": "native"}` is made of. *Native*: `@collc.schedule` with that',
            'plan. *Explicit*: with `{"gpu": "ring", "host": "tree"}`. They take turns; a ratio is the',
            f"median over the turns ({RUNS * iterations} of runs, {iterations} of traces, twice as",
            "many of traces again). A trace is `jax.jit(f).trace(...)` of new functions, with jax's",
            "caches cleared or, *again*, kept; what collc keeps itself, such as proofs, it keeps. HLO",
            "is compared by the kinds and shapes of its instructions.",
        ),
        "",
        *common.table(
            ["promise", "measured", "at most", ""],
            [[what, value, limit, common.verdict(value, limit)] for what, value, limit in promises],
        ),
        "",
        *common.table(
            ["", "run, ms", "ratio", "trace, ms", "ratio", "again, ms", "ratio", "instructions"],
            [
                [
                    n,
                    *(found["run"][n], run[n], found["trace"][n], trace[n]),
                    *(found["again"][n], again[n], found["operations"][n]),
                ]
                for n in found["trace"]
            ],
        ),
        "",
        *common.prose(
            f"Largest difference of a result between native and by hand: {found['apart']:.1e}. In run",
            f"time native takes {run['native']:.3f} of by hand; by hand, compiled a second time, takes",
            f"{run['itself']:.3f} of itself.",
        ),
    ]
    for what in ("more", "fewer"):
        if found[what]:
            shown = [f"- {n} x `{op}`" for op, n in found[what].items()]
            lines += ["", f"Of these the decorated step has {what}:", "", *shown]
    return lines


def main() -> None:
    given = common.parser(__doc__, iterations=15).parse_args()
    if given.part:
        print(json.dumps(measure(given.iterations)))
        return
    found = common.part("all", math.prod(MESH.values()), "--iterations", given.iterations)
    print(found, file=sys.stderr)
    lines = report(found, given.iterations)
    common.publish("step", "A step, decorated and by hand", ["jax", "jaxlib", "flax"], lines)


if __name__ == "__main__":
    main()
