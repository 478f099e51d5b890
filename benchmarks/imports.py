"""How long importing collc takes, against importing what it stands on.

    python benchmarks/imports.py            prints the report and writes it to reports/imports.md
    python benchmarks/imports.py --print    prints it only

Whole processes, ``python -c "import ..."``, take turns; a ratio is the median over the turns. The
first turns, which write the .pyc files, do not count.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import common
import numpy as np

from collc.receipts.timing import in_turns, ratio

# (what is imported, against what, how many times as long it may take)
PROMISES = [
    ("import collc", "import jax, flax", 1.3),
    ("import collc.language", "import numpy", 1.5),
]
# What a user does in the end, though nothing is promised of it.
BESIDE = [("import collc; collc.plan, collc.schedule, collc.pmean", "import jax, flax")]


def process(code: str) -> Callable[[], float]:
    def call() -> float:
        began = time.perf_counter()
        # -P: what is imported is what is installed, not what lies in this folder.
        subprocess.run([sys.executable, "-P", "-c", code], check=True)
        return time.perf_counter() - began

    return call


def report(iterations: int) -> list[str]:
    pairs = [(new, old) for new, old, _ in PROMISES] + BESIDE
    seconds = {}
    for old in dict.fromkeys(old for _, old in pairs):
        codes = [old, *(new for new, base in pairs if base == old)]
        seconds[old] = in_turns({code: process(code) for code in codes}, iterations)
    promised = {(new, old): limit for new, old, limit in PROMISES}
    rows = []
    for new, old in pairs:
        ours, base = seconds[old][new], seconds[old][old]
        limit = promised.get((new, old))
        found = ratio(ours, base)
        rows.append(
            [
                f"`{new}`",
                1000 * float(np.median(ours)),
                f"`{old}`",
                1000 * float(np.median(base)),
                found,
                "" if limit is None else f"{limit}: {common.verdict(found, limit)}",
            ]
        )
        print(rows[-1], file=sys.stderr)
    empty = 1000 * statistics.median(process("")() for _ in range(5))
    return [
        *common.prose(
            'Wall-clock time of whole processes, `python -c "..."`, which take turns: medians of',
            f"{iterations}, the ratio that of each turn. An empty process takes {empty:.0f} ms, on",
            "both sides. The public names of collc are resolved when they are first used: the last",
            "row uses some.",
        ),
        "",
        *common.table(["", "ms", "against", "ms", "ratio", "at most"], rows),
    ]


def main() -> None:
    given = common.parser(__doc__, iterations=15).parse_args()
    common.publish("imports", "Imports", ["jax", "flax", "numpy"], report(given.iterations))


if __name__ == "__main__":
    main()
