"""Runs `collc train` with its defaults, or its demo, and writes the summary as a report.

python benchmarks/train.py            # the defaults, in under 12 minutes on two cores
python benchmarks/train.py --demo
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

REPORTS = Path(__file__).parent / "reports"


def rows(summary: dict, wall_s: float) -> list[str]:
    side = summary["side_by_side"]
    bits = 1.4426950408889634
    table = [
        ("steps", f"{summary['steps']}"),
        ("parameters", f"{summary['parameters']:,}"),
        *(
            (name, f"{summary[key]:.3f} nats, {summary[key] * bits:.3f} bits per byte")
            for name, key in (
                ("unigram entropy", "unigram"),
                ("bigram entropy", "bigram"),
                ("validation loss", "validation"),
            )
        ),
        ("below the bigram entropy", "yes" if summary["validation"] < summary["bigram"] else "NO"),
        ("training", f"{summary['seconds']:.0f} s, {summary['tokens_per_s']:,.0f} tokens/s"),
        ("the whole command", f"{wall_s:.0f} s"),
        (
            f"largest difference of a parameter from `jax.lax.pmean`, {side['steps']} steps",
            f"{side['largest_difference']:.1e} ({side['where']}), "
            f"having moved by up to {side['largest_change']:.1e}",
        ),
        (
            "time of a step over that with `jax.lax.pmean`, median of pairs (middle half)",
            f"{side['ratio']:.2f} ({side['ratio_low']:.2f} to {side['ratio_high']:.2f})",
        ),
    ]
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in table)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--demo", action="store_true", help="the run of make demo")
    demo = parser.parse_args().demo
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        command = [sys.executable, "-m", "collc", "train", "--run", str(folder)]
        start = time.perf_counter()
        subprocess.run(command + ["--demo"] * demo, check=True)
        wall_s = time.perf_counter() - start
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    name = "train_demo" if demo else "train_default"
    option = " --demo" if demo else ""
    lines = [
        f"# `collc train{option}`",
        "",
        f"Made by `python benchmarks/train.py{option}` with Python {platform.python_version()} and jax "
        f"{jax.__version__} on",
        f"{os.cpu_count()} cores ({platform.machine()}): 8 virtual CPU devices as host=2, gpu=4, with "
        '`{"gpu": "ring", "host": "tree"}`,',
        "on the sources of that Python's standard library.",
        "",
        *rows(summary, wall_s),
    ]
    (REPORTS / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
