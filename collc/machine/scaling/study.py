"""What a scaling study holds: schedules on numbers of devices, who wins and ties where."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from collc.language.algebra import Schedule


@dataclass(frozen=True)
class Outcome:
    """A step on some devices. Seconds; ``efficiency`` and ``share`` (of communication) are of 1."""

    communication: float
    exposed: float
    seconds: float
    speedup: float
    efficiency: float
    share: float


@dataclass(frozen=True)
class Point:
    """A schedule on a number of devices.

    Attributes:
      compute: seconds of a device.
      abstract: seconds of communication by the abstract model; None where XLA's own takes part.
      error: how far the lowered communication may be off, relative: see ``scale.spread``.
      extrapolated: whether there are more than twice the calibrated devices: only a range is known.
      low, high: the ends of the range; both are ``middle`` where nothing is extrapolated.
      middle: as priced. Schedules are ranked by it.
    """

    devices: int
    schedule: str
    compute: float
    abstract: float | None
    error: float
    extrapolated: bool
    low: Outcome
    high: Outcome
    middle: Outcome


@dataclass(frozen=True)
class LeftOut:
    """A schedule that was not priced on a number of devices, and why."""

    devices: int
    schedule: str
    why: str


@dataclass(frozen=True)
class Reign:
    """Neighbouring numbers of devices, first to last, where a schedule is the best or tied with it."""

    first: int
    last: int
    tied: bool


@dataclass(frozen=True)
class Study:
    """What ``scale`` found. ``compute``: seconds, of a device if weak, of all work if ``strong``."""

    machine: str
    compute: float
    parameters: float
    overlap: float
    strong: bool
    calibrated: int
    schedules: Mapping[str, Schedule]
    points: tuple[Point, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(point.devices for point in self.points))

    def at(self, devices: int) -> tuple[Point, ...]:
        """The schedules on so many devices, the best first; equal steps by their communication."""
        found = [point for point in self.points if point.devices == devices]
        return tuple(sorted(found, key=lambda p: (p.middle.seconds, p.middle.communication)))

    def point(self, devices: int, schedule: str) -> Point | None:
        """One of them; None where it was left out."""
        return next((p for p in self.at(devices) if p.schedule == schedule), None)

    def ties(self, devices: int) -> tuple[str, ...]:
        """The best and all that the model cannot tell from it.

        They take no longer than the best would if its communication took 1 + error times as long.
        """
        best, *_ = own = self.at(devices)
        slower = best.middle.communication * (1 + best.error)
        most = best.compute + exposed(slower, best.compute, self.overlap)
        return tuple(point.schedule for point in own if point.middle.seconds <= most)

    def reigns(self, schedule: str) -> tuple[Reign, ...]:
        """Where a schedule starts and stops winning. Alone and tied are told apart."""
        found: list[Reign] = []
        before = None
        for n in self.devices:
            ties = self.ties(n)
            if schedule in ties:
                tied = len(ties) > 1
                if found and found[-1].last == before and found[-1].tied == tied:
                    found[-1] = replace(found[-1], last=n)
                else:
                    found.append(Reign(n, n, tied))
            before = n
        return tuple(found)


def exposed(communication: float, compute: float, overlap: float) -> float:
    """Seconds of communication that the share ``overlap`` of compute does not hide."""
    return max(0.0, communication - overlap * compute)
