"""Counters of errors: by place and name, what those above 0 mean, and which have grown."""

from collections.abc import Mapping

from collc.runtime.doctor.finding import Finding, Level, listed

Counts = dict[str, dict[str, int]]  # by place, as "mlx5_0 port 1", then by the counter's name


def counted(
    check: str,
    errors: Counts,
    remedies: Mapping[str, str],
    since: str,
    level: Level = Level.WARNING,
) -> list[Finding]:
    """A finding for each place and remedy that has counters above 0."""
    found = []
    for place, own in errors.items():
        causes: dict[str, list[str]] = {}
        for name, n in own.items():
            if n > 0:
                causes.setdefault(remedies[name], []).append(f"{name} {n}")
        found += [
            Finding(check, level, f"{place}: {listed(names)} {since}", remedy)
            for remedy, names in causes.items()
        ]
    return found


def more(before: Counts, after: Counts) -> Counts:
    """By how much each counter has grown; one that was not there before has not."""
    return {
        place: {name: n - before.get(place, {}).get(name, n) for name, n in own.items()}
        for place, own in after.items()
    }
