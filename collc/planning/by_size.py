"""Choices by size: from how many bytes on, which schedule."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from collc.analysis.certificate import certify
from collc.language.algebra import Schedule
from collc.language.parse import parse


@dataclass(frozen=True)
class BySize:
    """Schedules by size: ``entries`` are (bytes of a rank's full buffer from which on, schedule).

    Raises ValueError where the bytes do not ascend from 0.
    """

    entries: tuple[tuple[int, Schedule], ...]

    def __post_init__(self) -> None:
        bounds = [least for least, _ in self.entries]
        if bounds[:1] != [0] or any(a >= b for a, b in pairwise(bounds)):
            raise ValueError("sizes that do not ascend from 0")

    @staticmethod
    def read(lines: Iterable[str]) -> "BySize":
        """The way back from ``lines``. Raises ValueError where they are none, ScheduleError.

        >>> str(BySize.read(["0 = tree.all_reduce", "4096 = ring.all_reduce"]).at(5000))
        'ring.all_reduce'
        """
        pairs = (line.split(" = ", 1) for line in lines)
        return BySize(tuple((int(least), parse(text)) for least, text in pairs))

    @property
    def lines(self) -> list[str]:
        """As text: how many bytes from which on, and the schedule."""
        return [f"{least} = {schedule}" for least, schedule in self.entries]

    def at(self, size: int | None) -> Schedule:
        """The schedule for this many bytes on a rank; the one for the largest where unknown."""
        if size is None:
            return self.entries[-1][1]
        return [schedule for least, schedule in self.entries if least <= size][-1]

    def digests(self, sizes: Mapping[str, int]) -> list[str]:
        """Of what each schedule sends on a mesh; each of them is proved on the way."""
        return [certify(schedule, sizes).digest for _, schedule in self.entries]
