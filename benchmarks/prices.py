"""How long prices and simulations take, and how much memory, as machines grow.

    python benchmarks/prices.py            prints the table and writes the report beside it
    python benchmarks/prices.py --print    prints it only

Each runs in a process of its own; the time is that from the text of the machine and the schedule to
the price, imports not counted, the memory the peak of the whole process.
"""

from collections.abc import Iterator

import common

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


def rows(iterations: int) -> Iterator[list[object]]:
    """A row for each case."""
    for what, text, sizes in CASES:
        mesh = " ".join(f"{axis}={n}" for axis, n in sizes.items())
        # The best of several: what disturbs a run only makes it longer.
        runs = [common.child(ONE, [what, text, sizes, SIZE]) for _ in range(iterations)]
        if len({run[2] for run in runs}) > 1:
            raise SystemExit(f"{what} {text}: not the same each time: {runs}")
        seconds, peak, predicted = min(runs)
        said = ""
        if goal := GOALS.get((what, text, mesh)):
            most, memory = goal
            said = f"{most:.0f} s: {common.verdict(seconds, most)}"
            said += f"; {memory} MB: {common.verdict(peak, memory)}" if memory else ""
        yield [what, f"`{text}`", mesh, seconds, round(peak), f"{predicted * 1e3:.3f}", said]


def main() -> None:
    given = common.parser(__doc__, 3).parse_args()
    head = ["what", "schedule", "mesh", "took, s", "peak, MB", "predicted, ms", "goal"]
    lines = common.prose(
        "Of hosts with 8 H100s each (dgx-h100), 64 MiB on a rank. Wall-clock seconds without imports,",
        f"best of {given.iterations}; peak memory of the process. Prices are by the lowered model,",
        "simulations by the abstract one; all runs predicted the same to the last digit.",
    )
    common.publish(
        "prices",
        "Prices and simulations, as machines grow",
        ["numpy", "networkx"],
        [*lines, "", *common.table(head, list(rows(given.iterations)))],
    )


if __name__ == "__main__":
    main()
