"""Waiting for others: in silence at first, then with a word."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

PATIENCE_S = 10.0


def patience(timeout_s: float) -> float:
    """Seconds to wait in silence, of so many in all."""
    return min(PATIENCE_S, timeout_s / 2)


@contextmanager
def notice(timeout_s: float, tell: Callable[[], object]) -> Iterator[None]:
    """Calls ``tell`` once, in another thread, if the block takes longer than the patience for it."""
    timer = Timer(patience(timeout_s), tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
