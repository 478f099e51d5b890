"""What tests share: 17 virtual CPU devices, calm threads, reproducible examples, golden prints, pods."""

import os
import re
import sys
from pathlib import Path

# Before anything imports jax, which reads them once; only where the caller has not chosen.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_flags = os.environ.get("XLA_FLAGS", "")
_flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", _flags)  # 17 are needed
if "xla_cpu_collective_call_terminate" not in _flags:
    # The devices are threads. On a busy machine one may wait long for its turn: XLA must not
    # abort the process then.
    _flags = (
        f"{_flags}"
        " --xla_cpu_collective_call_terminate_timeout_seconds=300"
        " --xla_cpu_collective_call_warn_stuck_timeout_seconds=120"
    )
os.environ["XLA_FLAGS"] = f"{_flags} --xla_force_host_platform_device_count=17".strip()
# What is compiled here mostly runs once: LLVM need not optimise it. XLA's own passes, which decide
# on collectives, are the same. Under the oldest Python it does, as for users.
if sys.version_info >= (3, 12):
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# The workers of pytest-xdist share the cores: BLAS threads on top of them only wait for each other.
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import hypothesis
import pytest

# No deadline, since a first call compiles; the same examples each time, so that red stays red.
hypothesis.settings.register_profile("collc", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("collc")

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write tests/golden anew from what is printed now",
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what a test left by ``record_property("summary", [title, *lines])``.

    A property reaches the terminal from a worker of pytest-xdist too, and what is printed does not.
    """
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                for name, lines in report.user_properties:
                    if name == "summary":
                        terminalreporter.section(lines[0])
                        for line in lines[1:]:
                            terminalreporter.write_line(line)


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    """`golden("ring.txt", text)`: text equals tests/golden/ring.txt (--update-golden writes it)."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} does not exist: look at the print, then pass --update-golden"
        assert text == path.read_text(encoding="utf-8"), (
            f"{path} differs; if rightly so: --update-golden"
        )

    return check


@pytest.fixture(scope="session")
def pod():
    """`collc.pod`; the test is skipped, with the reason, where its extra is not installed."""
    import collc
    from collc.errors import PodError
    from collc.receipts.pods import toolchain

    try:
        toolchain.ready()
    except PodError as e:
        pytest.skip(f"no pods here: {e}")
    return collc.pod
