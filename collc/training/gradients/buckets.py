"""Gradients in buckets: what is done alike travels together, in the order in which it is ready.

    w4 f32, w3 bf16, w2 f32, w1 f32   -->   [w3], [w4 w2], [w1]     at most two in a bucket

A bucket leaves when its last gradient is there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from collc.errors import CollcError, ScheduleError
from collc.lowering import collectives, operands, parts
from collc.planning.plan import Plan


@dataclass(frozen=True)
class Message:
    """What is done to a gradient. Only what is done alike can travel in one bucket."""

    plan: Plan
    axes: tuple[str, ...]
    dtype: str
    accumulate: str | None = None
    wire: Any = None
    scatter: bool = False
    servers: int | None = None

    def send(self, entries: Sequence["Entry"]) -> list[Any]:
        """The means of some gradients, in one reduction."""
        values = [e.value for e in entries]
        size = sum(e.bytes for e in entries)
        if self.scatter:
            return parts.scatter(
                values,
                self.plan,
                layers=[e.layers for e in entries],
                servers=self.servers,
                accumulate=self.accumulate,
            )
        whole = self.axes == self.plan.axes
        on = self.plan if whole else self.plan.schedule("all_reduce", self.axes, size=size)
        specs = [e.spec for e in entries] if operands.automatic() else None
        return collectives.pmean(
            values, on, accumulate=self.accumulate, wire=self.wire, specs=specs
        )


@dataclass(frozen=True)
class Entry:
    """A gradient that is to be reduced.

    ``message``: None for one that stays. ``ready``: its place in the order. ``layers``: how many
    dimensions in front a loop has stacked. ``name``: what messages call it.
    """

    value: Any
    message: Message | None = None
    ready: int = 0
    layers: int = 0
    spec: PartitionSpec | None = None
    name: str = ""

    @property
    def bytes(self) -> int:
        return self.value.size * self.value.dtype.itemsize


def cut(sizes: Sequence[tuple[Any, int]], limit: int) -> list[list[int]]:
    """Positions in buckets of at most so many bytes, each of one kind; a larger one stands alone.

    ``sizes``: kind and bytes, in the order in which they are ready. Buckets come in the order in
    which they are full.

    >>> cut([("f32", 4), ("bf16", 2), ("f32", 4), ("f32", 4)], 8)
    [[1], [0, 2], [3]]
    """
    open_: dict[Any, list[int]] = {}
    buckets: list[list[int]] = []
    filled: dict[Any, int] = {}
    for i, (kind, size) in enumerate(sizes):
        if kind in open_ and filled[kind] + size > limit:
            buckets.append(open_.pop(kind))
        open_.setdefault(kind, []).append(i)
        filled[kind] = size if len(open_[kind]) == 1 else filled[kind] + size
    return sorted([*buckets, *open_.values()], key=lambda bucket: bucket[-1])


def reduced(entries: Sequence[Entry], limit: int) -> list[Any]:
    """The results of all entries, in their order."""
    out = [e.value for e in entries]
    sent = sorted((i for i, e in enumerate(entries) if e.message), key=lambda i: entries[i].ready)
    for bucket in cut([(entries[i].message, entries[i].bytes) for i in sent], limit):
        here = [entries[sent[i]] for i in bucket]
        message = here[0].message
        assert message is not None
        try:
            done = message.send(here)
        except CollcError as e:
            raise type(e)(f"{_names(here)}: {e}{_remedy(message, e)}") from None
        for i, y in zip(bucket, done, strict=True):
            out[sent[i]] = y
    return out


def _names(entries: Sequence[Entry]) -> str:
    more = f" and {len(entries) - 1} more" if len(entries) > 1 else ""
    return f"{entries[0].name} ({entries[0].value.dtype}){more}"


def _remedy(message: Message, error: CollcError) -> str:
    if message.accumulate is None or not isinstance(error, ScheduleError):
        return ""
    return (
        f" The strategy keeps the sums of narrower gradients in {message.accumulate}: "
        "strategy.all_reduce(plan, accumulate=None) keeps them in their own dtype."
    )


def message_of(
    plan: Plan,
    axes: tuple[str, ...],
    x: jax.Array,
    *,
    accumulate: str | None = None,
    wire: Any = None,
    scatter: bool = False,
    servers: int | None = None,
) -> Message:
    """The message of a gradient: what is wider than ``accumulate`` is summed as it is."""
    narrow = (
        accumulate is not None
        and jnp.issubdtype(x.dtype, jnp.floating)
        and x.dtype.itemsize < jnp.dtype(accumulate).itemsize
    )
    wide = accumulate if narrow else None
    return Message(plan, axes, x.dtype.name, wide, wire, scatter, servers)
