"""What ``collc.Watchdog`` costs: steps of two processes with it and without it, in turns.

python benchmarks/watchdog.py            prints the report and writes it to reports/watchdog.md
python benchmarks/watchdog.py --print    prints it only
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import common

PROCESSES, DEVICES = 2, 2
BLOCK_S = 1.2  # of steps, timed as a whole: what the watchdog does once a second is in their mean
SIZE, TIME, PER_DEVICE = "mini", 64, 2  # of the model; bytes of an example; examples
POD = 512  # processes whose beats are read in one go
MOST = 1.01
PHASES = ("step", "input", "wait", "metrics", "callbacks", "wait")  # those of a step of collc.fit


def train_step(mesh: Any) -> Callable[[], None]:
    """One step of the Transformer, waited for."""
    import jax
    import numpy as np
    import optax
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec

    import collc
    from collc.models import transformer

    plan = collc.plan(mesh, {"host": "native", "gpu": "native"})
    model = transformer.Transformer(transformer.SIZES[SIZE], rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))
    replicated = NamedSharding(mesh, PartitionSpec())
    state = jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, replicated, lambda i: np.asarray(x)[i]),
        state,
    )
    text = np.random.default_rng(0).integers(0, 256, (PER_DEVICE * mesh.size, TIME + 1), np.uint8)
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    batch = jax.make_array_from_callback(text.shape, split, lambda i: text[i])

    @jax.jit
    @collc.schedule(plan, batch="batch")
    def step(state: Any, batch: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(transformer.loss)(model, batch)
        optimizer.update(model, collc.pmean(grads))
        return nnx.state((model, optimizer)), collc.pmean(loss)

    def run() -> None:
        jax.block_until_ready(step(state, batch))

    return run


def measure(me: int, port: int, turns: int) -> dict[str, Any]:
    import collc
    from collc.planning.agree import share, state
    from collc.runtime.watchdog.beats import Beat, Store
    from collc.runtime.watchdog.watchdog import Watchdog

    address = f"127.0.0.1:{port}"
    # Two processes of one host, taken for two.
    run = train_step(collc.init(address, PROCESSES, me, axes={"host": PROCESSES, "gpu": DEVICES}))
    run()
    began = time.perf_counter()
    for _ in range(20):
        run()
    here = round(BLOCK_S / ((time.perf_counter() - began) / 20))
    steps = int(share("how many steps a block has", str(here)))

    def block(watched: bool) -> float:
        """Seconds for a step."""
        with Watchdog() if watched else nullcontext() as watchdog:
            run()  # the processes begin together
            began = time.perf_counter()
            for step in range(steps):
                if watchdog:
                    for phase in PHASES:
                        watchdog.beat(step, phase)
                run()
            return (time.perf_counter() - began) / steps

    found: dict[str, list[float]] = {"watched": [], "plain": [], "plain again": []}
    for turn in range(turns):
        names = list(found)
        for name in names[turn % 3 :] + names[: turn % 3]:
            found[name].append(block(name == "watched"))

    costs = {}
    for n in (PROCESSES, POD):
        store = Store(state().client, 1_000_000 * n + me)
        for process in range(n):
            store.publish(process, Beat(f"host{process:04}", 10_000 + process, 99, 999, 42, "wait"))
        costs[str(n)] = per_call(partial(turn_of, store), 300)
    idle = Watchdog()
    return {
        "steps": steps,
        "blocks": found,
        "beat": per_call(lambda: idle.beat(1, "wait"), 200_000)[0],
        "turn": costs,
    }


def turn_of(store: Any) -> None:
    """What a process does once a second."""
    from collc.runtime.watchdog.beats import Beat

    store.publish(0, Beat("host0000", 1))
    store.beats()


def per_call(call: Callable[[], object], times: int) -> tuple[float, float]:
    """Seconds, and of those of this process's processors, for a call."""
    began, used = time.perf_counter(), time.process_time()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times, (time.process_time() - used) / times


def processes(turns: int) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    started = [
        subprocess.Popen(
            [sys.executable, sys.argv[0], "--iterations", str(turns), "--part", f"{me} {port}"],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
            stdout=subprocess.PIPE, text=True,
        )
        for me in range(PROCESSES)
    ]  # fmt: skip
    said = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        sys.exit("watchdog: a process failed; see above.")
    return [json.loads(text.splitlines()[-1]) for text in said]


def report(found: list[dict[str, Any]], turns: int) -> list[str]:
    import numpy as np

    from collc.runtime.watchdog.watchdog import EACH, PARTS, SILENT_S

    blocks = {name: np.array(s) for name, s in found[0]["blocks"].items()}
    pairs = {name: blocks[name] / blocks["plain"] for name in ("watched", "plain again")}
    rows = [
        [name, *(f"{q:.4f}" for q in np.quantile(ratio, (0.25, 0.5, 0.75)))]
        for name, ratio in pairs.items()
    ]
    cost = float(np.median(pairs["watched"]))
    step = float(np.median(blocks["plain"]))
    mine = found[0]
    beats = len(PHASES) * mine["beat"] / step
    turn, most = (found[1]["turn"][str(n)] for n in (PROCESSES, POD))
    parts = beats + turn[1]  # a turn a second
    again = abs(float(np.median(pairs["plain again"])) - 1)
    noise = f", within a noise of {again:.1%}" if again >= MOST - 1 else ""
    return [
        *common.prose(
            f"Steps of the `{SIZE}` Transformer on {PROCESSES} processes with {DEVICES} virtual CPU",
            f"devices each, over gloo: {1000 * step:.1f} ms a step. Blocks of {mine['steps']} steps",
            f"with a `Watchdog` that gets {len(PHASES)} beats a step, as `collc.fit` gives it,",
            f"without one, and again without, take turns ({turns}); a ratio is of two blocks of one",
            "turn.",
        ),
        "",
        *common.table(
            ["promise", "measured", "at most", ""],
            [
                ["by parts", f"{1 + parts:.4f}", f"{MOST:.2f}", common.verdict(1 + parts, MOST)],
                ["in turns", f"{cost:.4f}", f"{MOST:.2f}", f"{common.verdict(cost, MOST)}{noise}"],
            ],
        ),
        "",
        *common.table(["against plain", "lower quartile", "median", "upper quartile"], rows),
        "",
        *common.prose(
            f"By parts: a beat takes {1e9 * mine['beat']:.0f} ns, so those of a step take {beats:.4%}",
            "of it. Once a second each process publishes its own beat and reads those of all, which",
            f"takes {1000 * turn[1]:.2f} ms of its cores, {turn[1]:.3%} of one, and",
            f"{1000 * turn[0]:.1f} ms until the answers are there. With the beats of {POD} processes",
            "in the store it takes",
            f"{1000 * most[1]:.1f} ms of a core, but then every",
            f"{min(SILENT_S / PARTS, POD / EACH):.1f} s.",
        ),
    ]


def main() -> None:
    given = common.parser(__doc__, iterations=40).parse_args()
    if given.part:
        me, port = map(int, given.part.split())
        print(json.dumps(measure(me, port, given.iterations)))
        return
    lines = report(processes(given.iterations), given.iterations)
    common.publish("watchdog", "What the watchdog costs", ["jax", "jaxlib"], lines)


if __name__ == "__main__":
    main()
