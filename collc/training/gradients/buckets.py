"""Gradients in buckets: what is done alike travels together, in the order in which it is ready.

    w4 f32, w3 bf16, w2 f32, w1 f32   -->   [w3], [w4 w2], [w1]     at most two in a bucket

A bucket leaves when its last gradient is there. Sums that are kept wider than the gradients travel as
they are kept, or every rank would round them when it sends them on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from collc.errors import CollcError, ScheduleError
from collc.language.algebra import Schedule
from collc.language.library import find
from collc.lowering import collectives, operands, parts
from collc.lowering.primitive import is_narrower
from collc.lowering.use import wire_format
from collc.planning.plan import Plan
from collc.training.strategy import Strategy


@dataclass(frozen=True)
class Message:
    """What is done to a gradient. Only what is done alike can travel in one bucket.

    ``sums``: the dtype in which sums are kept. So they travel, but for a ``wire`` that says how.
    """

    plan: Plan
    axes: tuple[str, ...]
    dtype: str
    sums: str
    wire: Any = None
    scatter: bool = False
    servers: int | None = None

    def bytes(self, x: Any) -> int:
        """How many bytes of a gradient, or of its shape, travel."""
        straight = self.servers is not None  # no sums travel to k servers
        sent = jax.ShapeDtypeStruct(x.shape, self.dtype if straight else self.sums)
        packed = jax.eval_shape(wire_format("strategies", self.wire).pack, sent)
        return sum(math.prod(y.shape) * y.dtype.itemsize for y in jax.tree.leaves(packed))

    def schedule(self, size: int) -> Schedule:
        """By what so many bytes are reduced."""
        if self.servers is not None:
            return find(f"servers.push({self.servers})") @ self.axes
        return self.plan.schedule(
            "reduce_scatter" if self.scatter else "all_reduce", self.axes, size=size
        )

    def pull(self, size: int) -> Schedule:
        """By what the parameters of a server come back, of so many bytes."""
        if self.servers is not None:
            return find(f"servers.pull({self.servers})") @ self.axes
        return self.plan.schedule("all_gather", self.axes, size=size)

    def send(self, entries: Sequence["Entry"]) -> list[Any]:
        """The means of some gradients, in one reduction."""
        values = [e.value for e in entries]
        if self.scatter:
            return parts.scatter(
                values,
                self.plan,
                layers=[e.layers for e in entries],
                servers=self.servers,
                sums=self.sums,
                wire=self.wire,
            )
        on = self.schedule(sum(map(self.bytes, values)))
        specs = [e.spec for e in entries] if operands.automatic() else None
        means = collectives.pmean(
            [x.astype(self.sums) for x in values], on, wire=self.wire, specs=specs
        )
        return [y.astype(x.dtype) for x, y in zip(values, means, strict=True)]


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
    sizes = [(m, m.bytes(entries[i].value)) for i in sent if (m := entries[i].message)]
    for bucket in cut(sizes, limit):
        here, message = [entries[sent[i]] for i in bucket], sizes[bucket[0]][0]
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
    if message.wire is None or not isinstance(error, ScheduleError):
        return ""
    return " Without wire= of the strategy, sums travel as they are kept."


def message_of(strategy: Strategy, x: Any) -> Message | None:
    """The message of a gradient, or of its shape: None where each rank keeps its own."""
    if not strategy.over:
        return None
    dtype, wide = jnp.dtype(x.dtype).name, strategy.accumulate
    sums = wide if wide is not None and is_narrower(x.dtype, wide) else dtype
    scatter, servers = strategy.kind == "server", strategy.servers
    return Message(strategy.placed, strategy.over, dtype, sums, strategy.wire, scatter, servers)
