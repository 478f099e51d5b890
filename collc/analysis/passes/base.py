"""What all passes share."""

from abc import abstractmethod

from collc.analysis import cache
from collc.analysis.proof import prove
from collc.errors import ScheduleError
from collc.language.algebra import Pass
from collc.language.foreign import shown
from collc.language.ir import Ints, Program, Step, integer


class Proved(Pass):
    """A pass that proves what it is given, and what it makes of it."""

    def __call__(self, program: Program) -> Program:
        """The program rewritten. Raises ScheduleError where that cannot be, and ProofError."""
        if not isinstance(program, Program):
            raise ScheduleError(
                f"{self} takes a program, as of leaf.program(8), not {shown(program)}. A schedule goes "
                f"through it: schedule.through({self})."
            )
        before = cache.proof(program, prove)
        made = self.rewrite(program)
        after = cache.proof(made, prove)
        if (before.consistent, before.narrow) > (after.consistent, after.narrow):
            raise self.refuse(program, "its replicas would add in different orders afterwards.")
        return made

    @abstractmethod
    def rewrite(self, program: Program) -> Program:
        """The program in other steps. Raises ScheduleError where that cannot be."""

    def refuse(self, program: Program, why: str) -> ScheduleError:
        return ScheduleError(f"{self} cannot apply to {program.name} (n = {program.n}): {why}")


def positive(by: Pass, value: object, name: str, most: int) -> None:
    """Raises ScheduleError where a pass's parameter is no positive integer, or too large."""
    if not 1 <= (integer(value) or 0) <= most:
        raise ScheduleError(
            f"{type(by).__name__}: {name} is a positive integer, at most {most:,}, not {shown(value)}"
        )


def cells_of(program: Program, step: Step) -> tuple[Ints, Ints]:
    """The (rank, cell) that each send of a dense step reads, and the one that it writes."""
    return step.src * program.cells + step.chunk, step.dst * program.cells + step.chunk
