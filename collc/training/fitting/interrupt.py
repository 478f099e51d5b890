"""Ctrl-C and SIGTERM. Loads nothing, so that a command can enter it before what takes long."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While entered, SIGINT and SIGTERM are remembered in `signal` instead of stopping the process.

    So a step can be finished and saved. Another one raises KeyboardInterrupt. While `starting`, as
    long as nothing has been written, the first one ends the process with a line that says so: an
    exception would be swallowed by what is being imported or compiled. The old handlers return on
    exit. Off the main thread, where Python has no signals, it does nothing. Entered again within
    itself it goes on.
    """

    def __init__(self, starting: bool = False) -> None:
        self.signal = 0
        self.starting = starting
        self._old: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if not self._old and threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._remember) for number in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, old in self._old.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)
        self._old = {}

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.starting:
            os.write(2, b"stopped; nothing was written\n")
            os._exit(128 + number)
        if self.signal:
            raise KeyboardInterrupt
        self.signal = number
