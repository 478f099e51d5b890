"""Passes: a program in, a program out, proved before and after.

Each is a frozen dataclass, and prints as it is written. ``schedule.through(Pipeline(4))`` has the
leaves of a schedule pass through it, ``Pipeline(4)(leaf.program(n))`` one program. A pass that
cannot apply raises ScheduleError and says why.
"""

from collc.analysis.passes.pipeline import Pipeline
from collc.analysis.passes.relabel import Relabel
from collc.analysis.passes.steps import Coalesce, Roll, Rounds

__all__ = ["Coalesce", "Pipeline", "Relabel", "Roll", "Rounds"]
