"""Which reductions of a train step run beside which compute on GPUs, and what changes it.

    python benchmarks/overlap.py           prints the report and writes reports/overlap.md
    python benchmarks/overlap.py --print   prints it only
    python benchmarks/overlap.py --also python3.11     what another Python's jax makes of it, too

A decoder-like stack is compiled for a pod of H100s without a GPU, and what is judged is the order in
which XLA launches its operations: what stands between the start and the done of a collective *may*
run beside it. No time is measured. Every such Python needs ``pip install "collc[pods]"``.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from typing import Any

import common
from overlap_programs import (
    ADVICE,
    EXAMPLES,
    FLAGS,
    GLOSSARY,
    GPUS,
    HOSTS,
    LAYERS,
    TOKENS,
    WIDTH,
    Program,
    changed,
    flags,
    matrix,
    traced,
)  # fmt: skip

SCOPES = ("attention", "mlp")
COUNTER = 1024  # bytes: kernels that write less count the turns of a loop
EXCERPTS = (
    Program("one", sync=False), Program("one"), Program("levels"), Program("rings")
)  # fmt: skip

# ---- one jax ------------------------------------------------------------------------------------


def measure(_: argparse.Namespace) -> dict[str, Any]:
    """All programs in this process's jax."""

    rows, excerpts = [], {}
    for program in (*matrix(), *changed()):
        made, text = judged(program)
        rows.append([program.__dict__, made])
        excerpts[key(program)] = text
        print(f"jax {version('jax')}:", program, made, file=sys.stderr)
    packages = ("jax", "jaxlib", "jax-cuda13-pjrt", "nvidia-cuda-nvcc")
    made = ", ".join(f"{p} {version(p)}" for p in packages)
    return {"rows": rows, "excerpts": excerpts, "versions": made}


def key(program: Program) -> str:
    return f"{program.name}, {program.change or 'no flags'}"


def judged(program: Program) -> tuple[dict[str, Any], list[str]]:
    """What the receipt of a program says, in numbers, and its account of the overlap."""
    import jax

    import collc
    from collc.receipts.overlap import overlap
    from collc.receipts.show import plain

    jax.clear_caches()
    step = traced(program)
    chosen = {"xla_gpu_autotune_level": 0} | flags(program.change)
    receipt = collc.receipt(step.lower().compile(compiler_options=chosen), asked=step)
    return account(receipt), plain(overlap(receipt)).strip().splitlines()


def account(receipt: Any) -> dict[str, Any]:
    """Executions, bytes by what is beside them, and the FLOPs of products beside them by scope.

    ``counters``: those of "brief" beside which only the counter of a loop is kept.
    """
    bytes_of: dict[str, int] = dict.fromkeys(("hidden", "brief", "exposed", "counters"), 0)
    products: dict[str, int] = dict.fromkeys((*SCOPES, "other"), 0)
    for entry in receipt.entries:
        works, word = entry.collective.beside, entry.overlap
        moved = entry.collective.bytes * entry.collective.count
        bytes_of[word] += moved
        if word == "brief" and sum(work.bytes for work in works) < COUNTER:
            bytes_of["counters"] += moved
        for work in works:
            here = next((s for s in SCOPES if s in work.op_name), "other")
            products[here] += work.flops * entry.collective.count
    return {
        "count": sum(e.collective.count for e in receipt.entries),
        "bytes": sum(bytes_of[word] for word in ("hidden", "brief", "exposed")),
        **bytes_of,
        "in_flight": receipt.module.in_flight,
        "flops": receipt.module.flops,
        "products": products,
        "memory": receipt.memory.total,
    }


# ---- the report ---------------------------------------------------------------------------------


def mib(size: int) -> int:
    return round(size / 2**20)


def cells(made: dict[str, Any]) -> list[Any]:
    beside = [f"{k} {n / 1e12:.1f}" for k, n in made["products"].items() if n > 5e10]
    sizes = [mib(made[what]) for what in ("bytes", "hidden", "brief", "exposed")]
    said = ", ".join(beside) if sizes[1] else ""
    return [
        made["count"],
        *sizes,
        mib(made["counters"]),
        made["in_flight"],
        said or "-",
        made["memory"] / 2**30,
    ]


def rows(each: dict[str, Any], programs: Iterable[Program], *fields: str) -> list[list[Any]]:
    return [[*(SAID[f](p) for f in fields), *cells(of(each, p))] for p in programs]


SAID: dict[str, Callable[[Program], Any]] = {
    "plan": lambda p: p.plan,
    "layers": lambda p: "scanned" if p.scanned else "unrolled",
    "reduced": lambda p: "sync" if p.sync else "end",
    "micro-batches": lambda p: p.pieces,
    "change": lambda p: p.change or "none",
}
MEASURED = ("runs", "MiB", "hidden", "brief", "exposed", "counters", "in flight", "products", "GiB")


def of(each: dict[str, Any], program: Program) -> dict[str, Any]:
    return next(made for fields, made in each["rows"] if Program(**fields) == program)


def hidden(found: Sequence[dict[str, Any]], programs: Sequence[Program]) -> str:
    """How many MiB of each program are hidden, by jax's version."""
    parts = []
    for each in found:
        every = [of(each, p) for p in programs]
        said = [f"{mib(made['hidden'])} of {mib(made['bytes'])}" for made in every]
        parts.append(f"{', '.join(said)} MiB ({each['versions'].split(',')[0]})")
    return "; ".join(parts)


def report(found: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of the report."""
    lines = common.prose(
        f"A stack of {LAYERS} decoder-like layers (attention and MLP, width {WIDTH}, bfloat16, 96 MiB",
        f"of parameters each), {EXAMPLES} x {TOKENS} tokens per GPU, compiled for {HOSTS} hosts x",
        f"{GPUS} H100 without a GPU. Nothing was run and no time was measured: XLA's schedule says what",
        "*may* run beside what.",
    )
    lines.append("")
    for item in GLOSSARY.strip().split("\n\n"):
        lines += common.prose(f"- {' '.join(item.split())}")
    lines += ["", "## What to do", ""]
    for said, programs in ADVICE:
        text = " ".join(said.split())
        lines += common.prose(f"- {text} Hidden: {hidden(found, programs)}.")
    for each in found:
        lines += ["", f"## {each['versions']}", ""]
        names = ("plan", "layers", "reduced", "micro-batches")
        lines += common.table([*names, *MEASURED], rows(each, matrix(), *names))
        lines += ["", "Scanned layers with sync, one micro-batch, and something changed:", ""]
        names = ("plan", "change")
        lines += common.table([*names, *MEASURED], rows(each, changed(), *names))
    lines += [
        "",
        "*unroll=2* is that of `jax.lax.scan`. The others are flags, here `compiler_options=`:",
        "",
    ]
    for name, values in FLAGS.items():
        text = " ".join(f"--{k}={v}" for k, v in values.items())
        lines += common.prose(f"- **{name}**: `{text}`")
    lines += common.prose(
        "- **pipelined**, **not pipelined**: for all_reduce, all_gather and reduce_scatter",
        "`--xla_gpu_pipeline_all_reduce=COLLECTIVE_PIPELINING_MODE_ON` or `..._OFF`, in jax 0.10.2",
        "`--xla_gpu_enable_pipelined_all_reduce=true` or `false`. By default it is on for",
        "reduce_scatter; for the others jax 0.12 has ..._DEFAULT, and 0.10.2 false.",
    )
    for program in EXCERPTS:
        name = key(program)
        lines += ["", f"## {name}, {found[0]['versions'].split(',')[0]}", ""]
        lines += ["```text", *found[0]["excerpts"][name], "```"]
    return lines


def main() -> None:
    assert __doc__
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    _, found = common.each_python(cli, measure)
    title = "Overlap: which reductions run beside which compute"
    common.publish("overlap", title, ("jax",), report(found))


if __name__ == "__main__":
    main()
