"""What a simulation finds: when each rank is done, and who never is."""

from dataclasses import dataclass

import numpy as np

from collc.machine.placement import Placement
from collc.machine.simulation.faults import Damage, Fault
from collc.machine.simulation.jobs import Model
from collc.machine.simulation.record import Record
from collc.machine.simulation.stalls import Stall, Stalls
from collc.machine.topology import Floats
from collc.machine.units import seconds, size


@dataclass(frozen=True, eq=False)
class Outcome:
    """When ranks are done. Seconds; inf is never.

    Attributes:
      title: the schedule.
      seconds: when the last rank is done.
      finish: when each is, [ranks].
      stalls: those that never are.
      without_effect: faults of what nobody uses.
      record: what was sent when, where that was asked for.
    """

    title: str
    placement: Placement
    size: float
    model: Model
    faults: tuple[Fault, ...]
    seconds: float
    finish: Floats
    stalls: Stalls
    without_effect: tuple[Fault, ...]
    damage: Damage
    record: Record | None

    @property
    def progress(self) -> float:
        """The part of their steps that ranks have done, on average."""
        return 1 - float((1 - self.stalls.share).sum()) / len(self.finish)

    def summary(self) -> str:
        """A few lines: how long it takes, or who stalls and how far the rest gets."""
        n = len(self.finish)
        lines = [
            f"{self.title}, {size(self.size)} on {self.placement.machine}, {self.model}"
            + "".join(f", {fault}" for fault in self.faults)
        ]
        ended = self.finish[np.isfinite(self.finish)]
        if not len(self.stalls):
            early = f", the first rank after {seconds(float(ended.min()))}" if n > 1 else ""
            lines.append(f"done after {seconds(self.seconds)}{early}")
        else:
            lines.append(
                f"{len(self.stalls):,} of {n:,} ranks never finish; "
                f"{self.progress:.0%} of all steps are done"
                + (f"; the others finish after {seconds(float(ended.max()))}" if len(ended) else "")
            )
            lines += [f"  {stall}" for stall in self._telling()]
        lines += [f"no effect, since nobody uses it: {fault}" for fault in self.without_effect]
        return "\n".join(lines)

    def _telling(self) -> list[Stall]:
        """The broken ranks, those that got least far, and the one that got farthest."""
        share = self.stalls.share
        order = np.lexsort((self.stalls.rank, share)).tolist()
        return [self.stalls[i] for i in [*order[:3], *order[3:][-1:]]]

    def __str__(self) -> str:
        return self.summary()
