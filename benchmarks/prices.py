"""How long prices and simulations take, and how much memory, as machines grow.

    python benchmarks/prices.py            prints the table and writes the report beside it
    python benchmarks/prices.py --print    prints it only

Each runs in a process of its own; the time is that from the text of the machine and the schedule to
the price, imports not counted, the memory the peak of the whole process.
"""

import argparse
import platform
import sys
from pathlib import Path

from common import child

REPORT = Path(__file__).parent / "reports" / "prices.md"
HIERARCHICAL = 'hierarchical("host", "gpu")'
CASES = [
    ("price", HIERARCHICAL, {"host": 512, "gpu": 8}),
    ("price", HIERARCHICAL, {"host": 8192, "gpu": 8}),
    ("price", "ring.all_reduce @ (host, gpu)", {"host": 512, "gpu": 8}),
    ("price", "native.all_reduce @ (host, gpu)", {"host": 8192, "gpu": 8}),
    ("price", 'pairwise.two_level("host", "gpu")', {"host": 128, "gpu": 8}),
    ("simulate", HIERARCHICAL, {"host": 512, "gpu": 8}),
    ("simulate", HIERARCHICAL, {"host": 8192, "gpu": 8}),
    ("simulate", "ring.all_reduce @ (host, gpu)", {"host": 64, "gpu": 8}),
]
# (what, schedule, mesh): (seconds, MB) that the project promises.
GOALS = {
    ("price", HIERARCHICAL, "host=8192 gpu=8"): (5.0, 2048),
    ("simulate", HIERARCHICAL, "host=512 gpu=8"): (30.0, None),
}
ONE = """
import json, resource, sys, time
from collc.language.parse import parse
from collc.machine.flow import flow
from collc.machine.placement import placed
from collc.machine.price import price
from collc.machine.simulation.simulate import simulate
from collc.machine.text import machine
what, text, sizes, size = json.loads(sys.argv[1])
start = time.perf_counter()
place = placed(machine(f"dgx-h100:{sizes['host']}"), sizes)
schedule = parse(text)
if what == "price":
    found = price(schedule, place, size)
    predicted = found.lowered
else:
    predicted = simulate(flow(schedule, sizes), place, size).seconds
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kB, but on macOS bytes
peak /= 1024 if sys.platform == "linux" else 1 << 20
print(json.dumps([seconds, peak, predicted]))
"""
SIZE = 64 << 20


def table() -> list[str]:
    """A row for each case."""
    rows = [
        "| what | schedule | mesh | took, s | peak, MB | predicted, ms | goal |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    for what, text, sizes in CASES:
        mesh = " ".join(f"{axis}={n}" for axis, n in sizes.items())
        # The best of three: what disturbs a run only makes it longer.
        runs = [child(ONE, [what, text, sizes, SIZE]) for _ in range(3)]
        if len({run[2] for run in runs}) > 1:
            raise SystemExit(f"{what} {text}: not the same each time: {runs}")
        seconds, peak, predicted = min(runs)
        shown = ""
        if goal := GOALS.get((what, text, mesh)):
            met = seconds <= goal[0] and (goal[1] is None or peak <= goal[1])
            most = f", {goal[1]} MB" if goal[1] else ""
            shown = f"{goal[0]:.0f} s{most}: {'met' if met else 'MISSED'}"
        rows.append(
            f"| {what} | `{text}` | {mesh} | {seconds:.2f} | {peak:.0f} | {predicted * 1e3:.3f} "
            f"| {shown} |"
        )
        print(rows[-1], file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--print", action="store_true", help="do not write the report")
    only_print = parser.parse_args().print
    lines = [
        "# Prices and simulations, as machines grow",
        "",
        f"Made by `python benchmarks/prices.py` with Python {platform.python_version()} on "
        f"{platform.machine()}: of hosts with 8 H100s each",
        "(dgx-h100), 64 MiB on a rank. Wall-clock seconds without imports, best of 3; peak memory.",
        "Prices are by the lowered model, simulations by the abstract one; the three runs",
        "predicted the same to the last digit.",
        "",
        *table(),
    ]
    print("\n".join(lines))
    if not only_print:
        REPORT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
