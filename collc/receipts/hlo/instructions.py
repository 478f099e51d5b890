"""What the text of a module is read into: instructions, in computations."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

from collc.errors import HloError
from collc.receipts.hlo.types import Array, Type, arrays, parse_type

REPORT = "If this is what XLA printed, collc has to learn it: please report the line."

_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


def error(number: int, line: str, why: str) -> HloError:
    """The error of a line of the text."""
    line = line.strip()
    line = line if len(line) < 400 else line[:400] + " ..."
    return HloError(f"HLO line {number}: {why}\n  {line}")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      number: of the line in the text, from 1.
      line: the line as it stands there.
      name: without the ``%``.
      written: its type, as written.
      opcode: "fusion", "all-reduce-start", ...
      operands: names of instructions of the same computation; ``name#1`` is part 1 of a tuple.
      called: (key, computation) for each computation that it names.
      rest: its attributes, as written but for strings, which are empty here.
    """

    number: int
    line: str = field(repr=False)
    name: str
    written: str
    opcode: str
    operands: tuple[str, ...]
    called: tuple[tuple[str, str], ...]
    rest: str = field(repr=False)

    @property
    def base(self) -> str:
        """The opcode without the ``-start``, ``-update`` or ``-done`` of an asynchronous form."""
        stem, _, end = self.opcode.rpartition("-")
        return stem if end in ("start", "update", "done") else self.opcode

    @property
    def is_root(self) -> bool:
        return self.line.lstrip().startswith("ROOT ")

    @property
    def starts(self) -> bool:
        return self.opcode.endswith("-start")

    @property
    def ends(self) -> bool:
        """Whether it only goes on with what a start has begun."""
        return self.opcode.endswith(("-done", "-update"))

    @cached_property
    def type(self) -> Type:
        try:
            return parse_type(self.written)
        except ValueError as e:
            raise self.error(f"the type {self.written!r} {e}. {REPORT}") from None

    @cached_property
    def results(self) -> tuple[Array, ...]:
        """The arrays that it gives; those that its done will give, if it is a start."""
        whole = self.type
        if not self.starts:
            return arrays(whole)
        # A start's type is (operands, results, contexts ...); that of older all-reduces is results,
        # and a copy's is (result, operand, context).
        if self.opcode == "all-reduce-start" and not (
            isinstance(whole, tuple) and any(isinstance(t, tuple) for t in whole)
        ):
            return arrays(whole)
        if not isinstance(whole, tuple) or len(whole) < 2:
            raise self.error("a start has to have the type (operands, results, ...).")
        return arrays(whole[0 if self.opcode == "copy-start" else 1])

    @property
    def bytes(self) -> int:
        """Of its results."""
        return sum(a.bytes for a in self.results)

    @cached_property
    def op_name(self) -> str:
        """The ``op_name`` of its metadata (JAX's name stack), "" if it has none."""
        found = _OP_NAME.search(self.line)
        return found[1] if found else ""

    @cached_property
    def config(self) -> dict[str, Any]:
        """Its backend_config, {} if it has none or one that is not JSON."""
        _, _, value = self.line.rpartition(", backend_config=")
        if not value.startswith('{"'):
            return {}
        try:
            return json.JSONDecoder().raw_decode(value)[0]
        except ValueError as e:
            raise self.error(f"its backend_config cannot be read: {e}. {REPORT}") from None

    @property
    def trips(self) -> int | None:
        """How often a while loop runs its body, None if XLA does not know."""
        known = self.config.get("known_trip_count")
        if known is None:
            return None
        written = known.get("n") if isinstance(known, dict) else None
        if not isinstance(written, str) or not re.fullmatch(r"\d{1,18}", written, re.ASCII):
            raise self.error(f"its known_trip_count cannot be read. {REPORT}")
        return int(written)

    def attribute(self, key: str) -> str:
        """The value of an attribute and what follows it."""
        _, found, value = self.rest.partition(f", {key}=")
        if not found:
            raise self.error(f"{self.opcode} has to have {key}, and here it has none. {REPORT}")
        return value

    def error(self, why: str) -> HloError:
        return error(self.number, self.line, why)


@dataclass(frozen=True)
class Computation:
    """Its instructions by name, in the order of the text: the schedule, in a scheduled module."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict, repr=False)

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def after(self, instruction: Instruction) -> Iterator[Instruction]:
        """Those that stand after one of them."""
        return islice(self._listed, self._place[instruction.name] + 1, None)

    @cached_property
    def _listed(self) -> list[Instruction]:
        return list(self)

    @cached_property
    def _place(self) -> dict[str, int]:
        return {name: k for k, name in enumerate(self.instructions)}

    @cached_property
    def root(self) -> Instruction | None:
        roots = [i for i in self if i.is_root]
        return roots[0] if roots else next(reversed(self.instructions.values()), None)

    def operand(self, instruction: Instruction, k: int) -> Type:
        """The type of operand k."""
        if k >= len(instruction.operands):
            raise instruction.error(f"it has to have {k + 1} operands or more. {REPORT}")
        name, *indices = instruction.operands[k].split("#")
        found = self.instructions[name].type
        for index in indices:
            if not isinstance(found, tuple) or int(index) >= len(found):
                raise instruction.error(f"{name} has no part {index}. {REPORT}")
            found = found[int(index)]
        return found


@dataclass(frozen=True)
class Text:
    """A module as its text has it.

    Attributes:
      name: of the module.
      scheduled: whether the order of the instructions is the one in which they are launched.
      replicas: replica_count.
      partitions: num_partitions.
      computations: by name.
      entry: the name of the computation where the program begins.
    """

    name: str
    scheduled: bool
    replicas: int
    partitions: int
    computations: dict[str, Computation] = field(repr=False)
    entry: str

    @property
    def devices(self) -> int:
        return self.replicas * self.partitions
