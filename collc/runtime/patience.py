"""Waiting for others: in silence at first, then with a word."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from threading import Timer
from typing import Any

from collc.errors import CollcError

PATIENCE_S = 10.0
LONGEST_S = 1e6  # what JAX is told in ms fits, and timers of the system


def seconds(name: str, value: Any, error: type[CollcError]) -> float:
    """A number of seconds, NumPy's too. Raises the error for what is none, or not above 0."""
    given: Any = value if isinstance(value, Real) and not isinstance(value, bool) else 0
    if not 0 < given <= LONGEST_S:
        raise error(
            f"{name} is {value!r}: a number of seconds above 0 is needed, {LONGEST_S:,.0f} at most."
        )
    return float(given)


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
