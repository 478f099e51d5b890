"""From the name of an algorithm to its schedules, one for each collective that it knows."""

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from collc.analysis.certificate import certify
from collc.errors import PlanError, nearest
from collc.language.algebra import Beside, Schedule, Then, beside, then
from collc.language.leaves import Family
from collc.language.library import contents, find, modules
from collc.language.states import KINDS


@dataclass(frozen=True)
class Algorithm:
    """Unplaced schedules of one algorithm, by collective. ``source``: the text that names it."""

    source: str
    schedules: tuple[tuple[str, Schedule], ...]

    def get(self, collective: str) -> Schedule | None:
        """Its own schedule of a collective; None where it has none."""
        return dict(self.schedules).get(collective)

    @property
    def all_reduce(self) -> Schedule | None:
        """Its all-reduce, put together from two halves where it has no other; or None."""
        for names in (("all_reduce",), ("reduce_scatter", "all_gather"), ("reduce", "broadcast")):
            parts = [own for name in names if (own := self.get(name)) is not None]
            if len(parts) == len(names):
                return functools.reduce(lambda first, then: first >> then, parts)
        return None

    def digest(self, axis: str, sizes: Mapping[str, int]) -> str:
        """Of all that its schedules do on an axis of a mesh; each of them is proved on the way."""
        each = [(c, certify(s @ axis, sizes).digest) for c, s in self.schedules]
        return hashlib.sha256(str(each).encode()).hexdigest()[:16]


def algorithm(source: str | Schedule) -> Algorithm:
    """``"ring"`` is a module's schedules; anything else names one schedule, which has to be unplaced.

    Raises PlanError, with the nearest known names.
    """
    if isinstance(source, str) and source.isidentifier():
        if source in modules():
            return Algorithm(source, tuple(_collectives(source).items()))
        if source == "auto":
            raise PlanError('"auto" is for collc.plan, which sweeps: collc.plan(mesh, "auto").')
        raise PlanError(f"there is no schedule {source!r}. {nearest(source, modules())}")
    schedule = find(source) if isinstance(source, str) else source
    if not isinstance(schedule, Schedule):
        raise PlanError(f"an axis takes the name of a schedule or a schedule, not {source!r}")
    if schedule.axes:
        raise PlanError(
            f"{schedule} names its axes already, and a plan places the schedule of one axis. Where it "
            f"is used, it can be given as it is: collc.pmean(x, {str(source)!r})."
        )
    kind = schedule.collective
    if kind is None:
        raise PlanError(f"{schedule} is {schedule.type}, which is no one collective.")
    forms = {kind.name: schedule}
    if kind is KINDS["all_reduce"] and (halves := _halves(schedule.normal)) is not None:
        forms |= {"reduce_scatter": halves[0], "all_gather": halves[1]}
    return Algorithm(str(source), tuple(forms.items()))


def _halves(s: Schedule) -> tuple[Schedule, Schedule] | None:
    """An all-reduce's scatter and its gather, where it is one after the other; of ``|``, each part's."""
    match s:
        case Then(parts=parts):
            for i in range(1, len(parts)):
                halves = then(*parts[:i]), then(*parts[i:])
                if halves[0].collective is KINDS["reduce_scatter"]:
                    return halves if halves[1].collective is KINDS["all_gather"] else None
        case Beside(parts=parts):
            each = [_halves(part) for part in parts]
            if all(each):
                down, up = zip(*(half for half in each if half), strict=True)
                return beside(*down), beside(*up)
    return None


def _collectives(module: str) -> Mapping[str, Schedule]:
    """A module's schedules by collective: those that bear its name, else the first of each kind."""
    here = contents(modules()[module])
    own = {k: v for k, v in here.items() if isinstance(v, Schedule) and not v.axes}
    found: dict[str, Schedule] = {}
    for schedule in own.values():
        if (kind := schedule.collective) is not None:
            found.setdefault(kind.name, schedule)
    found |= {name: schedule for name, schedule in own.items() if name in KINDS}
    if not found:
        families = [v.name for v in here.values() if isinstance(v, Family)]
        raise PlanError(
            f"{module} has no schedule for one axis"
            + (f"; what it has takes parameters: {', '.join(families)}. " if families else ". ")
            + "Pass a schedule that does not name its axes."
        )
    return found
