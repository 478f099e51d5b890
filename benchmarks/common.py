"""What the benchmarks share: processes with virtual devices, and reports that say how to make them."""

import argparse
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?[\w.\-]+ = (\S.* [a-z][\w\-]*\(.*)")
REPORTS = Path(__file__).parent / "reports"


def parser(doc: str, iterations: int) -> argparse.ArgumentParser:
    """The options of every script; ``--part`` is for the processes that it starts itself."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("--print", action="store_true", help="do not write the report")
    made.add_argument(
        "--iterations", type=int, default=iterations, help=f"turns of a median ({iterations})"
    )
    made.add_argument("--part", help=argparse.SUPPRESS)
    return made


def part(name: str | int, devices: int, *options: str | int) -> Any:
    """What this script's ``--part NAME`` prints as JSON, in a process with that many CPU devices.

    The number of devices has to be chosen before jax is imported. The devices are threads: on a
    busy machine one may wait long for its turn, and XLA must not abort the process then.
    """
    flags = (
        f"--xla_force_host_platform_device_count={devices}",
        "--xla_cpu_collective_call_terminate_timeout_seconds=300",
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    )
    done = subprocess.run(
        [sys.executable, sys.argv[0], "--part", str(name), *map(str, options)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)},
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def each_python(
    cli: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], Any]
) -> tuple[argparse.Namespace, list[Any]]:
    """The options, and what ``measure`` finds with them in this Python and in those of ``--also``.

    Each compiles for GPUs in a process of its own. Ends the process where one of them cannot.
    """
    cli.add_argument("--print", action="store_true", help="do not write the report")
    cli.add_argument(
        "--also", nargs="+", default=[], metavar="PYTHON", help="other Pythons to compile with"
    )
    cli.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    options = cli.parse_args()
    if options.part:
        _ready_for_gpus()
        print(json.dumps(measure(options)))
        sys.exit()
    found = []
    for python in (sys.executable, *options.also):
        done = subprocess.run(
            [python, *sys.argv, "--part"],
            env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        if done.returncode:
            sys.exit(done.returncode)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return options, found


def _ready_for_gpus() -> None:
    """Ends the process with what to install if something is missing."""
    script = Path(sys.argv[0]).stem
    if importlib.util.find_spec("jax") is None:
        sys.exit(f"{script}: {sys.executable} has no jax. Name a Python with collc installed.")
    from collc.errors import PodError
    from collc.receipts.pods import toolchain

    try:
        toolchain.ready()
    except PodError as e:
        sys.exit(f"{script}: {sys.executable}: {e}")


def machine(*packages: str) -> str:
    """Python, the versions of these packages, and how many cores there are."""
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    cores = f"{os.cpu_count()} cores ({platform.machine()})"
    return f"Python {platform.python_version()}, {versions}, on {cores}"


def operations(text: str) -> Counter[str]:
    """How often each instruction stands in HLO text: type, operands' types, groups, but no names."""
    found: Counter[str] = Counter()
    for line in text.splitlines():
        if match := _INSTRUCTION.match(line):
            bare = re.split(r", (?:metadata|backend_config)=", match[1])[0]
            found[re.sub(r"%[\w.\-]+", "%", re.sub(r"channel_id=\d+", "", bare))] += 1
    return found


def shown(size: int) -> str:
    """Bytes in KiB or MiB."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A Markdown table; columns of numbers are set to the right."""
    cells = [[f"{c:.2f}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    right = [all(isinstance(row[i], int | float) for row in rows) for i in range(len(header))]
    lines = [list(header), ["---:" if r else "---" for r in right], *cells]
    return ["| " + " | ".join(line) + " |" for line in lines]


def prose(*sentences: str) -> list[str]:
    """A paragraph, wrapped as the documentation is; a list's item where it begins with a dash."""
    text = " ".join(sentences)
    indent = "  " if text.startswith("- ") else ""
    keep = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, 120, subsequent_indent=indent, **keep)


def verdict(measured: float, promised: float) -> str:
    """Whether what is promised to be at most this much is."""
    return "met" if measured <= promised else "MISSED"


def publish(name: str, title: str, packages: Sequence[str], lines: Sequence[str]) -> None:
    """Prints the report, and writes it to reports/NAME.md unless ``--print`` is given."""
    options = [option for option in sys.argv[1:] if option != "--print"]
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *options])
    made = f"Made by `{command}` with {machine(*packages)}."
    text = "\n".join([f"# {title}", "", made, "", *lines]) + "\n"
    print(text, end="")
    if "--print" not in sys.argv[1:]:
        REPORTS.mkdir(exist_ok=True)
        (REPORTS / f"{name}.md").write_text(text, encoding="utf-8")


def child(code: str, given: object) -> list:
    """What the code prints as JSON, run in a new process with an empty cache of proofs."""
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps(given)],
            env={"COLLC_CACHE": empty, "PATH": "", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    return json.loads(done.stdout)
