"""The emulated hosts of benchmarks/, and the soak on them, for tests."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

# For these imports only: a script of benchmarks/ must not stand for a module of its name elsewhere.
sys.path.insert(0, str(BENCHMARKS))
from hosts import account, namespaces, report  # noqa: E402
from hosts.namespaces import NetworkError  # noqa: E402
from hosts.network import Network  # noqa: E402
from soak import disk, evidence, faults, judge  # noqa: E402

sys.path.remove(str(BENCHMARKS))

__all__ = [
    "BENCHMARKS", "Network", "NetworkError", "account", "disk", "evidence", "faults", "judge",
    "namespaces", "report",
]  # fmt: skip
