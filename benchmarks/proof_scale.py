"""How long a proof takes, and how much memory, as meshes grow.

    python benchmarks/proof_scale.py            prints the table and writes the report beside it
    python benchmarks/proof_scale.py --print    prints it only

Each proof runs in a process of its own, without the cache of proofs. Its time is that of
``collc.verify`` in wall-clock seconds; its memory is the peak of the whole process, of which
the interpreter with NumPy and collc ("baseline") is most.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

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
    ('hierarchical("host", "gpu")', "host=512 gpu=8"): (0.5, None),
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


def measure(text: str, sizes: dict[str, int]) -> tuple[float, float, int, int]:
    """(seconds, peak MB, steps, rounds) of one proof, in a new process with an empty cache."""
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            [sys.executable, "-c", ONE, json.dumps([text, sizes])],
            env={"COLLC_CACHE": empty, "PATH": "", "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    seconds, peak, steps, rounds = json.loads(done.stdout)
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
    return [*rows, "", f"Baseline, no proof: {base:.0f} MB."]


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
        "",
        *table(),
    ]
    print("\n".join(lines))
    if not only_print:
        REPORT.parent.mkdir(exist_ok=True)
        REPORT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
