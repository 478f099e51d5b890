"""What XLA makes of an explicit ring all-reduce: copies of the whole buffer, lines, compile time.

    python benchmarks/hlo.py            prints the report and writes it to reports/hlo.md
    python benchmarks/hlo.py --print    prints it only

A process for each number of devices; nothing is run there, only compiled.
"""

import json
import math
import re
import statistics
import sys
import time
from typing import Any

import common

DEVICES = (8, 64, 256)
SIZE = 1 << 22  # bytes per device
UNROLLED = 8  # up to so many devices what is unrolled is compiled as well, to compare
MOST_LINES, MOST_SECONDS = 400, 1.0
_HEADER = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"\s+(?:ROOT )?%?[\w.\-]+ = \(?(\w+)\[([\d,]*)\].*? ([a-z][\w\-]*)\((.*)$"
)
_MOVES = {"parameter", "copy", "bitcast", "reshape", "transpose", "get-tuple-element", "tuple"}


def whole_copies(text: str, size: int) -> int:
    """The instructions that only copy ``size`` bytes of float32 or more, loops' bodies included.

    These are ``copy``, the start of an asynchronous one, and fusions that do nothing else.
    """
    computations: dict[str, list[tuple[int, str, str]]] = {}
    current: list[tuple[int, str, str]] = []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations[header[1]] = []
        elif found := _INSTRUCTION.match(line):
            dtype, dims, opcode, rest = found.groups()
            elements = math.prod(int(d) for d in dims.split(",") if d)
            current.append((4 * elements * (dtype == "f32"), opcode, rest))
    called = [(name, re.findall(r"calls=%?([\w.\-]+)", rest))
              for name, lines in computations.items() for _, opcode, rest in lines
              if opcode == "fusion"]  # fmt: skip
    inside = {name for _, names in called for name in names}

    def copies(opcode: str, rest: str) -> bool:
        if opcode != "fusion":
            return opcode in ("copy", "copy-start")
        names = re.findall(r"calls=%?([\w.\-]+)", rest)
        return all(op in _MOVES for name in names for _, op, _ in computations[name])

    return sum(
        moved >= size and copies(opcode, rest)
        for name, lines in computations.items()
        if name not in inside
        for moved, opcode, rest in lines
    )


def measure(devices: int, iterations: int) -> list[dict[str, Any]]:
    """For each ring and use, what its program looks like and how long XLA takes to make it."""
    import hand_rings
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from collc.language.library import find
    from collc.receipts.hlo import count, parse_hlo
    from collc.receipts.timing import compiled, per_device

    mesh = jax.make_mesh((devices,), (hand_rings.AXIS,))
    spread = NamedSharding(mesh, PartitionSpec(hand_rings.AXIS))
    x = jax.ShapeDtypeStruct((devices * SIZE // 4,), jnp.float32, sharding=spread)
    ring = per_device("all_reduce", find("ring.all_reduce") @ hand_rings.AXIS)
    functions = {"collc": ring, "rolled": hand_rings.rolled}
    functions["into input"] = hand_rings.rolled_into_input
    if devices <= UNROLLED:
        functions |= {"in place": hand_rings.in_place, "values": hand_rings.values}
    found = []
    for name, function in functions.items():
        for use in ("donated", "fresh"):
            seconds = []
            for _ in range(iterations):
                jax.clear_caches()
                began = time.perf_counter()
                done = compiled(lambda x, f=function: f(x), mesh, x, use)
                seconds.append(time.perf_counter() - began)
            text, memory = done.as_text(), done.memory_analysis()
            extra = memory.temp_size_in_bytes + memory.output_size_in_bytes
            found.append(
                {
                    "ring": name,
                    "use": use,
                    "permutes": count(parse_hlo(text))["collective-permute"],
                    "copies": whole_copies(text, SIZE),
                    "extra": (extra - memory.alias_size_in_bytes) / SIZE,
                    "lines": len(text.splitlines()),
                    "seconds": statistics.median(seconds),
                }
            )
            print(devices, found[-1], file=sys.stderr)
    return found


def report(found: dict[int, list[dict[str, Any]]]) -> list[str]:
    judged, every = [], []
    for devices, rows in found.items():
        for row in rows:
            every.append(
                [
                    devices,
                    row["ring"],
                    row["use"],
                    row["permutes"],
                    row["copies"],
                    row["extra"],
                    row["lines"],
                    row["seconds"],
                ]
            )
            if row["ring"] == "collc":
                what = [("lines", row["lines"], MOST_LINES)]
                what += [("seconds to compile", row["seconds"], MOST_SECONDS)]
                if row["use"] == "donated":
                    what += [("whole-buffer copies", row["copies"], 0)]
                judged += [
                    [label, devices, row["use"], measured, limit, common.verdict(measured, limit)]
                    for label, measured, limit in what
                ]
    return [
        *common.prose(
            "The optimised HLO of `ring.all_reduce`, and of the rings of `benchmarks/hand_rings.py`,",
            f"float32, {SIZE >> 20} MiB per device, for virtual CPU devices.",
        ),
        "",
        *common.prose(
            "- *Copies*: instructions that only copy the whole buffer of a device or more, wherever",
            "they stand.",
        ),
        *common.prose(
            "- *Extra*: what the program needs beside its input, in whole buffers: temporaries and,",
            "where the input is not donated, the output. Below 1 there is no second place for the",
            "whole buffer, so a copy that stands in the text is from the buffer onto itself.",
        ),
        *common.prose(
            "- *Compile*: seconds to trace, lower and compile, with jax's caches cleared; a median."
        ),
        "",
        *common.table(["promise", "devices", "use", "measured", "at most", ""], judged),
        "",
        *common.table(
            ["devices", "ring", "use", "permutes run", "copies", "extra", "lines", "compile, s"],
            every,
        ),
    ]


def main() -> None:
    given = common.parser(__doc__, iterations=3).parse_args()
    if given.part:
        print(json.dumps(measure(int(given.part), given.iterations)))
        return
    found = {n: common.part(n, n, "--iterations", given.iterations) for n in DEVICES}
    common.publish("hlo", "The code of a ring", ["jax", "jaxlib"], report(found))


if __name__ == "__main__":
    main()
