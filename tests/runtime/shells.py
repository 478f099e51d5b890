"""What tests of the launcher ask of the system's processes."""

import subprocess
import time


def running(marker):
    """Processes whose command has the marker."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,args="], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if marker in line and "ps -A" not in line]


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)
    return found
