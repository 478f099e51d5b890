"""Loops that run side by side share one body.

Lowering a part of a schedule is a generator: it yields the loops that it needs and gets back what
they carry out. Parts that stand side by side and want loops of equal length get one, with the
bodies of all, so that their messages can be in flight together.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax


@dataclass(frozen=True)
class Loop:
    """``carry = body(i, carry)`` for i = 0 to count - 1."""

    count: int
    body: Callable[[Any, Any], Any]
    carry: Any


Lowering = Generator[Loop, Any, Any]


def scoped(name: str, lowering: Lowering) -> Lowering:
    """Names what a lowering does, its loops' bodies too.

    A ``with`` around a ``yield`` would name what others do in the meantime.
    """
    value = None
    while True:
        with jax.named_scope(name):
            try:
                loop = lowering.send(value)
            except StopIteration as stop:
                return stop.value

        def body(t: Any, carry: Any, loop: Loop = loop) -> Any:
            with jax.named_scope(name):
                return loop.body(t, carry)

        value = yield Loop(loop.count, body, loop.carry)


def together(parts: Sequence[Lowering]) -> Generator[Loop, Any, list[Any]]:
    """Runs the parts side by side and returns their results."""
    results: list[Any] = [None] * len(parts)
    waiting: dict[int, Loop] = {}

    def advance(i: int, value: Any) -> None:
        try:
            waiting[i] = parts[i].send(value)
        except StopIteration as stop:
            results[i] = stop.value

    for i in range(len(parts)):
        advance(i, None)
    while waiting:
        count = next(iter(waiting.values())).count
        now = {i: loop for i, loop in waiting.items() if loop.count == count}
        loops = list(now.values())

        def body(t: Any, carries: Any, loops: list[Loop] = loops) -> Any:
            return tuple(loop.body(t, c) for loop, c in zip(loops, carries, strict=True))

        carries = yield Loop(count, body, tuple(loop.carry for loop in loops))
        for i, carry in zip(now, carries, strict=True):
            del waiting[i]
            advance(i, carry)
    return results


def run(lowering: Lowering) -> Any:
    """Drives a lowering to its end, with a ``fori_loop`` for each loop that it asks for."""
    value = None
    while True:
        try:
            loop = lowering.send(value)
        except StopIteration as stop:
            return stop.value
        value = lax.fori_loop(0, loop.count, loop.body, loop.carry)
