"""Whether Pipeline gets collectives of two mesh axes in flight at once on GPUs, and with which flags.

    python benchmarks/pipeline_gpu.py           prints the report and writes reports/pipeline_gpu.md
    python benchmarks/pipeline_gpu.py --print   prints it only
    python benchmarks/pipeline_gpu.py --also python3.11     what another Python's jax makes of it, too

No GPU is needed and none is used: an all-reduce is compiled for a pod of H100s, and what is judged
is the sequence of thunks that XLA would run, with their streams. Two collectives are in flight
together if one starts before the other is done, on another stream: that they may overlap is
measured, not that they do. Every such Python needs ``pip install "collc[pods]"``.
"""

import argparse
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import common
import thunks
from pipeline_programs import PARTS, Flags, sets, variants

# ---- one jax ------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All programs with all sets of flags, in this process's jax: one size in MiB per device."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import collc

    h, g = options.hosts, options.gpus
    mesh = collc.pod("h100", hosts=h, gpus=g)
    spread = PartitionSpec(("host", "gpu"))
    rows, launches, refused = [], {}, set[str]()
    for mib in options.mib:
        shape = (h * g * mib * 2**18,)
        x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spread))
        for name, variant in variants(options.slices, g).items():
            mapped = jax.shard_map(
                variant.body, mesh=mesh, in_specs=spread, out_specs=spread, check_vma=False
            )
            jax.clear_caches()
            lowered = jax.jit(mapped, donate_argnums=0).lower(x)
            for flags, values in sets(options.flags).items():
                if (found := launched(lowered, variant.own | values, g)) is None:
                    refused.add(flags)
                    continue
                rows.append([name, flags, mib, thunks.judge(found)])
                launches[f"{name}; {flags}; {mib}"] = thunks.shown(found)
                print(f"jax {version('jax')}:", *rows[-1], file=sys.stderr)
    packages = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc")
    made = ", ".join(f"{p} {version(p)}" for p in packages)
    return {"rows": rows, "launches": launches, "refused": sorted(refused), "versions": made}


def launched(lowered: Any, flags: Flags, gpus: int) -> list[Any] | None:
    """The launches of a program compiled with these flags; None if this XLA does not know one."""
    import jax

    with tempfile.TemporaryDirectory() as dump:
        chosen = {"xla_gpu_autotune_level": 0, "xla_dump_to": dump} | flags
        try:
            done = lowered.compile(compiler_options=chosen)
        except jax.errors.JaxRuntimeError as e:
            if "No such compile option" in str(e):
                return None
            raise
        sequence = next(Path(dump).glob("*.thunk_sequence.txt")).read_text()
    return list(thunks.events(sequence, done.as_text(), gpus))


# ---- the report ---------------------------------------------------------------------------------


def rows_of(found: dict[str, Any], sizes: Sequence[int]) -> list[list[str]]:
    """A row for each program and all sets of flags that make the same of it."""
    by: dict[tuple[str, str], list[str]] = {}
    for name, flags, _, j in found["rows"]:
        company = f"{j['joined']} of {j['host']}" if j["host"] else "none"
        by.setdefault((name, flags), []).extend([str(j["collectives"]), str(j["most"]), company])
    alike: dict[tuple[str, ...], list[str]] = {}
    for (name, flags), cells in by.items():
        assert len(cells) == 3 * len(sizes)
        alike.setdefault((name, *cells), []).append(flags)
    every = len({flags for _, flags in by})
    return [
        [name, "any" if len(flags) == every else "; ".join(flags), *cells]
        for (name, *cells), flags in alike.items()
    ]


def least(found: dict[str, Any], name: str) -> str:
    """The shortest sets of flags with which all collectives between hosts are in company."""
    by: dict[str, list[dict[str, int]]] = {}
    for program, flags, _, j in found["rows"]:
        if program == name:
            by.setdefault(flags, []).append(j)
    every = [f for f, js in by.items() if all(j["joined"] == j["host"] for j in js)]
    short = [f for f in every if not any(set(o.split(" + ")) < set(f.split(" + ")) for o in every)]
    if short:
        return f"all of them with {' or '.join(f'`{f}`' for f in short)}"
    top = max(by, key=lambda f: sum(j["joined"] for j in by[f]))
    company = ", ".join(f"{j['joined']} of {j['host']}" for j in by[top])
    return f"at best {company}, with `{top}`" if any(j["joined"] for j in by[top]) else "none"


WHY = """
Why each flag:

- XLA lets one collective be in flight at a time and has one stream for all. `domains`, which jax 0.10.2
  does not know, gives those within hosts a stream and a limit of their own. `streams` deals streams out
  in turn: two axes may get the same one.
- XLA makes a collective synchronous if nothing but other collectives stands between its start and its
  done, and an all-reduce alone has nothing else. `async` switches off the pass that does it. Computation
  of a train step may keep some of them asynchronous without it: not measured here.
- XLA combines collectives that do not depend on each other while the result is below some 30 MiB, the
  slices of a pipeline too, and a combined one waits for all of its slices. `apart` prevents it; so do
  larger slices, and the barrier with which collc ties the slices together at every stage.
- To the scheduler a loop is one operation: the rounds of a tree between hosts are launched before or
  after a ring's loop within hosts, except one that is in flight around it. So within a pipeline collc
  does not roll the rings up.

The scheduler that does all this is on by default (`off` is without it). It overlaps only collectives
whose groups share at most one device, as those of two mesh axes do: others could deadlock in NCCL
(pull requests 19026 and 47467 of openxla/xla).
Not known without GPUs: whether the kernels of two such collectives find room on a GPU at the same time,
whether collective-permutes of two axes do (their communicators may hold more devices than a group), and
how much time any of it saves.
""".strip().splitlines()


def bullet(text: str) -> str:
    """A wrapped item of a list; names of flags stay whole."""
    return textwrap.fill(
        f"- {text}", 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def report(options: argparse.Namespace, found: list[dict[str, Any]]) -> list[str]:
    programs = variants(options.slices, options.gpus)
    sizes, pod = " or ".join(map(str, options.mib)), f"{options.hosts} hosts x {options.gpus} H100"
    lines = [
        f"An all-reduce of {sizes} MiB of float32 per device, its input donated, compiled for",
        f"{pod} without a GPU. Nothing was run: this says what XLA would launch.",
        "",
        "- *in flight*: the most collectives at once, each on a stream of its own. One that XLA made",
        "  synchronous is on the main stream, beside those that have started on others.",
        "- *in company*: of the collectives between hosts, those with one within hosts in flight at",
        "  the same time, on another stream: two axes at work.",
        "- Executions are counted: a loop's collectives once for each turn.",
        "",
        "## What it takes",
        "",
        "Of the collectives between hosts there are in company, at every size:",
        "",
    ]
    for part in found:
        apart = dict.fromkeys(row[0] for row in part["rows"] if row[3]["host"])
        for name in apart:
            lines.append(f"- {name}, {part['versions'].split(',')[0]}: {least(part, name)}.")
    lines += ["", *WHY, "", "## Programs and flags", ""]
    lines += [bullet(f"**{name}**: {program.about}.") for name, program in programs.items()]
    lines += [
        "",
        "Flags are passed as `compiler_options=`. In `XLA_FLAGS` they have these names, too:",
        "",
    ]
    given = {"given": sets(options.flags)["given"]} if options.flags else {}
    for name, flags in (PARTS | given).items():
        text = " ".join(f"--{k}={v}" for k, v in flags.items()).lower()
        lines.append(bullet(f"**{name}**: `{text}`"))
    columns = [f"{c}, {mib} MiB" for mib in options.mib for c in ("all", "in flight", "in company")]
    for part in found:
        lines += ["", f"## {part['versions']}", ""]
        lines += common.table(["program", "flags", *columns], rows_of(part, options.mib))
        if part["refused"]:
            lines += ["", f"This XLA does not know all flags of: {'; '.join(part['refused'])}."]
    for flags in ("none", "domains + async"):
        mib = options.mib[-1]
        if launches := found[0]["launches"].get(f"native, pipelined; {flags}; {mib}"):
            lines += ["", f"## Launches: native, pipelined, with `{flags}`, {mib} MiB", ""]
            lines += ["```text", *launches, "```"]
    return lines


def main() -> None:
    assert __doc__
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--hosts", type=int, default=4, help="hosts of the pod (4)")
    cli.add_argument("--gpus", type=int, default=8, help="GPUs of a host (8)")
    cli.add_argument("--slices", type=int, default=4, help="k of Pipeline(k) (4)")
    cli.add_argument(
        "--mib", type=int, nargs="+", default=[256, 1024], help="MiB per device (256 1024)"
    )
    cli.add_argument(
        "--flags", nargs="+", default=[], metavar="NAME=VALUE", help="one more set of XLA flags"
    )
    options, found = common.each_python(cli, measure)
    title = "Pipeline on GPUs: two axes in flight"
    common.publish("pipeline_gpu", title, ("jax",), report(options, found))


if __name__ == "__main__":
    main()
