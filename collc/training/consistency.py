"""When a push takes effect: what a server does with gradients that it has been given.

A consistency is data with ``late``, ``start`` and ``exchange``; ``collc.server`` asks for nothing
else. XLA's programs run in lockstep, so a push that is late is so by a known number of steps.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from collc.errors import StepError


@runtime_checkable
class Consistency(Protocol):
    """What the server asks: what waits before the first push, and what is due at a push.

    ``start(grads)``: what waits at the beginning, a pytree, given the gradients of one rank as zeros;
    None where nothing ever waits.
    ``exchange(waiting, grads)``: the gradients that are applied now, whether there are any (None:
    always), and what waits then. ``late``: how many pushes wait.
    """

    @property
    def late(self) -> int: ...

    def start(self, grads: Any) -> Any: ...

    def exchange(self, waiting: Any, grads: Any) -> tuple[Any, jax.Array | None, Any]: ...


@dataclass(frozen=True)
class Sync:
    """A push is applied at once: equal to replicated training with the same optimizer."""

    late = 0

    def start(self, grads: Any) -> Any:
        return None

    def exchange(self, waiting: Any, grads: Any) -> tuple[Any, jax.Array | None, Any]:
        return grads, None, None


@dataclass(frozen=True)
class Delayed:
    """A push is applied ``steps`` steps later, so that its reduction overlaps the steps between.

    Each rank keeps its own gradients until then. The first ``steps`` pushes apply nothing.
    """

    steps: int = 1

    def __post_init__(self) -> None:
        if type(self.steps) is not int or self.steps < 1:
            raise StepError(
                f"Delayed({self.steps!r}): a push can be late by 1 step or more. Sync() is not late."
            )

    @property
    def late(self) -> int:
        return self.steps

    def start(self, grads: Any) -> Any:
        return {"grads": [grads] * self.steps, "pushes": jnp.int32(0)}

    def exchange(self, waiting: Any, grads: Any) -> tuple[Any, jax.Array | None, Any]:
        due, *rest = waiting["grads"]
        pushes = waiting["pushes"]
        # Counted no further than it matters: a counter that never overflows.
        later = {"grads": [*rest, grads], "pushes": jnp.minimum(pushes + 1, self.steps)}
        return due, pushes >= self.steps, later
