"""How a process ends that an exception ends: a process of its own."""

import subprocess
import sys

import pytest

LEAVES = """
import atexit, sys
from collc.runtime.ending import leave_where_failed
atexit.register(print, "waits for the others")
for _ in range(2):
    leave_where_failed(lambda: {waits})
atexit.register(print, "saved")
{last}
"""


@pytest.mark.parametrize(
    ("last", "waits", "code", "said"),
    [
        ("raise ValueError", True, 1, ["saved"]),
        ("raise KeyboardInterrupt", True, -2, ["saved"]),
        ("raise ValueError", False, 1, ["saved", "waits for the others"]),
        ("sys.exit(3)", True, 3, ["saved", "waits for the others"]),
        ("", True, 0, ["saved", "waits for the others"]),
    ],
)
def test_who_failed_leaves_by_itself(last, waits, code, said):
    script = LEAVES.format(last=last, waits=waits)
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (found.returncode, found.stdout.splitlines()) == (code, said), found.stderr
    assert found.stderr.count("Traceback") == last.startswith("raise")
