"""The thread that carries beats to and from the store, where it may hang for ever."""

import threading
from collections.abc import Callable
from dataclasses import replace

from collc.runtime.watchdog.beats import Beat, Store
from collc.runtime.watchdog.judge import View

HURRY_S = 0.1  # from one turn to the next once the job is ending


class Messenger:
    """Publishes the beat that ``own`` returns, and reads those of all, every ``pause`` seconds.

    view: what was read, by the clock ``now``. stacks: that others left, read once the job is ending.
    published: the last state that has reached the store. error: of the last call, "" for none.
    """

    def __init__(
        self,
        store: Store,
        view: View,
        own: Callable[[], Beat],
        now: Callable[[], float],
        pause: float,
    ) -> None:
        self.view, self.stacks, self.published, self.error = view, dict[int, str](), "", ""
        self.stack = ""  # of this process, to be left before its next beat
        self._store, self._own, self._now, self._pause = store, own, now, pause
        self._hurried = self._last = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="collc-messenger", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hurry(self) -> None:
        """Carry at once, and often from now on."""
        self._hurried, self._pause = True, HURRY_S
        self._wake.set()

    def stop(self, timeout: float) -> None:
        """Carry once more and end. Whether it could or not, this returns after ``timeout`` seconds."""
        self._last = True
        self._wake.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            last = self._last
            try:
                self._carry()
                self.error = ""
            except Exception as error:  # whatever gRPC says: the judge sees that nothing was read
                self.error = f"{type(error).__name__}: {error}"
            if last:
                return
            self._wake.wait(self._pause)
            self._wake.clear()

    def _carry(self) -> None:
        if self.stack:
            self._store.leave_stack(self.view.me, self.stack)
            self.stack = ""
        beat = self._own()
        self._store.publish(self.view.me, beat)
        self.published = beat.state
        beats = self._store.beats()
        if self._hurried:
            self.stacks = self._store.stacks()
        now = self._now()
        self.view = replace(self.view.after(beats, now), answered=now)
