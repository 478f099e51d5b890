"""The receipt: what XLA made of a program, beside what the program asked for.

It is made of the optimised HLO alone, so it is as good for a step that uses no schedule of collc's.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from collc.errors import ReceiptError
from collc.lowering.account import Asked, hlo_dtype
from collc.receipts.compare import UNPLANNED, Difference, size
from collc.receipts.hlo import Collective, Module, count
from collc.receipts.hlo.work import Buffer
from collc.receipts.pods import Pod
from collc.receipts.spans import Links

By = Literal["plan", "program", "XLA"]


@dataclass(frozen=True)
class Entry:
    """A collective of the program, and who asked for it: a plan, the program's own lax, or XLA itself.

    ``axes``: of the mesh, along which those that exchange something differ; None where the mesh is not
    known, ``links`` where the pod is not: bytes of all devices
    in all executions.
    """

    collective: Collective
    axes: tuple[str, ...] | None
    links: Links | None
    by: By
    serves: tuple[tuple[Asked, int], ...] = ()

    @property
    def scope(self) -> str:
        """Who asked for it: the schedule's named scope, or the end of JAX's name stack."""
        return scope(self.collective.op_name)


@dataclass(frozen=True)
class Memory:
    """Bytes on each device. ``aliased``: of the outputs, what lies in donated arguments."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    capacity: int | None

    @property
    def total(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries

    @property
    def fits(self) -> bool:
        return self.capacity is None or self.total <= self.capacity


@dataclass(frozen=True)
class Receipt:
    """What one call of a compiled program does.

    Attributes:
      module: the HLO text as parsed.
      sizes: the mesh's axes, outermost first; empty where the mesh is not known.
      entries: the collectives, in the order of the program.
      asked: what the program asked for; None where only its HLO was given.
      differences: how ``entries`` differ from ``asked``.
      absent: of ``asked``, what is not there, and how many executions of it.
      memory: None where only text was given.
      seconds: of "lower", "compile" and "receipt", as far as they were done here.
    """

    module: Module = field(repr=False)
    sizes: Mapping[str, int]
    pod: Pod | None
    entries: tuple[Entry, ...]
    asked: tuple[Asked, ...] | None
    differences: tuple[Difference, ...]
    absent: tuple[tuple[Asked, int], ...]
    memory: Memory | None
    seconds: Mapping[str, float]

    @property
    def collectives(self) -> dict[str, int]:
        """Executions by kind."""
        return count(e.collective for e in self.entries)

    @cached_property
    def unplanned(self) -> int:
        """Executions of collectives that neither a plan nor the program itself asked for."""
        if self.asked is None:
            return sum(e.collective.count for e in self.entries if e.by == "XLA")
        return sum(d.count for d in self.differences if d.what == UNPLANNED)

    @cached_property
    def links(self) -> Links | None:
        """Bytes that all devices send over NVLink and the network; None where the pod is not known."""
        known = [e.links for e in self.entries if e.links is not None]
        return sum(known, Links(0, 0)) if self.pod is not None else None

    @cached_property
    def largest(self) -> tuple[Buffer, ...]:
        """The largest values of the program on a device, the largest first."""
        return self.module.buffers(8)

    @property
    def exposed(self) -> tuple[Entry, ...]:
        """The collectives beside which nothing is computed."""
        return tuple(e for e in self.entries if not e.collective.beside)

    def expect(
        self,
        *,
        collectives: Mapping[str, int] | None = None,
        wire_dtype: Any = None,
        unplanned: int | None = None,
        differences: int | None = None,
        memory: int | None = None,
    ) -> "Receipt":
        """Raises ReceiptError, which is an AssertionError, unless the receipt says so; returns itself.

        ``collectives``: executions by kind, of all kinds that there are. ``wire_dtype``: what every
        collective carries, but for single numbers such as a loss. ``unplanned``, ``differences``: how
        many there are. ``memory``: the most bytes that a device may need.
        """
        wrong = []
        if collectives is not None and dict(collectives) != self.collectives:
            wrong.append(f"collectives are {_counts(self.collectives)}, not {_counts(collectives)}")
        if wire_dtype is not None:
            name = _wire(wire_dtype)
            wrong += [
                f"{e.collective.name} carries {dtype}, not {name} ({e.scope})"
                for e in self.entries
                for dtype, shape in zip(e.collective.dtypes, e.collective.shapes)
                if dtype != name and math.prod(shape) > 1
            ]
        if unplanned is not None and unplanned != self.unplanned:
            wrong.append(f"{self.unplanned} collectives are unplanned, not {unplanned}")
            wrong += [str(d) for d in self.differences if d.what == UNPLANNED]
        if differences is not None and self.asked is None:
            raise ReceiptError(
                "differences= has no effect: what was asked for is not known. Pass asked= to receipt."
            )
        if differences is not None and differences != len(self.differences):
            wrong.append(f"there are {len(self.differences)} differences, not {differences}")
            wrong += [str(d) for d in self.differences]
        if memory is not None:
            if self.memory is None:
                raise ReceiptError("memory= has no effect: HLO text says nothing of it. Drop it.")
            if self.memory.total > memory:
                found = f"a device needs {self.memory.total:,} bytes ({size(self.memory.total)})"
                wrong.append(f"{found}, not at most {memory:,}")
        if wrong:
            raise ReceiptError("the receipt is not as expected:\n  " + "\n  ".join(wrong))
        return self

    def __str__(self) -> str:
        from collc.receipts.show import text

        return text(self)


def scope(op_name: str) -> str:
    """Whose operation it is, from JAX's name stack: a schedule's named scope, or the last names.

    >>> scope("jit(f)/shard_map/while/body/collc/ring.all_gather/gpu/r0-2/ppermute")
    'collc/ring.all_gather/gpu'
    >>> scope("jit(f)/transpose(jvp(block))/while/body/attention/dot_general")
    'block/attention/dot_general'
    """
    ours = re.match(r"(?:.*/)?(collc/.*?)(?:/r\d+(?:-\d+)?)?/[^/]*$", op_name)
    if ours:
        return ours[1]
    names = re.sub(r"\bjit\([^()]*\)", "", op_name)
    names = re.sub(r"\b(?:jvp|transpose|vmap|remat|checkpoint|rematted_computation)\b", "", names)
    kept = [n for n in re.split(r"[/()]+", names) if n and n not in _PLUMBING]
    return "/".join(kept[-3:])


_PLUMBING = {"shard_map", "while", "body", "closed_call", "core_call", "cond", "eval_jaxpr"}


def _wire(dtype: Any) -> str:
    try:
        return hlo_dtype(dtype)
    except (TypeError, KeyError):
        raise ReceiptError(f"wire_dtype={dtype!r} is no dtype. Write it as in jax.numpy.") from None


def _counts(collectives: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in sorted(collectives.items())) or "none"
