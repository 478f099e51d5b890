"""What was simulated as a Gantt chart: phases in colours, waiting light, the critical path outlined."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from collc.errors import MachineError
from collc.machine.simulation.critical import Leg, critical
from collc.machine.simulation.outcome import Outcome
from collc.machine.simulation.timeline import (
    Bar,
    Lanes,
    Noted,
    bars,
    horizon,
    lane_name,
    recorded,
)
from collc.machine.units import seconds, size

ENDINGS = (".svg", ".png")
MOST_LANES = 48
_RASTER = 4000  # bars: beyond, a drawing of each would make the SVG too large to open
_HEIGHT = 0.8


def drawable(path: Path) -> None:
    """Whether a picture can be drawn there, before anything is simulated. Raises MachineError."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MachineError('a picture needs matplotlib. Install it: pip install "collc[plot]"')
    if path.suffix.lower() not in ENDINGS:
        raise MachineError(
            f"the picture {path}: its ending has to be {' or '.join(ENDINGS)}. "
            f"Name it for example {path.stem or 'timeline'}.svg."
        )
    if not path.parent.is_dir():
        raise MachineError(f"the picture {path}: there is no folder {path.parent}. Make it first.")


def picture(
    outcome: Outcome, path: Path, lanes: Lanes = "rank", measured: Sequence[Noted] = ()
) -> None:
    """Draws what was simulated with ``record=True``; the same input gives the same bytes of SVG.

    At most ``MOST_LANES`` lanes are drawn, those of the critical path first; the picture says how many
    are left out. What was ``measured`` is drawn below, on a scale of its own. Raises MachineError
    where nothing was recorded, or ``drawable`` does, and OSError.
    """
    path = Path(path)
    drawable(path)
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    record = recorded(outcome)
    made, legs = list(bars(outcome, lanes)), _legs(outcome, lanes)
    every = sorted({bar.lane for bar in made})
    shown = _shown(every, [lane for lane, _ in legs])
    devices = sorted({noted.device for noted in measured})[:MOST_LANES]
    heights = [max(4, len(shown)), *([max(4, len(devices))] if measured else [])]
    height = 1.9 + 0.24 * sum(heights) + 0.9 * (len(heights) - 1)
    figure = Figure(figsize=(11, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes, *below = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    palette = matplotlib.colormaps["tab10" if len(record.phases) <= 10 else "tab20"].colors  # pyright: ignore
    colours = {t: palette[i % len(palette)] for i, t in enumerate(record.phases)}

    unit, scale = _axes(
        axes, [lane_name(outcome, lanes, lane)[1] for lane in shown], horizon(outcome)
    )
    row = {lane: i for i, lane in enumerate(shown)}
    keys = _draw_bars(axes, [bar for bar in made if bar.lane in row], row, scale, colours)
    keys += _draw_critical(axes, [(lane, leg) for lane, leg in legs if lane in row], row, scale)
    axes.set_xlabel(f"time in {unit}" + _left_out(len(every) - len(shown), len(every), lanes))
    axes.set_title(_title(outcome), fontsize=10)
    for own in below:
        _draw_measured(own, measured, devices, colours)
    if keys:
        figure.legend(handles=keys, loc="outside lower center", ncols=3, fontsize=8)
    style: dict[Any, Any] = {
        "svg.hashsalt": "collc",
        "svg.fonttype": "path",
        "path.simplify": False,
    }
    with matplotlib.rc_context(style):
        svg = path.suffix.lower() == ".svg"
        figure.savefig(path, metadata={"Date": None} if svg else None, dpi=150)


def _axes(axes: Any, names: Sequence[str], last: float) -> tuple[str, float]:
    """A lane for each name, the first above, and time until the ``last`` thing: its unit and scale."""
    unit, scale = _unit(last)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, last * scale or 1)
    return unit, scale


def _draw_bars(
    axes: Any,
    made: Sequence[Bar],
    row: Mapping[int, int],
    scale: float,
    colours: Mapping[str, Any],
) -> list[Any]:
    """The bars phase by phase, what waits in them lighter. Returns their keys."""
    from matplotlib.patches import Patch

    keys = []
    raster = len(made) > _RASTER
    for phase, (title, colour) in enumerate(colours.items()):
        own = [bar for bar in made if bar.phase == phase]
        if not own:
            continue
        busy = [_box(row[bar.lane], bar.start * scale, bar.end * scale) for bar in own]
        waits = [_box(row[b.lane], s * scale, e * scale) for b in own for s, e in b.waits]
        _boxes(axes, busy, colour, raster)
        _boxes(axes, waits, [1 - 0.2 * (1 - c) for c in colour], raster)
        keys.append(Patch(facecolor=colour, label=title))
    if any(bar.waits for bar in made):
        keys.append(Patch(facecolor="0.9", label="waiting (light)"))
    return keys


def _draw_critical(
    axes: Any, legs: Sequence[tuple[int, Leg]], row: Mapping[int, int], scale: float
) -> list[Any]:
    """The legs of the critical path, outlined. Returns its key, where there is one."""
    from matplotlib.patches import Patch, Rectangle

    legs = [(lane, leg) for lane, leg in legs if leg.end > leg.start]
    for lane, leg in legs:
        at = (leg.start * scale, row[lane] - _HEIGHT / 2)
        wide = (leg.end - leg.start) * scale
        axes.add_patch(Rectangle(at, wide, _HEIGHT, fill=False, ec="black", lw=1.1))
    return [Patch(fill=False, edgecolor="black", label="critical path")] if legs else []


def _draw_measured(
    axes: Any, measured: Sequence[Noted], devices: Sequence[int], colours: Mapping[str, Any]
) -> None:
    """The measured lanes; grey is what belongs to no phase that was predicted."""
    names = [f"device {device}" for device in devices]
    unit, scale = _axes(axes, names, max(noted.end for noted in measured))
    row = {device: i for i, device in enumerate(devices)}
    for title in dict.fromkeys(noted.title for noted in measured):
        own = [noted for noted in measured if noted.title == title and noted.device in row]
        boxes = [_box(row[noted.device], noted.start * scale, noted.end * scale) for noted in own]
        _boxes(axes, boxes, colours.get(title, "0.7"))
    left = len({noted.device for noted in measured}) - len(devices)
    more = f"; {left:,} devices are not drawn" if left else ""
    axes.set_xlabel(f"measured, time in {unit}; grey: nothing that was predicted{more}")


_Box = list[tuple[float, float]]


def _boxes(axes: Any, boxes: Sequence[_Box], face: Any, raster: bool = False) -> None:
    from matplotlib.collections import PolyCollection

    drawn = PolyCollection(boxes, facecolors=[face], edgecolors="white", linewidths=0.3)
    drawn.set_rasterized(raster)
    axes.add_collection(drawn)


def _box(row: int, start: float, end: float) -> _Box:
    low, high = row - _HEIGHT / 2, row + _HEIGHT / 2
    return [(start, low), (end, low), (end, high), (start, high)]


def _legs(outcome: Outcome, lanes: Lanes) -> list[tuple[int, Leg]]:
    """The critical path by lane; none where a rank stalls."""
    if len(outcome.stalls):
        return []
    legs = critical(outcome).legs
    if lanes == "link":
        names = {leg.link for leg in legs}
        machine = outcome.placement.machine
        known = {machine.name(k): k for k in range(len(machine.beta)) if machine.name(k) in names}
        return [(known[leg.link], leg) for leg in legs if leg.link in known and leg.behind is None]
    width = recorded(outcome).width
    return [(leg.rank * width + leg.track, leg) for leg in legs]


def _shown(every: Sequence[int], first: Sequence[int]) -> list[int]:
    """The lanes to be drawn: those of the critical path first, then the others from the first one on."""
    known = set(every)
    order = dict.fromkeys([*(lane for lane in first if lane in known), *every])
    return sorted(list(order)[:MOST_LANES])


def _unit(last: float) -> tuple[str, float]:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if last * scale >= 1:
            return unit, scale
    return "ns", 1e9


def _left_out(count: int, total: int, lanes: Lanes) -> str:
    return f"; {count:,} of {total:,} {lanes} lanes are not drawn" if count else ""


def _title(outcome: Outcome) -> str:
    stalled = len(outcome.stalls)
    took = f"{stalled:,} ranks never finish" if stalled else seconds(outcome.seconds)
    faults = "".join(f", {fault}" for fault in outcome.faults)
    schedule = outcome.title if len(outcome.title) <= 110 else outcome.title[:107] + "..."
    where = f"{outcome.placement.machine}, {size(outcome.size)}, {outcome.model}{faults}"
    return f"{schedule}\n{where}: {took}"
