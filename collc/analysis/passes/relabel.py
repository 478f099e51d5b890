"""Orders of the ranks that follow the machine."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from collc.analysis.passes.base import Proved
from collc.errors import ScheduleError
from collc.language import algebra
from collc.language.expand import permutation, relabelled
from collc.language.foreign import shown
from collc.language.ir import Program


@dataclass(frozen=True, repr=False)
class Relabel(algebra.Relabel, Proved):
    """Other ranks in the same places: a ring's order that follows the machine.

    >>> from collc.schedules import ring
    >>> program = ring.all_gather.program(3)
    >>> print(program)
       0  copy c[g]  g -> g+1
       1  copy c[g-1]  g -> g+1
    >>> print(Relabel(order=(0, 2, 1))(program))
       0  copy c[g]  g -> g-1
       1  copy c[g+1]  g -> g-1
    """

    def __repr__(self) -> str:
        return super().__str__().replace("relabel", "Relabel", 1)

    __str__ = __repr__

    @classmethod
    def grouped(cls, labels: Sequence[Hashable]) -> "Relabel":
        """The order that visits group after group, given each rank's: a ring leaves each group once.

        >>> Relabel.grouped(("host1", "host0", "host1", "host0"))
        Relabel(order=(0, 2, 1, 3))
        """
        try:
            first = {label: i for i, label in reversed(list(enumerate(labels)))}
        except TypeError:
            raise ScheduleError(
                f"Relabel.grouped takes a label for each rank, as its host's name, not {shown(labels)}"
            ) from None
        return cls(order=tuple(sorted(range(len(labels)), key=lambda r: (first[labels[r]], r))))

    def rewrite(self, program: Program) -> Program:
        return relabelled(program, permutation([self], program.n))
