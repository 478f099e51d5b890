"""The time in which this process ran."""

import threading
import time

LATE = 3  # pauses, after which a process was not running, rather than late


class Clock:
    """Seconds, without those in which this process was stopped, or could not run Python.

    One that was stopped and goes on must not take the silence for that of the others. It has to be
    asked every ``pause`` seconds.
    """

    def __init__(self, pause: float) -> None:
        self._pause, self._last, self._lost = pause, time.monotonic(), 0.0
        self._lock = threading.Lock()

    def now(self) -> float:
        with self._lock:
            now = time.monotonic()
            if now - self._last > LATE * self._pause:
                self._lost += now - self._last - self._pause
            self._last = now
            return now - self._lost
