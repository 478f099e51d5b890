"""The receipt: what XLA made of a program, beside what the program asked for.

It is made of the optimised HLO alone, so it is as good for a step that uses no schedule of collc's.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from collc.errors import DataError, ReceiptError, nearest
from collc.language.ir import integer
from collc.lowering.sends import Asked, hlo_dtype
from collc.receipts.compare import UNPLANNED, Difference
from collc.receipts.hlo import KINDS, Collective, Module, count
from collc.receipts.hlo.work import Buffer
from collc.receipts.matching import joined
from collc.receipts.measures import size
from collc.receipts.pods import Pod
from collc.receipts.spans import Links, sent

By = Literal["plan", "program", "XLA"]
Overlap = Literal["hidden", "brief", "exposed"]


@dataclass(frozen=True)
class Entry:
    """A collective of the program, and who asked for it: a plan, the program's own lax, or XLA itself.

    Attributes:
      collective: what stands in the HLO.
      axes: of the mesh, along which those that exchange something differ; None without a mesh.
      links: bytes of all devices in all executions; None where the pod is not known.
      by: who asked.
      serves: the requests that it answers, and how often each.
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

    @property
    def overlap(self) -> Overlap:
        """Whether a matrix product or a convolution runs beside it, only small kernels, or nothing."""
        works = self.collective.beside
        return "hidden" if any(w.flops for w in works) else "brief" if works else "exposed"


@dataclass(frozen=True)
class Memory:
    """Bytes on each device.

    ``aliased``: of the outputs, what lies in donated arguments. ``constants``: arrays that are part of
    the program.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    constants: int
    capacity: int | None

    @property
    def total(self) -> int:
        held = self.arguments + self.outputs - self.aliased
        return held + self.temporaries + self.constants

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
      seconds: of "trace", "lower", "compile" and "receipt", as far as they were done here.
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
        sent = self._sent
        return None if sent is None else Links(*(round(x) for x in sent.sum(axis=1)))

    @cached_property
    def busiest(self) -> Links | None:
        """What the device that sends most over NVLink does, and the one over the network."""
        sent = self._sent
        return None if sent is None else Links(*(round(x) for x in sent.max(axis=1)))

    @cached_property
    def _sent(self) -> NDArray[np.float64] | None:
        if self.pod is None:
            return None
        total = np.zeros((2, self.module.devices))
        for e in self.entries:
            total += sent(e.collective, self.pod.domain_of)
        return total

    @cached_property
    def largest(self) -> tuple[Buffer, ...]:
        """The largest values of the program on a device, the largest first."""
        return self.module.buffers(8)

    def moved(self, overlap: Overlap | None = None) -> int:
        """Bytes of the results of all executions on one device; of those collectives alone, if named."""
        chosen = (e for e in self.entries if overlap in (None, e.overlap))
        return sum(e.collective.bytes * e.collective.count for e in chosen)

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
        if collectives is not None:
            collectives = _kinds(collectives)
        for name, number in (
            ("unplanned", unplanned),
            ("differences", differences),
            ("memory", memory),
        ):
            if number is not None and integer(number) is None:
                raise DataError(f"{name}= takes an integer, not {number!r}")
        if collectives is not None and collectives != self.collectives:
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
            raise DataError(
                "differences= has no effect: what was asked for is not known. Pass asked= to receipt."
            )
        if differences is not None and differences != len(self.differences):
            wrong.append(f"there are {len(self.differences)} differences, not {differences}")
            wrong += [str(d) for d in self.differences]
        if memory is not None:
            if self.memory is None:
                raise DataError("memory= has no effect: HLO text says nothing of it. Drop it.")
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
    >>> scope("jit(f)/(jvp()/mlp/dot:a/collc/tree.reduce/host/r0/ppermute)")  # XLA combined two
    'mlp/dot + collc/tree.reduce/host'
    """
    return " + ".join(dict.fromkeys(_scope(name) for name in joined(op_name)))


def _scope(op_name: str) -> str:
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
        raise DataError(f"wire_dtype={dtype!r} is no dtype. Write it as in jax.numpy.") from None


def _kinds(collectives: Any) -> dict[str, int]:
    """Executions by kind, without those that do not occur."""
    if not isinstance(collectives, Mapping):
        raise DataError(
            f'collectives= takes executions by kind, as {{"all-reduce": 1}}, not {collectives!r}'
        )
    for kind, n in collectives.items():
        if kind not in KINDS:
            raise DataError(f"HLO has no collective {kind!r}. {nearest(str(kind), KINDS)}")
        if integer(n) is None:
            raise DataError(f"collectives= has {n!r} for {kind}, which is no integer")
    return {kind: int(n) for kind, n in collectives.items() if n}


def _counts(collectives: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in sorted(collectives.items())) or "none"
