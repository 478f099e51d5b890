"""The process of one host, with what it starts itself and what they write."""

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

from collc.runtime.launch.failure import Failure
from collc.runtime.launch.logs import Lines, Logs
from collc.runtime.launch.warden import Warden

LAST = 20  # lines of a host that failed which are shown again
# How long what a host has started, in a session of its own, may keep its streams open after its end:
# while it writes nothing, and in all.
DRAIN_S, DRAINS_S = 1.0, 5.0


class Process:
    """A host's process, the leader of its own group and session.

    ``code``: None while it runs, then its exit code, or minus the signal that killed it; ``ended``:
    when, in s. ``over``: also what it wrote has been read.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        logs: Logs,
        warden: Warden,
    ) -> None:
        self.name, self.ended, self._heard = name, 0.0, 0.0
        self.code: int | None = None
        self._logs, self._warden = logs, warden
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self.pid = self._process.pid
        warden.began(self.pid)
        self._streams = {self._process.stdout: Lines(), self._process.stderr: Lines()}
        self._last: deque[str] = deque(maxlen=LAST)

    @property
    def streams(self) -> list[IO[bytes]]:
        """Those that are open."""
        return [stream for stream in self._streams if stream is not None]

    @property
    def over(self) -> bool:
        return self.code is not None and not self._streams

    def failure(self) -> Failure:
        """How it failed."""
        assert self.code
        return Failure(self.name, self.code, tuple(self._last))

    def send(self, number: int) -> None:
        """The signal to the host's whole group, which it reaches also where that is stopped."""
        if self.code is None:
            self._send(number)
            if number != signal.SIGKILL:
                self._send(signal.SIGCONT)

    def poll(self) -> None:
        """Notices its end, and lines whose ends have not come in time.

        What it has left running ends with it, as where a machine is lost.
        """
        if self.code is None and (code := self._process.poll()) is not None:
            self._send(signal.SIGKILL)
            self._warden.ended(self.pid)
            self.code, self.ended = code, time.monotonic()
            self._heard = self.ended
        for stream in self.streams:
            self._write(stream, self._streams[stream].late(time.monotonic()))
        now = time.monotonic()
        if self.code is not None and (now - self._heard > DRAIN_S or now - self.ended > DRAINS_S):
            for stream in self.streams:
                os.set_blocking(stream.fileno(), False)
                with suppress(BlockingIOError):
                    self.read(stream)  # what the host itself had left there, if our reader is slow
                if stream in self._streams:
                    self._close(stream)

    def read(self, stream: IO[bytes]) -> None:
        """What the stream has for us, once; closes it at its end."""
        data = os.read(stream.fileno(), 1 << 16)
        if data:
            self._write(stream, self._streams[stream].feed(data, time.monotonic()))
        else:
            self._close(stream)
        self._heard = time.monotonic()  # after writing, which may have taken its time

    def _close(self, stream: IO[bytes]) -> None:
        self._write(stream, self._streams.pop(stream).feed(b"", time.monotonic(), end=True))
        stream.close()

    def _write(self, stream: IO[bytes], lines: Sequence[str]) -> None:
        for line in lines:
            self._last.append(line)
            self._logs.line(self.name, line, stream is self._process.stderr)

    def _send(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
