"""The plan that a step runs under.

A ``jax.make_user_context`` value: it takes part in jit's cache keys, so that an inner ``jit``,
``remat`` or ``scan`` that another plan has traced is traced again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import jax

from collc.language.algebra import Schedule


@runtime_checkable
class Chooses(Protocol):
    """What a plan is to the lowering: a choice of schedule for a collective on some of its axes."""

    def schedule(
        self, collective: str, axes: tuple[str, ...] | None = None, *, size: int | None = None
    ) -> Schedule: ...


_current = jax.make_user_context(None)


def current() -> Chooses | None:
    """The plan of the step that is being traced, if any."""
    return _current.value


@contextmanager
def using(plan: Any) -> Iterator[None]:
    """The plan is current within."""
    with _current(plan):
        yield
