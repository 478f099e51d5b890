"""Training with collc against the same training in plain JAX, and FSDP against sharding annotations.

    python benchmarks/training.py            prints the report and writes it to reports/training.md
    python benchmarks/training.py --print    prints it only

A language model with AdamW on 8 virtual CPU devices, states donated. What is compared takes turns.
"""

import dataclasses
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import common

DEVICES, SIZE, STEPS = 8, "small", 20
# Examples and bytes of text for each device. The first make a step of parameters and messages mostly.
BATCHES = {"2 x 64": (2, 64), "8 x 128": (8, 128)}
FORMS = {"unrolled": {}, "scan, remat": {"scan": True, "remat": True}}
PLANS = {"native": {"data": "native"}, "ring": {"data": "ring"}}
MOST_TIME, MOST_MEMORY, MOST_APART = 1.05, 1.02, 1e-4
# What each is compared with, the first in it being the one.
SETTINGS = {
    "data parallel": ("jit", "jit again", "mapped", "native", "ring"),
    "FSDP": ("skipping", "skipping again", "gathered", "propagated", "native", "ring"),
}


@dataclasses.dataclass
class Program:
    """A compiled step, (state, batch) -> (state, loss), and the state that it has come to."""

    step: Any
    state: Any
    batch: Any
    loss: Any = None

    def __call__(self) -> float:
        """Seconds of the next step."""
        import jax

        began = time.perf_counter()
        self.state, self.loss = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, self.loss))
        return time.perf_counter() - began

    def memory(self) -> int:
        """Bytes of a device while the step runs."""
        found = self.step.memory_analysis()
        kept = found.argument_size_in_bytes + found.output_size_in_bytes
        return kept - found.alias_size_in_bytes + found.temp_size_in_bytes


def loss_of(graph: Any, params: Any, text: Any, **given: Any) -> Any:
    """Mean cross-entropy of text [batch, time + 1]; rematerialised, if at all, block by block."""
    import jax.numpy as jnp
    import optax
    from flax import nnx

    logits = nnx.merge(graph, params)(text[:, :-1], **given)
    following = text[:, 1:].astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, following).mean()


def parallel_by_hand(graph: Any, tx: Any) -> Callable[..., Any]:
    """Parameters and moments on every device, the batch over all of them: XLA reduces."""
    import jax
    import optax

    def step(state: Any, text: Any) -> Any:
        params, opt = state
        loss, grads = jax.value_and_grad(lambda p: loss_of(graph, p, text))(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    return step


def mapped_by_hand(mesh: Any, graph: Any, tx: Any) -> Callable[..., Any]:
    """The same in ``shard_map``: the mean of the gradients is asked for where they are made."""
    import jax
    import optax

    def step(state: Any, text: Any) -> Any:
        params, opt = state
        loss, grads = jax.value_and_grad(lambda p: loss_of(graph, p, text))(params)
        updates, opt = tx.update(jax.lax.pmean(grads, "data"), opt, params)
        return (optax.apply_updates(params, updates), opt), jax.lax.pmean(loss, "data")

    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P()}
    return jax.shard_map(step, mesh=mesh, **specs, check_vma=False)


def parallel(plan: Any, graph: Any, tx: Any) -> Callable[..., Any]:
    """The same with collc."""
    import jax
    import optax

    import collc

    @collc.schedule(plan, batch="text")
    def step(state: Any, text: Any) -> Any:
        params, opt = state
        loss, grads = jax.value_and_grad(lambda p: loss_of(graph, p, text))(params)
        updates, opt = tx.update(collc.pmean(grads), opt, params)
        return (optax.apply_updates(params, updates), opt), collc.pmean(loss)

    return step


def cut(mesh: Any, x: Any, stacked: bool) -> Any:
    """Over the largest dimension that the devices divide, as FSDP is annotated, or none."""
    from jax.sharding import NamedSharding, PartitionSpec

    dims = [d for d in range(stacked, x.ndim) if x.shape[d] % mesh.size == 0]
    where: list[Any] = [None] * x.ndim
    if dims:
        where[max(dims, key=lambda d: x.shape[d])] = "data"
    return NamedSharding(mesh, PartitionSpec(*where))


def fsdp_by_hand(
    mesh: Any, graph: Any, tx: Any, spread: Any, *, gather: bool = True, skip: bool = False
) -> Any:
    """Sharded parameters and moments. ``gather``: a layer's are constrained to be whole where they
    are used; else XLA decides what moves. ``skip``: a gradient that is not finite updates nothing."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.lax import with_sharding_constraint
    from jax.sharding import NamedSharding, PartitionSpec

    whole = NamedSharding(mesh, PartitionSpec())
    given = {"on_layer": lambda params: with_sharding_constraint(params, whole)} if gather else {}

    def step(state: Any, text: Any) -> Any:
        params, opt = state
        loss, grads = jax.value_and_grad(lambda p: loss_of(graph, p, text, **given))(params)
        grads = with_sharding_constraint(grads, spread[0])
        updates, opt = tx.update(grads, opt, params)
        new = optax.apply_updates(params, updates), opt
        if skip:
            finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
            new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
        return with_sharding_constraint(new, spread), loss

    return step


def fsdp(plan: Any, graph: Any) -> Callable[..., Any]:
    """The same with collc."""
    import jax

    import collc

    @collc.schedule(plan, batch="text")
    def step(state: Any, text: Any) -> Any:
        of = functools.partial(loss_of, graph, text=text, on_layer=collc.all_gather)
        loss, grads = jax.value_and_grad(of)(state.params)
        return state.push(grads), collc.pmean(loss)

    return step


def programs(setting: str, form: str, batch: str) -> dict[str, Program]:
    """All that are compared, compiled, from the same parameters."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import collc
    from collc.models import transformer

    mesh = jax.make_mesh((DEVICES,), ("data",), (AxisType.Auto,))
    config = dataclasses.replace(transformer.SIZES[SIZE], **FORMS[form])
    graph, params = nnx.split(transformer.Transformer(config, rngs=nnx.Rngs(0)))
    examples, length = BATCHES[batch]
    text = np.random.default_rng(0).integers(0, 256, (examples * DEVICES, length + 1))
    split = NamedSharding(mesh, PartitionSpec("data"))
    texts = jax.device_put(jnp.asarray(text, jnp.uint8), split)
    whole, tx = NamedSharding(mesh, PartitionSpec()), optax.adamw(1e-3)

    def sharding(path: Any, x: Any) -> Any:
        inside = config.scan and "blocks" in jax.tree_util.keystr(path)
        return cut(mesh, x, inside) if setting == "FSDP" else whole

    state = (params, tx.init(params))
    spread = jax.tree.map_with_path(sharding, state)

    def made(name: str) -> Program:
        plan = collc.plan(mesh, PLANS[name]) if name in PLANS else None
        fresh: Any = jax.jit(lambda x: jax.tree.map(jnp.copy, x), out_shardings=spread)(state)
        match setting, plan:
            case "FSDP", None:
                how = {"gather": name != "propagated", "skip": name.startswith("skipping")}
                step = fsdp_by_hand(mesh, graph, tx, spread, **how)
            case "FSDP", _:
                stacked = "blocks/*" if config.scan else ()
                fresh = collc.server(plan, tx, stacked=stacked).init(params)
                step = fsdp(plan, graph)
            case _, None if name == "mapped":
                step = mapped_by_hand(mesh, graph, tx)
            case _, None:
                step = parallel_by_hand(graph, tx)
            case _:
                step = parallel(plan, graph, tx)
        compiled = jax.jit(step, donate_argnums=0).lower(fresh, texts).compile()
        return Program(compiled, fresh, texts)

    return {name: made(name) for name in SETTINGS[setting]}


def measure(setting: str, form: str, batch: str, iterations: int) -> dict[str, Any]:
    import numpy as np

    from collc.receipts.timing import in_turns

    found = programs(setting, form, batch)
    losses: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(STEPS):
        for name, program in found.items():
            program()
            losses[name].append(float(program.loss))
    times = in_turns(found, iterations)
    first, *_ = found
    quartiles = {
        name: np.percentile(np.asarray(s) / np.asarray(times[first]), [25, 50, 75]).tolist()
        for name, s in times.items()
    }
    apart = {
        name: max(abs(a - b) for a, b in zip(each, losses[first], strict=True))
        for name, each in losses.items()
    }
    return {
        "ms": {name: 1000 * float(np.median(s)) for name, s in times.items()},
        "quartiles": quartiles,
        "memory": {name: program.memory() for name, program in found.items()},
        "apart": apart,
        "began": losses[first][0],
        "ended": losses[first][-1],
    }


Found = Mapping[tuple[str, str], Mapping[str, Any]]  # by form and batch


def against(found: Mapping[str, Any], name: str) -> tuple[float, float]:
    """Time and memory of a program, as ratios to those of the first."""
    first = next(iter(found["ms"]))
    return found["quartiles"][name][1], found["memory"][name] / found["memory"][first]


def native_to(found: Found, other: str, what: int) -> str:
    """Native's time (0) or memory (1) as a ratio to that of another program than the first."""
    of = (against(each, "native")[what] / against(each, other)[what] for each in found.values())
    return ", ".join(f"{ratio:.3f}" for ratio in of)


def rows(case: tuple[str, str], found: Mapping[str, Any]) -> list[list[Any]]:
    made = []
    for name, ms in found["ms"].items():
        low, middle, high = found["quartiles"][name]
        mib = found["memory"][name] / 2**20
        apart = f"{found['apart'][name]:.0e}"
        share = f"{against(found, name)[1]:.3f}"
        made.append([*case, name, ms, f"{middle:.3f} ({low:.3f} to {high:.3f})", mib, share, apart])
    return made


def promises(setting: str, found: Found) -> list[list[Any]]:
    made = []
    for case, each in found.items():
        time_, memory = against(each, "native")
        for what, measured, most in (
            ("time", time_, MOST_TIME),
            ("memory", memory, MOST_MEMORY),
            ("largest difference of a loss", each["apart"]["native"], MOST_APART),
        ):
            value = f"{measured:.3f}" if most > 1 else f"{measured:.0e}"
            made.append([setting, *case, what, value, str(most), common.verdict(measured, most)])
    return made


def report(found: Mapping[str, Found], iterations: int) -> list[str]:
    lines = common.prose(
        f"Steps of the `{SIZE}` Transformer with AdamW on {DEVICES} virtual CPU devices, one axis;",
        "states are donated. *Unrolled*: the layers as they are; *scan, remat*: in a loop, computed",
        "again in the backward. *Batch*: examples of a device x their bytes.",
    )
    lines.append("")
    for item in (
        "*Data parallel*. *jit*: `jax.jit` of the step, parameters and moments on every device, the"
        " batch sharded. *mapped*: the step in `jax.shard_map`, `jax.lax.pmean` of the gradients."
        " *native*, *ring*: `@collc.schedule` with that plan, `collc.pmean` of the gradients. XLA puts"
        " the sum of *jit* between a matmul and the transpose of the weight's gradient. In *mapped* and"
        " *native* the transpose comes first, and XLA:CPU makes one slower matmul of both: that is what"
        " 8 x 128 takes longer than *jit*, by hand as with collc. To *mapped*, native's time is"
        f" {native_to(found['data parallel'], 'mapped', 0)}, in the order of the table.",
        "*FSDP*. *gathered*: `jax.jit`, parameters and moments sharded by `NamedSharding` over the"
        " largest dimension that divides, a layer's constrained to be whole where they are used, the"
        " gradients and the new state to be sharded. *propagated*: the same, but XLA decides what moves"
        " for a layer. *skipping*: *gathered*, which leaves the state as it was where a gradient is not"
        " finite. *native*, *ring*: `collc.server`, `on_layer=collc.all_gather`. A server skips such"
        " updates too and counts them, so that *skipping* is the same training.",
        f"They take turns, {iterations} of them: *time* is the median of the turns' ratios to the first"
        " program, with quartiles. *Again* is the first, compiled a second time: what it differs from 1"
        " is noise, and no smaller difference says anything. *Memory* of a device:"
        " arguments, results and temporaries as compiled, what is aliased once. *Loss*: the largest"
        f" difference over {STEPS} steps.",
        "The promise is for native collectives: by hand there are no others. The messages of *ring* are"
        " permutes, each of which is a rendezvous of all devices here.",
        "To skip takes memory here: XLA:CPU keeps the old shard of the state beside the new one. To that"
        " of *gathered* and *propagated*, which do not look whether gradients are finite, native's"
        f" memory is {native_to(found['FSDP'], 'gathered', 1)} and"
        f" {native_to(found['FSDP'], 'propagated', 1)}, in the order of the table; its time"
        f" {native_to(found['FSDP'], 'gathered', 0)} and {native_to(found['FSDP'], 'propagated', 0)}.",
    ):
        lines += common.prose(f"- {item}")
    lines.append("")
    header = ["", "layers", "batch", "native against the first", "measured", "at most", ""]
    lines += common.table(header, [row for s, each in found.items() for row in promises(s, each)])
    for setting, each in found.items():
        lines += ["", f"## {setting[0].upper()}{setting[1:]}", ""]
        header = ["layers", "batch", "program", "ms", "time", "MiB", "memory", "loss"]
        lines += common.table(header, [r for case, one in each.items() for r in rows(case, one)])
        moved = [f"from {one['began']:.3f} to {one['ended']:.3f}" for one in each.values()]
        lines += ["", *common.prose(f"Loss of the first program: {'; '.join(moved)}.")]
    return lines


def main() -> None:
    given = common.parser(__doc__ or "", iterations=41).parse_args()
    if given.part:
        print(json.dumps(measure(*given.part.split(":"), given.iterations)))
        return
    turns = ("--iterations", given.iterations)
    found = {
        setting: {
            (form, batch): common.part(f"{setting}:{form}:{batch}", DEVICES, *turns)
            for form, batch in itertools.product(FORMS, BATCHES)
        }
        for setting in SETTINGS
    }
    print(found, file=sys.stderr)
    packages = ["jax", "jaxlib", "flax", "optax"]
    lines = report(found, given.iterations)
    common.publish("training", "Training, with collc and by hand", packages, lines)


if __name__ == "__main__":
    main()
