"""Signals that the launcher passes on to its hosts."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP")


class Signals:
    """While entered, signals come here. ``asked``: the first one, 0 before; ``twice``: another came.

    The first one goes to ``send`` at once, a second one as SIGKILL. What is ignored, as SIGHUP is
    under nohup, stays so. Off the main thread, where Python has no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.asked, self.twice = 0, False
        self.send: Callable[[int], None] | None = None
        self._old: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            for number in (getattr(signal, name) for name in PASSED_ON):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._old[number] = signal.signal(number, self._came)
        return self

    def __exit__(self, *error: object) -> None:
        for number, old in self._old.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)

    def pass_on(self, number: int) -> None:
        """As if the signal had come. Writes nothing: it may interrupt what writes."""
        self.asked, self.twice = self.asked or number, bool(self.asked)
        if self.send is not None:
            self.send(signal.SIGKILL if self.twice else number)

    def _came(self, number: int, frame: FrameType | None) -> None:
        self.pass_on(number)
