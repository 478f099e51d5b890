"""What compiling a train step for 4,096 GPUs costs a laptop, and what collc adds to it.

    python benchmarks/pods.py            prints the report and writes it to reports/pods.md
    python benchmarks/pods.py --print    prints it only

The language model of ``models/`` at a size that people train, for 512 hosts with 8 H100s each. No
GPU is needed: ``pip install "collc[pods]"``. Each measurement is a process of its own, with no proof
kept from an earlier one; ways take turns, and a ratio is taken within a turn.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import common

MODEL, HOSTS, GPUS = "transformer:medium", 512, 8
STAGES = ("pod", "plan", "shapes", "trace", "lower", "compile", "receipt")
MOST_MEMORY = 3000  # MB of 10^6 bytes, of a process


@dataclass(frozen=True)
class Way:
    """A way to reduce the gradients. ``gpu``, ``host``: schedules; without them jax.lax.pmean is used.

    ``most``: what it may take of the time of jax.lax.pmean.
    """

    gpu: str = ""
    host: str = ""
    most: float = 3.0

    @property
    def name(self) -> str:
        return f"{self.gpu}/{self.host}" if self.gpu else "lax.pmean"


PLAIN = Way()
WAYS = (
    PLAIN,
    Way("native", "native", 1.5),
    Way("ring", "tree"),
    Way("ring", "ring"),
    Way("doubling", "doubling"),
    Way("halving", "halving"),
)

# ---- one process --------------------------------------------------------------------------------


def measure(way: Way, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each stage, the process's peak memory in MB, and what the receipt counted."""
    import collc
    from collc.receipts.pods.flags import untuned
    from collc.receipts.reading import receipt
    from collc.training.lm.abstract import abstract_step

    seconds: dict[str, float] = {}
    before = processor()

    def timed(stage: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        done = work()
        seconds[stage] = time.perf_counter() - began
        return done

    mesh = timed("pod", lambda: collc.pod("h100", hosts=options.hosts, gpus=GPUS))
    by = mesh
    if way.gpu:
        by = timed("plan", lambda: collc.plan(mesh, {"gpu": way.gpu, "host": way.host}))
    step, arguments = timed("shapes", lambda: abstract_step(options.model, by))
    traced = timed("trace", lambda: step.trace(*arguments))
    lowered = timed("lower", traced.lower)
    compiled = timed("compile", lambda: lowered.compile(compiler_options=untuned()))
    plain = processor()
    made = timed("receipt", lambda: receipt(compiled, asked=traced))
    after = processor()
    if not way.gpu:
        del seconds["receipt"]  # plain JAX has none
        after = plain
    return {
        "seconds": seconds,
        "total": sum(seconds.values()),
        "processor": after - before,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
        "collectives": made.collectives,
        "differences": len(made.differences),
        "gpu": made.memory.total / 1e9,
        "most": made.memory.capacity / 1e9,
    }


def processor() -> float:
    """Seconds of processor time until now, in this process and in those that it has started."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in used)


def parameters(name: str) -> int:
    """The model's number of parameters; nothing is computed."""
    import jax

    from collc.models import transformer
    from collc.training.lm.abstract import abstract_step

    mesh = jax.make_mesh((1,), ("gpu",))
    return transformer.parameters(abstract_step(name, mesh)[1][0])


# ---- the report ---------------------------------------------------------------------------------

Turns = dict[str, list[dict[str, Any]]]


def in_turns(options: argparse.Namespace) -> Turns:
    found: Turns = {way.name: [] for way in options.ways}
    for turn in range(options.iterations):
        for way in options.ways:
            with tempfile.TemporaryDirectory() as cache:
                os.environ["COLLC_CACHE"] = cache
                given = ("--model", options.model, "--hosts", options.hosts)
                found[way.name].append(common.part(way.name, 1, *given))
            print(turn, way.name, found[way.name][-1], file=sys.stderr)
    return found


def median(values: Any) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def ratios(found: Turns, name: str, of: str = "total") -> list[float]:
    """What a way takes over what plain JAX does, turn by turn."""
    return [a[of] / b[of] for a, b in zip(found[name], found[PLAIN.name], strict=True)]


def report(options: argparse.Namespace, found: Turns, size: int) -> list[str]:
    ways, most = options.ways, MOST_MEMORY / 1000
    promises = [
        (f"time, {way.name}, of plain JAX's", median(ratios(found, way.name)), way.most)
        for way in ways
        if way.gpu
    ]
    largest = max(turn["memory"] for turns in found.values() for turn in turns)
    promises += [("peak memory of a process, GB", largest / 1000, most)]
    rows = []
    for way in ways:
        turns = found[way.name]
        stages = [median(turn["seconds"].get(s, 0.0) for turn in turns) for s in STAGES]
        rows.append([way.name, *stages, median(t["total"] for t in turns)])
    made = []
    for way in ways:
        last, memory = found[way.name][-1], median(t["memory"] for t in found[way.name])
        kinds = ", ".join(f"{n} {kind}" for kind, n in last["collectives"].items())
        made.append([way.name, int(memory), last["gpu"], last["differences"], kinds])
    spread = []
    for way in ways[1:]:
        whole, work = ratios(found, way.name), ratios(found, way.name, "processor")
        seconds = median(turn["processor"] for turn in found[way.name])
        spread.append([way.name, *(min(whole), max(whole)), seconds, median(work)])
    return [
        *common.prose(
            f"The train step of `{options.model}` ({size:,} parameters, AdamW, layers in a scan with",
            f"remat, 8 examples of 1,024 tokens per GPU) for {options.hosts} hosts with {GPUS} H100s",
            f"each, compiled without a GPU. *{PLAIN.name}*: plain JAX with `jax.shard_map`, without a",
            "receipt. The others are plans: the schedule of axis gpu / that of axis host; *native* is",
            "XLA's own. Each is measured in a process of its own, imports left out, with an",
            "empty folder of proofs, and compiled with `xla_gpu_autotune_level=0`.",
            f"They take turns, {options.iterations} of them; a ratio is the",
            "median over the turns.",
        ),
        "",
        *common.table(
            ["promise", "measured", "at most", ""],
            [[what, value, limit, common.verdict(value, limit)] for what, value, limit in promises],
        ),
        "",
        "Seconds, medians:",
        "",
        *common.table(["", *STAGES, "all"], rows),
        "",
        *common.prose(
            "What is left in the process and in the program: its peak memory; the memory that one GPU",
            f"needs, of {found[PLAIN.name][0]['most']:.0f} GB; the differences that the receipt names",
            "between the program and what it asked for; executions of collectives.",
        ),
        "",
        *common.table(["", "host, MB", "GPU, GB", "differences", "collectives"], made),
        "",
        *common.prose(
            "The smallest and the largest ratio of a turn, and processor time, which other work on the",
            "machine disturbs less:",
        ),
        "",
        *common.table(["", "smallest", "largest", "processor, s", "ratio"], spread),
    ]


def main() -> None:
    assert __doc__
    cli = common.parser(__doc__, iterations=3)
    cli.add_argument("--model", default=MODEL, help=f"the model ({MODEL})")
    cli.add_argument("--hosts", type=int, default=HOSTS, help=f"hosts of the pod ({HOSTS})")
    cli.add_argument("--only", nargs="+", metavar="WAY", help="these ways, and plain JAX")
    options = cli.parse_args()
    by_name = {way.name: way for way in WAYS}
    if unknown := set(options.only or ()) - by_name.keys():
        cli.error(f"no way is called {', '.join(sorted(unknown))}: there are {'; '.join(by_name)}")
    chosen = {PLAIN.name, *(options.only or by_name)}
    options.ways = [way for way in WAYS if way.name in chosen]
    if options.part == "parameters":
        print(json.dumps(parameters(options.model)))
        return
    if options.part:
        print(json.dumps(measure(by_name[options.part], options)))
        return
    size = common.part("parameters", 1, "--model", options.model)
    lines = report(options, in_turns(options), size)
    packages = ("jax", "jaxlib", "jax-cuda13-pjrt", "flax")
    common.publish("pods", "Compiling for 4,096 GPUs", packages, lines)


if __name__ == "__main__":
    main()
