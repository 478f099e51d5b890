"""How long devices waited for a batch: from the end of a step, which nobody else looks at."""

import math
import threading
import time
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Self

import jax


class Moment:
    """When a step's outputs were there: the devices have nothing to do then, until the next step."""

    def __init__(self, outputs: Any) -> None:
        self._arrays: list[Any] = [x for x in jax.tree.leaves(outputs) if isinstance(x, jax.Array)]
        self._at = math.inf
        self._noted = threading.Event()

    def note(self) -> None:
        """Wait for the outputs, and note the time."""
        with suppress(Exception):  # of a step that failed: whoever reads its outputs says so
            jax.block_until_ready(self._arrays)
        self._at = time.perf_counter()
        self._noted.set()

    def waited(self, since: float) -> float:
        """For how many seconds the devices have waited: from ``since``, a time of perf_counter, or
        from when the outputs were there, whichever is later. 0 while the step runs.
        """
        now = time.perf_counter()
        if not all(x.is_ready() for x in self._arrays):
            return 0.0
        self._noted.wait()
        return max(0.0, now - max(since, self._at))


class Watch:
    """Notes when the outputs of steps are there, in a thread of its own, while it is entered.

    The time that a batch took is not the time that devices waited for it: they worked meanwhile.
    """

    def __init__(self) -> None:
        self._asked: SimpleQueue[Moment | None] = SimpleQueue()

    def __enter__(self) -> Self:
        # A daemon: a device that never ends its step must not keep the process.
        threading.Thread(target=self._note, name="collc-watch", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._asked.put(None)

    def when(self, outputs: Any) -> Moment:
        """The moment at which a pytree of arrays is there. Not of arrays that are donated later."""
        moment = Moment(outputs)
        self._asked.put(moment)
        return moment

    def _note(self) -> None:
        while (moment := self._asked.get()) is not None:
            moment.note()
