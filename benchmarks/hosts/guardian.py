"""A process that outlives a network's owner only to remove the network that it leaves behind.

The owner alone holds the other end of its standard input, and says a word before it closes it; if the
input ends without one, the owner was killed. Run as a module; the owner's side is `Guardian`.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from hosts import namespaces
from hosts.namespaces import NetworkError

READY, DONE = b"ready", b"done"
LOOKS, BETWEEN_S = 3, 0.5


class Guardian:
    """Watches over this process until it leaves, for the network whose names begin with ``prefix``.

    Raises NetworkError where the process does not start.
    """

    def __init__(self, prefix: str) -> None:
        path = [str(Path(__file__).parents[1]), *map(os.path.abspath, sys.path)]
        # Ctrl-C, and what kills the owner's group, do not reach another session.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hosts.guardian", prefix],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            bufsize=0, cwd="/", start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        )  # fmt: skip
        assert self._process.stdout
        if self._process.stdout.read(len(READY)) != READY:
            raise NetworkError(
                f"the process that is to clean up ended with {self._process.wait()}. See why: "
                f"{sys.executable} -m hosts.guardian {prefix} </dev/null, in benchmarks/"
            )

    def leave(self) -> None:
        """The owner has removed all itself."""
        assert self._process.stdin and self._process.stdout
        with suppress(BrokenPipeError):  # killed by someone
            self._process.stdin.write(DONE)
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def watch(prefix: str) -> None:
    """The guardian's own life."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # sent to all at once, as systemd does
    os.write(sys.stdout.fileno(), READY)
    if sys.stdin.buffer.read() == DONE:
        return
    for look in range(LOOKS):  # a command that the owner had begun may have made something since
        time.sleep(BETWEEN_S if look else 0)
        namespaces.remove_all(prefix)


if __name__ == "__main__":
    watch(sys.argv[1])
