"""A tuned plan against psum and against every single schedule, at sizes that its sweep did not try.

    python benchmarks/auto.py            prints the report and writes it to reports/auto.md
    python benchmarks/auto.py --print    prints it only

A process for each number of devices, with an empty cache: it makes ``collc.plan(mesh, "auto")`` for
each use of the buffer, which sweeps, and then compares. All take turns, call by call; a figure is
the median over the turns of the plan's time to another's.
"""

import functools
import json
import sys
import tempfile
import time
from typing import Any

import common
import hlo

DEVICES = (8, 16)
# Bytes per device, and none of the sweep's own.
SIZES = (6 << 10, 16 << 10, 96 << 10, 512 << 10, 1 << 20, 4 << 20, 15 << 20)
LARGE = 4 << 20
HOPELESS = 1.5  # of the best one's time in the first turns: compared no further


def library() -> dict[str, Any]:
    """Every all-reduce for one axis that the library has and that leaves replicas equal."""
    from collc.analysis.certificate import verify
    from collc.language.algebra import Schedule
    from collc.language.library import contents, modules

    return {
        str(value): value
        for module in modules().values()
        for value in contents(module).values()
        if isinstance(value, Schedule) and not value.axes and value.collective
        and value.collective.name == "all_reduce" and verify(value, n=8).consistent is not False
    }  # fmt: skip


def sliced(x: Any) -> Any:
    """psum in four slices, each written over its input: what a donated buffer might be spared by."""
    import jax

    def body(i: Any, rows: Any) -> Any:
        row = jax.lax.dynamic_index_in_dim(rows, i, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(rows, jax.lax.psum(row, "gpu"), i, 0)

    return jax.lax.fori_loop(0, 4, body, x.reshape(4, -1)).reshape(x.shape)


def measure(devices: int, iterations: int) -> dict[str, Any]:
    """The medians of one process: for each use and size, the plan's choice and its ratios."""
    import os

    import jax
    import numpy as np

    import collc
    from collc.planning.tune import SIZES as SWEPT
    from collc.receipts.timing import USES, Repeated, compiled, in_turns, per_device, ratio, zeros

    assert not set(SIZES) & set(SWEPT)
    mesh = jax.make_mesh((devices,), ("gpu",))
    single = {name: schedule @ "gpu" for name, schedule in library().items()}
    rows, sweeps = [], {}
    with tempfile.TemporaryDirectory() as empty:
        os.environ["COLLC_CACHE"] = empty
        for use in USES:
            began = time.perf_counter()
            plan = collc.plan(mesh, "auto", use=use)
            sweeps[use] = time.perf_counter() - began
            for size in SIZES:
                make = functools.partial(zeros, mesh, devices * size // 4)
                x, donated = make(), use == "donated"
                chosen = plan.schedule("all_reduce", size=size)
                functions = {
                    "auto": compiled(per_device("all_reduce", plan), mesh, x, use),
                    "psum": compiled(per_device("all_reduce", ("gpu",)), mesh, x, use),
                }
                for name, schedule in single.items():
                    functions[name] = compiled(per_device("all_reduce", schedule), mesh, x, use)
                if donated and size == LARGE:
                    functions["sliced"] = compiled(sliced, mesh, x, use)
                code = {name: common.operations(f.as_text()) for name, f in functions.items()}
                same = {name for name in code if name != "auto" and code[name] == code["auto"]}
                calls = {
                    name: Repeated(f, make() if donated else x, donated)
                    for name, f in functions.items()
                }
                first = {name: float(np.median(t)) for name, t in in_turns(calls, 3).items()}
                fastest = min(single, key=first.__getitem__)
                bar = HOPELESS * first[fastest]
                always = ("auto", "psum", "sliced", fastest)
                kept = {n: call for n, call in calls.items() if n in always or first[n] <= bar}
                seconds = in_turns(kept, iterations * (5 if size < 1 << 20 else 1))
                ratios = {
                    name: ratio(seconds["auto"], theirs)
                    for name, theirs in seconds.items()
                    if name != "auto"
                }
                noise = {name: abs(r - 1) for name, r in ratios.items() if name in same}
                others = {n: r for n, r in ratios.items() if n in single and n not in same}
                best = max(others, key=others.__getitem__, default="")
                rows.append(
                    {
                        "use": use,
                        "size": size,
                        "chosen": str(chosen),
                        "same": "psum" in same,
                        "noise": max(noise.values(), default=0.0),
                        "ms": 1000 * float(np.median(seconds["auto"])),
                        "psum": ratios["psum"],
                        "psum_ms": 1000 * float(np.median(seconds["psum"])),
                        "sliced_ms": 1000 * float(np.median(seconds.get("sliced", 0.0))),
                        "copies": [
                            hlo.whole_copies(functions[n].as_text(), size) for n in ("psum", "auto")
                        ],
                        "best": best,
                        "to_best": others.get(best),
                    }
                )
                print(devices, rows[-1], file=sys.stderr)
    return {"rows": rows, "sweeps": sweeps, "singles": len(single)}


def native(row: dict[str, Any]) -> bool:
    return row["chosen"].startswith("native.all_reduce")


def promises(rows: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """(what, measured, at most) for one number of devices."""
    donated = [r["psum"] for r in rows if r["use"] == "donated" and r["size"] >= LARGE]
    other = [r["psum"] for r in rows if not r["same"]]
    return [
        ("to psum where the program is another, largest", max(other, default=0.0), 1.05),
        ("to the best single schedule of another program, largest",
         max((r["to_best"] for r in rows if r["best"]), default=0.0), 1.05),
        ("donated from 4 MiB: to psum, largest", max(donated), 0.7),
        ("chosen native, but another HLO", float(sum(native(r) and not r["same"] for r in rows)), 0.0),
    ]  # fmt: skip


def why(found: dict[int, dict[str, Any]]) -> list[str]:
    """What a donated psum and the plan's schedule do at 4 MiB, where the promise is the hardest."""
    lines = []
    for devices, part in found.items():
        at = {r["use"]: r for r in part["rows"] if r["size"] == LARGE}
        kept, gone = at["fresh"], at["donated"]
        lines += common.prose(
            f"- {devices} devices, 4 MiB: psum takes {kept['psum_ms']:.1f} ms where its input is kept",
            f"and {gone['psum_ms']:.1f} ms where it is donated, with {gone['copies'][0]} copy of the",
            f"whole buffer in its HLO; the plan's schedule takes {gone['ms']:.1f} ms, with",
            f"{gone['copies'][1]}; psum in four slices, each written over its input,",
            f"{gone['sliced_ms']:.1f} ms. 0.7 of psum would be {0.7 * gone['psum_ms']:.1f} ms.",
        )
    return [
        "## Donated buffers",
        "",
        *common.prose(
            "XLA:CPU does not all-reduce in place, so a donated psum copies its result into the input's",
            "buffer. A reduce-scatter and an all-gather need no copy, but meet twice. How much the copy",
            "costs depends on whether the buffers of all devices fit into the processor's caches:",
        ),
        "",
        *lines,
        "",
    ]


def report(found: dict[int, dict[str, Any]]) -> list[str]:
    judged = [
        [what, devices, measured, limit, common.verdict(measured, limit)]
        for devices, part in found.items()
        for what, measured, limit in promises(part["rows"])
    ]
    every = [
        [
            devices, common.shown(r["size"]), r["use"],
            "native" if native(r) else r["chosen"].removesuffix(" @ gpu"),
            ("same" if r["same"] else "OTHER") if native(r) else "-",
            r["ms"], r["psum"], r["to_best"] or "-", r["best"] or "-", r["noise"],
        ]
        for devices, part in found.items()
        for r in part["rows"]
    ]  # fmt: skip
    sweeps = [
        [devices, use, seconds]
        for devices, part in found.items()
        for use, seconds in part["sweeps"].items()
    ]
    return [
        *common.prose(
            '`collc.plan(mesh, "auto", use=...)`, tuned in this process for each use of the buffer,',
            "against `jax.lax.psum` and against each of the library's",
            f"{next(iter(found.values()))['singles']} all-reduces for one axis, float32 on virtual CPU",
            "devices, at sizes that the sweep did not try. All take turns, call by call; a ratio is the",
            "median over the turns of the plan's time to the other's. *Best*: the single schedule with",
            "the largest ratio, of the fastest in the first turns. Left out: families, and",
            "`allpairs.one_shot`, whose replicas may differ. Where a contestant is compiled to the same",
            "instructions as the plan, the ratio is 1 but for *noise*, the largest difference from 1 of",
            "such a row: two copies of one program, each with its own memory. *HLO*: where native is",
            "chosen, whether the program is that of psum.",
        ),
        "",
        *common.table(["promise", "devices", "measured", "at most", ""], judged),
        "",
        *why(found),
        "## The sweeps",
        "",
        *common.table(["devices", "use", "seconds"], sweeps),
        "",
        "## Every size",
        "",
        *common.table(
            [
                "devices",
                "per device",
                "use",
                "chosen",
                "HLO",
                "ms",
                "to psum",
                "to best",
                "best",
                "noise",
            ],
            every,
        ),
    ]


def main() -> None:
    given = common.parser(__doc__, iterations=21).parse_args()
    if given.part:
        print(json.dumps(measure(int(given.part), given.iterations)))
        return
    found = {n: common.part(n, n, "--iterations", given.iterations) for n in DEVICES}
    common.publish("auto", "A tuned plan against psum", ["jax", "jaxlib"], report(found))


if __name__ == "__main__":
    main()
