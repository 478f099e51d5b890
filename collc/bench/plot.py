"""Time and bus bandwidth over size, one line for each schedule."""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collc.bench.sweep import Row
from collc.errors import DataError
from collc.machine.units import show_size

MARKERS = "o^svDPX*<>"


def writable(path: Path) -> None:
    """Whether a plot can be written there, before anything is measured. Raises DataError."""
    if importlib.util.find_spec("matplotlib") is None:
        raise DataError('a plot needs matplotlib. Install it: pip install "collc[plot]"')
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    ending = path.suffix.removeprefix(".").lower()
    if ending not in known:
        found = f"{path.suffix} is none of them" if path.suffix else "it has no ending"
        raise DataError(
            f"the plot {path}: the ending says which format it has ({', '.join(known)}), and {found}. "
            f"Name it for example {path.stem}.png."
        )
    folder = path.parent
    if not folder.is_dir():
        raise DataError(f"the plot {path}: there is no folder {folder}. Make it first.")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise DataError(f"the plot {path} cannot be written there. Choose another place.")


def plot(path: Path, rows: Sequence[Row], title: str) -> None:
    """Writes the plot, with a column for each use and choice of groups. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.median is not None]
    columns = list(dict.fromkeys((row.groups, row.use) for row in rows))
    if not columns:
        raise DataError(f"the plot {path} has nothing to show: no size was finished.")
    labels = list(dict.fromkeys(row.schedule for row in rows))
    figure = Figure(figsize=(2 + 4.5 * len(columns), 8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(columns), sharex=True, sharey="row", squeeze=False)
    for at, (groups, use) in enumerate(columns):
        here = [row for row in rows if (row.groups, row.use) == (groups, use)]
        for number, label in enumerate(labels):
            own = [row for row in here if row.schedule == label]
            sizes = [row.size for row in own]
            # XLA's own collective, the first, is what the others are measured against.
            style: dict[str, Any] = {"label": label, "marker": MARKERS[number % len(MARKERS)]}
            style |= {"color": "black", "linestyle": "--"} if not number else {}
            panels[0, at].plot(sizes, [1e6 * (row.median or 0) for row in own], **style)
            panels[1, at].plot(sizes, [(row.busbw or 0) / 1e9 for row in own], **style)
        alone = ", one group alone" if groups == "alone" else ""
        panels[0, at].set_title(f"{use}{alone}")
        panels[1, at].set_xlabel("S in bytes")
    for panel in panels.flat:
        panel.set_xscale("log", base=2)
        if panel in panels[0] or any(row.busbw for row in rows):  # of one rank it is 0
            panel.set_yscale("log")
        panel.xaxis.set_major_formatter(lambda value, _: show_size(round(value)))
        panel.grid(alpha=0.3)
    panels[0, 0].set_ylabel("time in µs, median")
    panels[1, 0].set_ylabel("busbw in GB/s")
    panels[0, 0].legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path)
