"""What a module computes: FLOPs of its matrix products and convolutions, and its largest values.

What is element-wise counts nothing, and so does a custom call that is no product. Of a conditional
the branch with the fewest is counted, and the body of a loop of unknown trip count once: such a
number is not exact, and says so.
"""

from dataclasses import dataclass
from functools import cached_property

from collc.receipts.hlo.flow import runs
from collc.receipts.hlo.instructions import Computation, Instruction, Text
from collc.receipts.hlo.products import product

# Values that are no memory of their own: parts or other names of others, or of their operands.
_ALIASES = frozenset(
    {"tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "opt-barrier"}
    | {"dynamic-update-slice", "add-dependency", "after-all", "domain"}
)


@dataclass(frozen=True)
class Work:
    """An instruction that is no collective: the launch of a kernel, or a whole loop.

    Attributes:
      name: the instruction's.
      opcode: "fusion", "while", "copy", ... (of an asynchronous one without its "-start").
      op_name: the ``op_name`` of its metadata (JAX's name stack), "" if it has none.
      flops: of its matrix products and convolutions, with the trip counts of loops multiplied in.
      bytes: of its results.
    """

    name: str
    opcode: str
    op_name: str
    flops: int
    bytes: int


@dataclass(frozen=True)
class Buffer:
    """An array that the program makes or is given, and the instruction that makes it."""

    name: str
    opcode: str
    op_name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Flops:
    """A number of FLOPs; not exact if more may run, as in a loop of unknown trip count."""

    number: int
    exact: bool = True

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.number + other.number, self.exact and other.exact)


class Workload:
    """The FLOPs of a module's computations, each counted once."""

    def __init__(self, text: Text):
        self.text = text
        self._known: dict[str, Flops] = {}

    @cached_property
    def total(self) -> Flops:
        return self.computation(self.text.entry)

    def computation(self, name: str) -> Flops:
        if name not in self._known:
            total = Flops(0)
            computation = self.text.computations[name]
            for instruction in computation:
                total += self.instruction(computation, instruction)
            self._known[name] = total
        return self._known[name]

    def instruction(self, computation: Computation, instruction: Instruction) -> Flops:
        """Of one instruction and all that it runs."""
        if instruction.ends:
            return Flops(0)
        called = [(run.times, self.computation(run.computation)) for run in runs(instruction)]
        if instruction.base == "conditional":
            branches = [flops for _, flops in called]
            least = min(branches, key=lambda flops: flops.number)
            return Flops(least.number, least.exact and branches.count(least) == len(branches))
        total = Flops(product(computation, instruction))
        for times, flops in called:
            if times is None:  # how often is not known: counted once
                total += Flops(flops.number, flops.exact and not flops.number)
            else:
                total += Flops(flops.number * times, flops.exact)
        return total

    def work(self, computation: Computation, instruction: Instruction) -> Work:
        return Work(
            name=instruction.name,
            opcode=instruction.base,
            op_name=instruction.op_name,
            flops=self.instruction(computation, instruction).number,
            bytes=instruction.bytes,
        )

    def buffers(self, k: int) -> tuple[Buffer, ...]:
        """The k largest arrays, largest first. They need not all live at once."""
        made = (
            Buffer(i.name, i.base, i.op_name, a.dtype, a.shape, a.bytes)
            for name in self._launching(self.text.entry, {})
            for i in self.text.computations[name]
            if self._makes(name, i)
            for a in i.results
        )
        return tuple(sorted(made, key=lambda b: -b.bytes)[:k])

    def _launching(self, name: str, seen: dict[str, None]) -> dict[str, None]:
        """The computations whose instructions are launched one by one, unlike those of a fusion."""
        if name not in seen:
            seen[name] = None
            for instruction in self.text.computations[name]:
                if instruction.base not in ("fusion", "async"):
                    for run in runs(instruction):
                        self._launching(run.computation, seen)
        return seen

    def _makes(self, computation: str, instruction: Instruction) -> bool:
        """Whether its results are new memory; a fusion may update its operand in place."""
        if instruction.opcode == "parameter":
            return computation == self.text.entry
        if instruction.ends or instruction.base in _ALIASES:
            return False
        if instruction.base != "fusion":
            return True
        (fused,) = (self.text.computations[run.computation] for run in runs(instruction))
        root = fused.root
        while root is not None and root.opcode in ("bitcast", "convert", "copy") and root.operands:
            root = fused.instructions.get(root.operands[0])
        return root is None or root.opcode != "dynamic-update-slice"
