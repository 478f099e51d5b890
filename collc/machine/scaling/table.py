"""A scaling study as text: at most 110 columns, the same each time."""

from collections.abc import Callable, Iterator
from textwrap import wrap

from collc.machine.scaling.study import Outcome, Point, Study
from collc.machine.units import seconds, size

WIDTH = 110
Said = Callable[[float], str]


def explain(study: Study) -> str:
    """Tables: the best for each number of devices, all steps, both models, who wins where."""
    return "\n".join(_lines(study))


def percent(x: float) -> str:
    """A share.

    >>> percent(0.1234), percent(1.0)
    ('12.3 %', '100 %')
    """
    return f"{100 * x:.3g} %"


def _lines(study: Study) -> Iterator[str]:
    for text in _head(study):
        yield from wrap(text, WIDTH, subsequent_indent="    ", break_long_words=False)
    yield ""
    yield from _set(_best(study), left=(1, 6))
    for title, cell in (("step time", _step), ("communication, lowered | abstract", _both)):
        yield ""
        yield title
        for columns in _packed(_matrix(study, cell)):
            yield from _set(columns, left=(0,))
    yield ""
    yield "who wins"
    yield from _winners(study)
    if study.left_out:
        yield ""
        yield "left out"
        for text in _left_out(study):
            yield from wrap(text, WIDTH, subsequent_indent="    ")


def _head(study: Study) -> Iterator[str]:
    kind = "strong" if study.strong else "weak"
    yield f"{kind} scaling of a data-parallel step on {study.machine}"
    whose = "in all, shared by the devices" if study.strong else "on each device"
    yield f"  {seconds(study.compute)} of compute {whose}; {size(study.parameters)} all-reduced"
    if study.overlap:
        share = percent(study.overlap)
        yield f"  up to {share} of the compute can hide communication; the rest is exposed"
    else:
        yield "  nothing hides communication"
    yield "  steps are by the lowered model, of what XLA would launch; nothing was timed on a GPU"
    errors = [(n, study.at(n)[0]) for n in study.devices]
    said: dict[str, int] = {}
    for n, point in errors:
        if not point.extrapolated:
            said.setdefault(percent(point.error), n)
    if said:
        each = ", ".join(f"{error} from {n:,} devices" for error, n in said.items())
        yield f"  schedules nearer to each other than its error are tied: {each}"
    beyond = [(n, p) for n, p in errors if p.extrapolated]
    if beyond:
        n, last = beyond[-1]
        most = f"{percent(last.error)} on {n:,}"
        yield (
            f"  ~ is extrapolated: more than twice the {study.calibrated:,} devices up to which prices "
            f"were compared with logs. A range, wider with each doubling: {most}"
        )
        yield "  abstract prices are arithmetic on the machine's links, which no log was compared with"
    for name, schedule in study.schedules.items():
        yield f"  {name} = {schedule}"


def _best(study: Study) -> list[list[str]]:
    rows = [["devices", "best", "step", "speed-up", "efficiency", "communication", "tied with it"]]
    for n in study.devices:
        best, *_ = study.at(n)
        others = [name for name in study.ties(n) if name != best.schedule]
        tied = ", ".join(others[:2]) + (f", {len(others) - 2} more" if len(others) > 2 else "")
        cells = [
            _span(best, lambda o: o.seconds, seconds),
            _span(best, lambda o: o.speedup, lambda x: f"{x:,.4g}" if x < 1000 else f"{x:,.0f}"),
            _span(best, lambda o: o.efficiency, percent),
            _span(best, lambda o: o.share, percent),
        ]
        rows.append([f"{n:,}", best.schedule, *cells, tied])
    return rows


def _matrix(study: Study, cell: Callable[[Point], str]) -> list[list[str]]:
    """A row for each schedule, a column for each number of devices."""
    rows = [["", *(f"{n:,}" for n in study.devices)]]
    for name in study.schedules:
        points = [study.point(n, name) for n in study.devices]
        rows.append([name, *(cell(p) if p else "left out" for p in points)])
    return rows


def _step(point: Point) -> str:
    return _span(point, lambda o: o.seconds, seconds)


def _both(point: Point) -> str:
    found = _span(point, lambda o: o.communication, seconds)
    return f"{found} | {'-' if point.abstract is None else seconds(point.abstract)}"


def _span(point: Point, of: Callable[[Outcome], float], said: Said) -> str:
    """A number; of what is extrapolated a range, behind a ~."""
    if not point.extrapolated:
        return said(of(point.middle))
    low, high = sorted((of(point.low), of(point.high)))
    a, b = said(low), said(high)
    if a == b:
        return f"~{a}"
    # The unit once, where it is the same.
    (x, *unit), (_, *other) = a.split(" "), b.split(" ")
    return f"~{x}-{b}" if unit == other else f"~{a}-{b}"


def _winners(study: Study) -> Iterator[str]:
    for name in study.schedules:
        found = [
            f"{'ties' if reign.tied else 'wins'} "
            + (
                f"on {reign.first:,}"
                if reign.first == reign.last
                else f"from {reign.first:,} to {reign.last:,}"
            )
            for reign in study.reigns(name)
        ]
        yield f"  {name}: {', '.join(found) or 'nowhere'}"


def _left_out(study: Study) -> Iterator[str]:
    for name in study.schedules:
        found = [x for x in study.left_out if x.schedule == name]
        if found:
            yield f"  {name} on {', '.join(f'{x.devices:,}' for x in found)}: {found[0].why}"


def _packed(rows: list[list[str]]) -> Iterator[list[list[str]]]:
    """The columns in as few tables as fit the width, each with the first column."""
    width = [max(len(row[i]) for row in rows) + 2 for i in range(len(rows[0]))]
    start = 1
    while start < len(width):
        end = start + 1
        while end < len(width) and width[0] + sum(width[start : end + 1]) <= WIDTH:
            end += 1
        yield [[row[0], *row[start:end]] for row in rows]
        start = end


def _set(rows: list[list[str]], left: tuple[int, ...]) -> Iterator[str]:
    """Rows in columns, set to the right but for some."""
    width = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(width[i]) if i in left else cell.rjust(width[i])
            for i, cell in enumerate(row)
        ]
        yield f"  {'  '.join(cells)}".rstrip()
