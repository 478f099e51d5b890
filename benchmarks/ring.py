"""An explicit ring all-reduce against rings that are written by hand in JAX, in turns.

    python benchmarks/ring.py            prints the report and writes it to reports/ring.md
    python benchmarks/ring.py --print    prints it only

A process for each number of devices. In it, for each size and use of the buffer, all contestants
take turns, call by call; a figure is the median over the turns of collc's time to another's.
"""

import functools
import json
import sys
from typing import Any

import common

DEVICES = (8, 16)
SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)  # bytes per device
SMALL = 1 << 20  # below, three times as many turns: calls are short there, and scatter more
HAND = ("in place", "values", "rolled")
EXTRA = ("into input", "psum", "itself")


def measure(devices: int, iterations: int) -> list[dict[str, Any]]:
    """The medians of one process: for each size and use, collc's ms and its ratios to the others."""
    import hand_rings
    import jax
    import numpy as np

    from collc.language.library import find
    from collc.receipts.timing import USES, Repeated, compiled, in_turns, per_device, ratio, zeros

    mesh = jax.make_mesh((devices,), (hand_rings.AXIS,))
    ring = per_device("all_reduce", find("ring.all_reduce") @ hand_rings.AXIS)
    functions = {
        "collc": ring,
        **hand_rings.HAND,
        "into input": hand_rings.rolled_into_input,
        "psum": per_device("all_reduce", (hand_rings.AXIS,)),
        "itself": lambda x: ring(x),
    }
    assert [*functions] == ["collc", *HAND, *EXTRA]
    found = []
    for size in SIZES:
        make = functools.partial(zeros, mesh, devices * size // 4)
        for use in USES:
            donated = use == "donated"
            x = make()
            calls = {
                name: Repeated(compiled(f, mesh, x, use), make() if donated else x, donated)
                for name, f in functions.items()
            }
            turns = iterations * (3 if size < SMALL else 1)
            seconds = in_turns(calls, turns)
            ours = seconds.pop("collc")
            found.append(
                {
                    "size": size,
                    "use": use,
                    "ms": 1000 * float(np.median(ours)),
                    "ratios": {name: ratio(ours, theirs) for name, theirs in seconds.items()},
                }
            )
            print(devices, found[-1], file=sys.stderr)
    return found


def best(row: dict[str, Any]) -> tuple[str, float]:
    """The hand-written ring against which collc does worst, and the ratio to it."""
    return max(((name, row["ratios"][name]) for name in HAND), key=lambda pair: pair[1])


def promises(rows: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """(what, measured, at most) for one number of devices."""
    of = {(row["use"], row["size"]): best(row)[1] for row in rows}
    fresh = [of["fresh", size] for size in SIZES]
    donated = {size: of["donated", size] for size in SIZES}
    return [
        ("fresh, average over the sizes", sum(fresh) / len(fresh), 1.05),
        ("fresh, largest", max(fresh), 1.08),
        (
            "donated, largest from 1 MiB",
            max(r for size, r in donated.items() if size >= 1 << 20),
            0.95,
        ),
        (
            "donated, largest from 4 MiB",
            max(r for size, r in donated.items() if size >= 1 << 22),
            0.85,
        ),
    ]


def report(found: dict[int, list[dict[str, Any]]]) -> list[str]:
    judged = [
        [what, devices, measured, limit, common.verdict(measured, limit)]
        for devices, rows in found.items()
        for what, measured, limit in promises(rows)
    ]
    uses = list(dict.fromkeys(row["use"] for rows in found.values() for row in rows))
    short, every = [], []
    for devices, rows in found.items():
        for size in SIZES:
            here = {row["use"]: row for row in rows if row["size"] == size}
            cells = [f"{best(here[use])[1]:.2f} ({best(here[use])[0]})" for use in uses]
            short.append([devices, common.shown(size), *cells])
        every += [
            [
                devices,
                common.shown(row["size"]),
                row["use"],
                row["ms"],
                *(row["ratios"][name] for name in (*HAND, *EXTRA)),
            ]
            for row in rows
        ]
    return [
        *common.prose(
            "`ring.all_reduce` of collc against three rings of `benchmarks/hand_rings.py`, float32 on",
            "virtual CPU devices: *in place* (unrolled, one buffer), *values* (unrolled, what travels",
            "is a value) and *rolled* (the same in `fori_loop`). All take turns, call by call, in one",
            "process; a ratio is the median over the turns of collc's time to the other's. Below 1,",
            "collc is faster. The best of the three is the one with the largest ratio.",
        ),
        "",
        *common.table(["promise", "devices", "measured", "at most", ""], judged),
        "",
        "## Against the best of the three",
        "",
        *common.prose(
            "*Fresh*: the input is kept, the output is new. *Donated*: the input is given up, and the",
            "output is the next input. *Intermediate*: the program makes the input itself and uses the",
            "output up, as a train step does.",
        ),
        "",
        *common.table(["devices", "per device", *uses], short),
        "",
        "## Against each",
        "",
        *common.prose(
            "Three more that the promises leave out. *Into input*: *rolled*, but that the gather writes",
            "into the input, which is dead by then: what collc's lowering does, so the two should tie.",
            "*Psum*: XLA's own all-reduce. *Itself*: collc's ring compiled a second time, which says",
            "how far a ratio of 1 scatters here. Where the input is kept, XLA copies it for the gather",
            "to write into, which reads and writes all of it; *rolled* fills its output with zeros",
            "instead, which only writes, but takes one more buffer where the input is donated",
            "([hlo](hlo.md)).",
        ),
        "",
        *common.table(["devices", "per device", "use", "collc, ms", *HAND, *EXTRA], every),
    ]


def main() -> None:
    given = common.parser(__doc__, iterations=11).parse_args()
    if given.part:
        print(json.dumps(measure(int(given.part), given.iterations)))
        return
    found = {n: common.part(n, n, "--iterations", given.iterations) for n in DEVICES}
    common.publish("ring", "A ring against rings by hand", ["jax", "jaxlib"], report(found))


if __name__ == "__main__":
    main()
