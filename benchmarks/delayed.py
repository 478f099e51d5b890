"""What the push of a server runs beside on GPUs, under ``Sync()`` and under ``Delayed(1)``.

    python benchmarks/delayed.py           prints the report and writes reports/delayed.md
    python benchmarks/delayed.py --print   prints it only
    python benchmarks/delayed.py --also python3.11     what another Python's jax makes of it, too

A step that pulls, differentiates a stack of layers and pushes is compiled for a pod of H100s without
a GPU. What stands between the start and the done of a collective in XLA's schedule *may* run beside
it. No time is measured. Every such Python needs ``pip install "collc[pods]"``.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import common

HOSTS, GPUS = 4, 8
LAYERS, WIDTH, TOKENS = 4, 2048, 8192  # TOKENS: of a GPU
SMALL = 1 << 10  # bytes: of the loss, of what decides whether gradients are finite
BRIEF = 1 << 16  # bytes: kernels that write less hide nothing, such as the counter of a loop
IN_FLIGHT = {"xla_gpu_experimental_parallel_collective_overlap_limit": 4}
PLANS: dict[str, tuple[dict[str, int], dict[str, str]]] = {
    "one": ({"data": HOSTS * GPUS}, {"data": "native"}),
    "levels": ({"host": HOSTS, "gpu": GPUS}, {"gpu": "native", "host": "native"}),
    "rings": ({"host": HOSTS, "gpu": GPUS}, {"gpu": "ring", "host": "ring"}),
    "halving": ({"host": HOSTS, "gpu": GPUS}, {"gpu": "halving", "host": "halving"}),
}


@dataclass(frozen=True)
class Program:
    """A step. ``late``: of ``Delayed``, 0 for ``Sync``. ``four``: four collectives may be in flight."""

    plan: str
    late: int
    four: bool = False

    @property
    def consistency(self) -> str:
        return f"Delayed({self.late})" if self.late else "Sync()"


PROGRAMS = (
    *(Program(plan, late) for plan in PLANS for late in (0, 1)),
    *(Program(plan, 1, four=True) for plan in PLANS if plan != "one"),
)
EXCERPTS = (Program("one", 0), Program("one", 1), Program("levels", 1), Program("rings", 1))

# ---- one jax ------------------------------------------------------------------------------------


def traced(program: Program) -> Any:
    """The step as ``jax.jit`` traces it; the state is donated, and made of shapes alone."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    import collc
    from collc import consistency

    axes, names = PLANS[program.plan]
    mesh = collc.pod("h100", axes, hosts=HOSTS, gpus=GPUS)
    plan = collc.plan(mesh, names)
    when = consistency.Delayed(program.late) if program.late else consistency.Sync()
    server = collc.server(plan, optax.adamw(3e-4), consistency=when)

    @partial(jax.jit, donate_argnums=0)
    @collc.schedule(plan, batch="batch")
    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(state.pull(), batch)
        return state.push(grads), collc.pmean(loss)

    def of(shape: tuple[int, ...], spec: PartitionSpec) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    shapes = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    layer = {name: of(shape, PartitionSpec()) for name, shape in shapes.items()}
    state = jax.eval_shape(server.init, [layer] * LAYERS)
    return step.trace(state, of((mesh.size * TOKENS, WIDTH), PartitionSpec(tuple(axes))))


def loss_fn(params: Any, batch: Any) -> Any:
    """How far a stack of MLPs is from the identity. batch: [tokens, width]."""
    import jax
    import jax.numpy as jnp

    x = batch
    for w in params:
        with jax.named_scope("mlp"):
            x = x + jnp.square(jax.nn.relu(x @ w["up"])) @ w["down"]
    return jnp.mean((x - batch).astype(jnp.float32) ** 2)


def measure(_: argparse.Namespace) -> dict[str, Any]:
    """All programs in this process's jax."""
    import jax

    import collc
    from collc.receipts.overlap import overlap
    from collc.receipts.show import plain

    rows, excerpts = [], []
    for program in PROGRAMS:
        jax.clear_caches()
        step = traced(program)
        flags = {"xla_gpu_autotune_level": 0} | (IN_FLIGHT if program.four else {})
        compiled = step.lower().compile(compiler_options=flags)
        receipt = collc.receipt(compiled, asked=step)
        rows.append([asdict(program), account(receipt)])
        if program in EXCERPTS:
            excerpts.append([asdict(program), plain(overlap(receipt)).strip().splitlines()])
        print(f"jax {version('jax')}:", *rows[-1], file=sys.stderr)
    packages = ("jax", "jaxlib", "jax-cuda13-pjrt", "nvidia-cuda-nvcc")
    made = ", ".join(f"{p} {version(p)}" for p in packages)
    return {"rows": rows, "excerpts": excerpts, "versions": made}


def account(receipt: Any) -> dict[str, Any]:
    """Of the collectives of the push and of the pull: bytes in all, and beside products.

    ``idle``: bytes of the push beside which nothing stands, or next to nothing. ``forward``,
    ``backward``: FLOPs of the products beside the push, each product once.
    """
    made: dict[str, Any] = dict.fromkeys(("push", "hidden", "idle", "pull", "pull_hidden"), 0)
    beside: dict[str, tuple[bool, int]] = {}
    for entry in receipt.entries:
        found = entry.collective
        moved = found.bytes * found.count
        if found.bytes < SMALL:
            continue
        if found.kind == "all-gather" or "all_gather" in entry.scope:
            made["pull"] += moved
            made["pull_hidden"] += moved * (entry.overlap == "hidden")
        elif found.kind == "reduce-scatter" or "reduce_scatter" in entry.scope:
            made["push"] += moved
            made["hidden"] += moved * (entry.overlap == "hidden")
            made["idle"] += moved * (sum(w.bytes for w in found.beside) < BRIEF)
            beside |= {w.name: ("transpose(" in w.op_name, w.flops) for w in found.beside}
        else:
            raise ValueError(f"neither push nor pull: {found.name} ({entry.scope})")
    products = {back: sum(n for b, n in beside.values() if b == back) for back in (False, True)}
    made |= {"forward": products[False], "backward": products[True]}
    return made | {"flops": receipt.module.flops, "memory": receipt.memory.total}


# ---- the report ---------------------------------------------------------------------------------

COLUMNS = ("push MiB", "hidden", "idle", "forward", "backward", "pull MiB", "hidden", "GiB")


def cells(fields: dict[str, Any], made: dict[str, Any]) -> list[Any]:
    program = Program(**fields)
    sizes = [round(made[k] / 2**20) for k in ("push", "hidden", "idle")]
    beside = [round(made[k] / 1e12, 1) for k in ("forward", "backward")]
    pulls = [round(made[k] / 2**20) for k in ("pull", "pull_hidden")]
    four = 4 if program.four else 1
    return [program.plan, program.consistency, four, *sizes, *beside, *pulls,
            made["memory"] / 2**30]  # fmt: skip


def hidden(found: Sequence[dict[str, Any]], *programs: Program) -> str:
    """How many MiB of the push of each program are hidden, by jax's version."""
    parts = []
    for each in found:
        by = {Program(**fields): made for fields, made in each["rows"]}
        mib = [[round(by[p][k] / 2**20) for k in ("hidden", "push")] for p in programs]
        said = ", ".join(f"{a} of {b}" for a, b in mib)
        parts.append(f"{said} MiB ({each['versions'].split(',')[0]})")
    return "; ".join(parts)


def tera(found: Sequence[dict[str, Any]]) -> str:
    return f"{found[0]['rows'][0][1]['flops'] / 1e12:.1f}"


def report(found: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of the report."""
    lines = common.prose(
        f"{LAYERS} MLPs (width {WIDTH}, bfloat16, 64 MiB of parameters each), {TOKENS} tokens per GPU,",
        "AdamW on a server, compiled for",
        f"{HOSTS} hosts x {GPUS} H100 without a GPU. A step has {tera(found)} TFLOP of matrix products",
        "on a GPU. Nothing was run and no time was measured: XLA's schedule says what *may* run beside",
        "what.",
    )
    lines.append("")
    for item in GLOSSARY.strip().split("\n\n"):
        lines += common.prose(f"- {' '.join(item.split())}")
    lines += ["", "## What it says", ""]
    for said, programs in FINDINGS:
        text = " ".join(said.split())
        lines += common.prose(f"- {text} Hidden of the push: {hidden(found, *programs)}.")
    for each in found:
        lines += ["", f"## {each['versions']}", ""]
        header = ("plan", "consistency", "in flight", *COLUMNS)
        lines += common.table(header, [cells(*row) for row in each["rows"]])
    for fields, text in found[0]["excerpts"]:
        program = Program(**fields)
        jax = found[0]["versions"].split(",")[0]
        lines += ["", f"## {program.plan}, {program.consistency}, {jax}", ""]
        lines += ["```text", *text, "```"]
    return lines


GLOSSARY = """
*one*: a native reduce-scatter over one axis of all GPUs. *levels*: native on gpu, then on host.
*rings*, *halving*: those schedules on both axes.

*in flight*: how many collectives may be under way at once, by XLA's default 1, or 4 by
`--xla_gpu_experimental_parallel_collective_overlap_limit=4`.

*push*, *pull*: MiB of results of the collectives of either on a GPU. *hidden*: of these, beside
matrix products; *idle*: beside nothing, or beside kernels that write less than 64 KiB, such as the
counter of a loop.

*forward*, *backward*: TFLOP of the matrix products beside the push, each counted once. *GiB*: memory
of a GPU.
"""

# What the report says, and the programs that show it: their hidden bytes follow the text.
FINDINGS: tuple[tuple[str, tuple[Program, ...]], ...] = (
    (
        """
        **One native reduce-scatter: `Sync()` waits for all of it, `Delayed(1)` hides all of it.** XLA
        joins the buckets of a push into one reduce-scatter. Under `Sync()` it needs the last gradient,
        so only small kernels are left to run beside it. Under `Delayed(1)` it needs nothing of this
        step, and the step's products stand between its start and its done: most of those of the
        backward (what it pulls takes the forward's). `Sync()`,
        `Delayed(1)`.
        """,
        (Program("one", 0), Program("one", 1)),
    ),
    (
        """
        **In two levels `Sync()` hides what it can beside the rest of the backward**, and waits for its
        tail; `Delayed(1)` hides all, beside the forward too. `Sync()`, `Delayed(1)`, and this with
        four in flight.
        """,
        (Program("levels", 0), Program("levels", 1), Program("levels", 1, True)),
    ),
    (
        """
        **Rounds in a loop hide nothing, late or not.** collc rolls the equal rounds of a ring into a
        loop, which is one operation to XLA: beside a permute runs only the counter of the loop. So
        take `Delayed(1)` with native schedules. `Sync()`, `Delayed(1)`, and this with four in flight.
        """,
        (Program("rings", 0), Program("rings", 1), Program("rings", 1, True)),
    ),
    (
        """
        **Many rounds without a loop do not gain from it.** Each waits for the one before. Of
        *halving* nothing is idle under `Delayed(1)`, but less is beside products than under `Sync()`:
        XLA has the rounds run beside other kernels. `Sync()`, `Delayed(1)`, and this with four in
        flight.
        """,
        (Program("halving", 0), Program("halving", 1), Program("halving", 1, True)),
    ),
    (
        """
        **A native pull is mostly hidden by both**: it gathers each parameter on its own, those of later
        layers beside the products of earlier ones; that of rings is one loop. And `Delayed(1)` costs
        memory (the last column): 256 MiB of gradients wait here, and what is under way is held longer.
        *one*, `Delayed(1)`.
        """,
        (Program("one", 1),),
    ),
)


def main() -> None:
    assert __doc__
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    _, found = common.each_python(cli, measure)
    title = "Delayed: what a server's push runs beside"
    common.publish("delayed", title, ("jax",), report(found))


if __name__ == "__main__":
    main()
