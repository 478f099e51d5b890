"""A process that outlives the launcher only to end the hosts that it leaves behind.

It is told process groups on its standard input, ``+123`` and, once that one is gone, ``-123``. The
launcher alone holds the other end: however it dies, the input ends, and what is left is killed. Run
as a script by a bare Python; the launcher's side is `Warden`.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress


class Warden:
    """While entered, a warden watches over this process and ends the groups it was told of."""

    def __enter__(self) -> "Warden":
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            start_new_session=True,  # Ctrl-C and what kills the launcher's group do not reach it
        )
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def began(self, group: int) -> None:
        self._tell(f"+{group}\n")

    def ended(self, group: int) -> None:
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        assert self._process.stdin
        with suppress(BrokenPipeError):  # killed by someone: the job goes on without it
            self._process.stdin.write(line.encode())


def watch() -> None:
    """The warden's own life."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # sent to all at once, as systemd does
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        (groups.add if line[0] == "+" else groups.discard)(group)
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    watch()
