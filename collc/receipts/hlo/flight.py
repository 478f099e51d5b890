"""What runs while a collective is under way, and how many are at once.

The instructions of a scheduled module stand in the order in which they are launched, so what
stands between a start and its done may run beside it.

XLA pipelines some collectives over a loop: one iteration starts what the next one waits for, and
the carry takes it along. What is beside such a start is taken to end where the carry takes it over,
at the loop or at the end of the body: the rest is less than what truly runs beside it, never more.
"""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from collc.receipts.hlo.flow import runs
from collc.receipts.hlo.instructions import Computation, Instruction, Text

# Nothing is launched for these.
_NO_LAUNCH = frozenset(
    {"tuple", "get-tuple-element", "bitcast", "parameter", "constant", "after-all", "opt-barrier"}
    | {"partition-id", "replica-id", "add-dependency", "domain", "get-dimension-size"}
)
_HANDED_ON = ("tuple", "get-tuple-element", "bitcast", "opt-barrier")


def asynchronous(instruction: Instruction) -> bool:
    """Whether what a start begins goes on beside what follows; XLA:GPU says where it does not."""
    config = instruction.config.get("collective_backend_config", {})
    return instruction.opcode != instruction.base and config.get("is_sync") is not True


def launched(instruction: Instruction) -> bool:
    """Whether it is a launch of its own: a kernel, a copy, a loop, or the start of one."""
    return not instruction.ends and instruction.base not in _NO_LAUNCH


def beside(computation: Computation, start: Instruction) -> Iterator[Instruction]:
    """What is launched, collectives too, after a start and before its done."""
    names = {start.name}  # of the start's value, wherever it is handed on
    for instruction in computation.after(start):
        uses = any(name.partition("#")[0] in names for name in instruction.operands)
        if uses and (instruction.base in _HANDED_ON or instruction.opcode.endswith("-update")):
            names.add(instruction.name)
        elif uses:
            return  # its done, or a loop that takes it along
        elif launched(instruction):
            yield instruction


class _Level(NamedTuple):
    """Collectives under way, against how many there were before: at most, and at the end."""

    peak: int
    end: int


class Flight:
    """Counts the collectives under way.

    A start adds one and its done takes one away, in whatever computation they are: so a body that
    waits for what the iteration before it started has no more of them at its end than at its
    beginning. One that is not asynchronous is under way while it runs.
    """

    def __init__(self, text: Text, kinds: Collection[str]):
        self.text = text
        self.kinds = kinds
        self._known: dict[str, _Level] = {}

    @property
    def most(self) -> int:
        return self._computation(self.text.entry).peak

    def _computation(self, name: str) -> _Level:
        if name not in self._known:
            computation = self.text.computations[name]
            level, peak = 0, 0
            begun: dict[str, int] = {}  # how many each start has under way
            for instruction in computation:
                if instruction.ends:
                    here = self._ended(instruction, begun)
                else:
                    here = self._instruction(instruction)
                    if instruction.starts:
                        begun[instruction.name] = here.end
                peak = max(peak, level + here.peak)
                level += here.end
            self._known[name] = _Level(peak, level)
        return self._known[name]

    def _instruction(self, instruction: Instruction) -> _Level:
        if instruction.base in self.kinds:
            return _Level(1, 1 if asynchronous(instruction) else 0)
        levels = [self._computation(run.computation) for run in runs(instruction)]
        if not levels:
            return _Level(0, 0)
        peak = max(level.peak for level in levels)
        # An asynchronous wrapper has all that it runs under way until its done. Otherwise a loop
        # leaves what its body leaves, and a conditional what any branch leaves: they are alike.
        return _Level(peak, peak if asynchronous(instruction) else levels[-1].end)

    def _ended(self, instruction: Instruction, begun: dict[str, int]) -> _Level:
        start = instruction.operands[0] if instruction.operands else ""
        if start in begun:
            here = begun[start]
        else:  # begun before a loop, or in its last iteration
            here = int(instruction.base in self.kinds and asynchronous(instruction))
        if instruction.opcode.endswith("-update"):
            begun[instruction.name] = here
            return _Level(0, 0)
        return _Level(0, -here)
