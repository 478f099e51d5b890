"""How long a proof takes, and how much memory, as meshes grow.

    python benchmarks/proof_scale.py            prints the table and writes the report beside it
    python benchmarks/proof_scale.py --print    prints it only

Each proof runs in a process of its own, without the cache of proofs. Its time is that of
``collc.verify`` in wall-clock seconds; its memory is the peak of the whole process, of which
the interpreter with NumPy and collc ("baseline") is most.
"""

import argparse
import platform
import sys
from pathlib import Path

from common import child

REPORT = Path(__file__).parent / "reports" / "proof_scale.md"
CASES = [
    ("ring.all_reduce @ gpu", {"gpu": 64}),
    ("ring.all_reduce @ gpu", {"gpu": 256}),
    ("ring.all_reduce @ gpu", {"gpu": 1024}),
    ("ring.all_reduce @ gpu", {"gpu": 4096}),
    ('hierarchical("host", "gpu")', {"host": 512, "gpu": 8}),
    ("tree.double_all_reduce @ gpu", {"gpu": 4096}),
    ("server.star @ gpu", {"gpu": 1024}),
    ("server.shards(64) @ gpu", {"gpu": 256}),
    ("pairwise.all_to_all @ gpu", {"gpu": 512}),
    ('pairwise.two_level("host", "gpu")', {"host": 128, "gpu": 8}),
]
# (schedule, mesh): (seconds, MB) that the project promises.
GOALS = {
    ("ring.all_reduce @ gpu", "gpu=1024"): (2.0, 512),
    ("ring.all_reduce @ gpu", "gpu=4096"): (20.0, 500),
    ('hierarchical("host", "gpu")', "host=512 gpu=8"): (0.5, None),
}
LIBRARY_GOAL = 10.0  # seconds for every schedule of the library at 256 ranks, all together
# What the library's families are called with there, and on which mesh.
FAMILIES = {
    "hierarchical": (("host", "gpu"), {"host": 32, "gpu": 8}),
    "pairwise.two_level": (("host", "gpu"), {"host": 32, "gpu": 8}),
    "rack.all_reduce": ([[*range(8 * i, 8 * i + 8)] for i in range(32)], {"gpu": 256}),
    "ring.rings": ([[i * k % 256 for i in range(256)] for k in (1, 3)], {"gpu": 256}),
    "server.shards": ((64,), {"gpu": 256}),
    "torus": (("x", "y"), {"x": 16, "y": 16}),
}
ONE = """
import json, resource, sys, time
import collc
from collc.language.parse import parse
text, sizes = json.loads(sys.argv[1])
schedule = parse(text) if text else None
start = time.perf_counter()
found = collc.verify(schedule, **sizes) if schedule is not None else None
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kB, but on macOS bytes
peak /= 1024 if sys.platform == "linux" else 1 << 20
print(json.dumps([seconds, peak, found and found.steps, found and found.rounds]))
"""
LIBRARY = """
import json, resource, sys, time
import collc
from collc.language.algebra import Order
from collc.language.leaves import Family
from collc.language.library import contents, modules
families = json.loads(sys.argv[1])
frozen = lambda x: tuple(map(frozen, x)) if isinstance(x, list) else x
called = []
for module in modules().values():
    for found in contents(module).values():
        if isinstance(found, Family):
            if found.name not in families:
                sys.exit(f"say in FAMILIES what the family {found.name} is called with")
            arguments, sizes = families.pop(found.name)
            called.append((found.name + "(...)", found(*frozen(arguments)), sizes))
        elif not isinstance(found, Order):
            called.append((str(found), found, {"gpu": 256}))
if families:
    sys.exit(f"FAMILIES names what the library does not have: {list(families)}")
took = []
for name, schedule, sizes in called:
    start = time.perf_counter()
    collc.verify(schedule if schedule.axes else schedule @ "gpu", **sizes)
    took.append((time.perf_counter() - start, name))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
peak /= 1024 if sys.platform == "linux" else 1 << 20
print(json.dumps([took, peak]))
"""


def measure(text: str, sizes: dict[str, int]) -> tuple[float, float, int, int]:
    """(seconds, peak MB, steps, rounds) of one proof, in a new process with an empty cache."""
    seconds, peak, steps, rounds = child(ONE, [text, sizes])
    return seconds, peak, steps, rounds


def table() -> list[str]:
    base = measure("", {})[1]
    rows = [
        "| schedule | mesh | steps | rounds | proof, s | peak, MB | goal |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for text, sizes in CASES:
        mesh = " ".join(f"{axis}={n}" for axis, n in sizes.items())
        # The best of three: what disturbs a run only makes it longer.
        seconds, peak, steps, rounds = min(measure(text, sizes) for _ in range(3))
        goal = GOALS.get((text, mesh))
        shown = ""
        if goal:
            met = seconds <= goal[0] and (goal[1] is None or peak <= goal[1])
            size = f", {goal[1]} MB" if goal[1] else ""
            shown = f"{goal[0]} s{size}: {'met' if met else 'MISSED'}"
        rows.append(
            f"| `{text}` | {mesh} | {steps} | {rounds} | {seconds:.3f} | {peak:.0f} | {shown} |"
        )
        print(rows[-1], file=sys.stderr)
    return [*rows, *library(), "", f"Baseline, no proof: {base:.0f} MB."]


def library() -> list[str]:
    """The row of all schedules of the library together, in one process."""
    took, peak = min(
        (child(LIBRARY, FAMILIES) for _ in range(3)), key=lambda run: sum(s for s, _ in run[0])
    )
    total = sum(seconds for seconds, _ in took)
    met = "met" if total <= LIBRARY_GOAL else "MISSED"
    slowest = [f"`{name}` {seconds:.2f} s" for seconds, name in sorted(took, reverse=True)[:5]]
    return [
        f"| every schedule of the library, {len(took)} | 256 ranks |  |  | {total:.3f} | {peak:.0f} "
        f"| {LIBRARY_GOAL} s: {met} |",
        "",
        f"Of the library the slowest are {', '.join(slowest)}.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--print", action="store_true", help="do not write the report")
    only_print = parser.parse_args().print
    lines = [
        "# Proofs, as meshes grow",
        "",
        "Made by `python benchmarks/proof_scale.py` with Python "
        f"{platform.python_version()} on {platform.machine()}: wall-clock seconds of `collc.verify` in",
        "a new process with an empty cache of proofs (best of 3), and the peak memory of that process.",
        "The library is proved in one process, where a leaf is proved once; native leaves are axioms.",
        "",
        *table(),
    ]
    print("\n".join(lines))
    if not only_print:
        REPORT.parent.mkdir(exist_ok=True)
        REPORT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
