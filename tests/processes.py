"""Two real processes over loopback, with two devices each."""

import os
import socket
import subprocess
import sys


def run(script, arguments, environments=({}, {}), timeout=240):
    """(exit code, stdout, stderr) of each. In sys.argv a script finds the port, its number, and its
    own of the two lists of ``arguments``. One that waits for ever is killed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    usual = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(port), str(me), *map(str, arguments[me])],
            env={**os.environ, **usual, **environments[me]},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for me in range(2)
    ]
    try:
        said = [_said(worker, timeout) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return [(worker.returncode, *both) for worker, both in zip(workers, said, strict=True)]


def outputs(script, *arguments):
    """What two processes that succeed print, both with the same arguments."""
    results = run(script, (arguments, arguments))
    assert [code for code, _, _ in results] == [0, 0], results
    return [out for _, out, _ in results]


def _said(worker, timeout):
    try:
        return worker.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        worker.kill()
        return worker.communicate()
