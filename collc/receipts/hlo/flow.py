"""Which computations an instruction runs, and how often."""

from dataclasses import dataclass

from collc.receipts.hlo.instructions import REPORT, Instruction

# Attributes by which an instruction runs computations, each once (a loop's: per iteration). An
# instruction without them is refused: a call that is not seen would be a collective not counted.
_RUNS = {
    "while": ("condition", "body"),
    "fusion": ("calls",),
    "call": ("to_apply",),
    "async": ("calls",),
}
_BRANCHES = ("branch_computations", "true_computation", "false_computation")


@dataclass(frozen=True)
class Run:
    """A computation that runs so many times when the instruction does; None: nobody knows."""

    computation: str
    times: int | None = 1


def runs(instruction: Instruction) -> tuple[Run, ...]:
    """What an instruction runs; a conditional only one of them, and it depends on the data which.

    An asynchronous one runs at its start. What is applied to elements, as by a reduce, is no run.

    Raises:
      HloError: it has to name computations, and does not.
    """
    if instruction.ends:
        return ()
    opcode, called = instruction.base, instruction.called
    if opcode == "conditional":
        found = tuple(Run(name) for key, name in called if key in _BRANCHES)
        if not found:
            raise instruction.error(f"a conditional has to name its branches. {REPORT}")
        return found
    found = ()
    for key in _RUNS.get(opcode, ()):
        names = [name for k, name in called if k == key]
        if len(names) != 1:
            raise instruction.error(f"{opcode} has to have one {key}=%computation. {REPORT}")
        times = 1 if opcode != "while" else instruction.trips
        if key == "condition" and times is not None:
            times += 1  # it is asked once more, to leave
        found += (Run(names[0], times),)
    return found


def applied(instruction: Instruction) -> tuple[str, ...]:
    """The computations that it names and does not run: nobody knows how often they are applied."""
    if instruction.ends:
        return ()
    run = {r.computation for r in runs(instruction)}
    return tuple(name for _, name in instruction.called if name not in run)
