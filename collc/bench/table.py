"""The sweep as lines of text within 100 columns, and as JSON in SI units."""

import math
import os
import platform
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from collc.analysis.certificate import certify
from collc.analysis.mesh import show_mesh
from collc.bench.sweep import ALONE, Row, Sweep
from collc.bench.terms import CUT, bus_factor
from collc.language.algebra import show_axes

WIDTH = 100
NUMBERS = ("time", "p99", "var", "algbw", "busbw", "ratio", "#wrong")
UNITS = ("us", "us", "%", "GB/s", "GB/s", "", "")
WIDTHS = (8, 8, 4, 7, 7, 5, 6)
CPU = "CPU times say nothing about the ranking on GPUs."


class Table:
    """How the rows of a sweep print: names that do not fit are numbered, and spelled out above."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.use = max(map(len, sweep.uses))
        room = WIDTH - 10 - 2 - self.use - 2 - sum(WIDTHS) - len(WIDTHS)
        self.names: dict[str, str] = {}
        for label in sweep.labels:
            short = label.replace('"', "").replace("'", "")
            self.names[label] = short if len(short) <= room else f"[{len(self.names)}]"
        self.name = max(map(len, ("schedule", *self.names.values())))

    def header(self) -> list[str]:
        """What was measured, on what, and what the columns mean."""
        s = self.sweep
        on = machine(s)
        factor = bus_factor(s.collective, s.ranks)
        ranks = f"{s.ranks} rank{'s' * (s.ranks != 1)}"
        kind = on["device_kind"]
        kind += f" ({on['platform']})" if kind != on["platform"] else ""
        calls = f"{s.warmup} calls to warm up, {s.iterations} timed; schedules take turns"
        lines = [
            f"collc bench: {s.collective} of {s.dtype} over {show_axes(s.axes)}, {ranks}",
            f"mesh {show_mesh(dict(s.mesh.shape))}: {on['devices']} x {kind}; jax {on['jax']}, "
            f"Python {on['python']}",
            f"{calls}; var: standard deviation / mean",
            f"size: S, the {_meaning(s.collective)}; algbw = S / median time, "
            f"busbw = algbw x {factor}",
            f"ratio: time over that of {s.base} in the same turn, the median of all turns",
        ]
        if s.collective == "broadcast":
            lines.append(
                "lax.psum (masked): jax.lax.pbroadcast has no CPU lowering, so a sum to which only "
                "the root contributes stands for it"
            )
        lines += [f"{use}: {text}" for use, text in self._uses().items()]
        proofs = {label: certify(x, dict(s.mesh.shape)) for label, x in s.schedules.items()}
        if loose := [label for label, c in proofs.items() if c.consistent is False]:
            lines.append(f"replicas may differ in the last bit: {', '.join(loose)}")
        if on["platform"] == "cpu":
            lines.append(CPU)
        lines += [f"{short} {label}" for label, short in self.names.items() if short[0] == "["]
        return [piece for line in lines for piece in _comment(line)]

    def titles(self, groups: str) -> list[str]:
        """The heading of a table: which groups run, and the columns."""
        s = self.sweep
        count = s.mesh.devices.size // s.ranks
        which = (
            f"one group of {show_axes(s.axes)} alone, of {count}"
            if groups == ALONE
            else f"{count} groups of {show_axes(s.axes)}, all at once, as in training"
            if count > 1
            else f"one group of {show_axes(s.axes)}, which is the whole mesh"
        )
        numbers, units = (_join(line) for line in (NUMBERS, UNITS))
        return [
            *_comment(which),
            f"# {'size':>8}  {'use':<{self.use}}  {'schedule':<{self.name}}{numbers}",
            f"# {'B':>8}  {'':<{self.use}}  {'':<{self.name}}{units}".rstrip(),
        ]

    def lines(self, rows: Sequence[Row]) -> list[str]:
        """The rows of one size and use, which are named in the first line."""
        if rows and rows[0].median is None:  # none of them is possible
            return [self._line(rows[0], True, "-", _join(["-"] * len(NUMBERS)))]
        return [
            self._line(row, i == 0, self.names[row.schedule], _join(_numbers(row)))
            for i, row in enumerate(rows)
        ]

    def footer(self, rows: Sequence[Row]) -> str:
        """Whether anything was wrong, as nccl-tests ends."""
        checked = [row.wrong for row in rows if row.wrong is not None]
        if not checked:
            return "# wrong elements: not checked"
        total = sum(checked)
        return f"# wrong elements: {total:,} {'FAILED' if total else 'OK'}"

    def _uses(self) -> dict[str, str]:
        means = {
            "fresh": "the output is a new buffer (out-of-place)",
            "donated": "the input is given up, the output may take its place (in-place)",
            "intermediate": "the value is made and used up within the program; time is that of all",
        }
        if not self.sweep.possible("donated"):
            means["donated"] = (
                f"not possible, since the output of {self.sweep.collective} has another shape"
            )
        return {use: means[use] for use in self.sweep.uses}

    def _line(self, row: Row, first: bool, name: str, numbers: str) -> str:
        size, use = (str(row.size), row.use) if first else ("", "")
        return f"{size:>10}  {use:<{self.use}}  {name:<{self.name}}{numbers}"


def machine(sweep: Sweep) -> dict[str, Any]:
    """What was measured on."""
    device = sweep.mesh.devices.flat[0]
    return {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "devices": sweep.mesh.devices.size,
        "cpus": os.cpu_count(),
        "collc": version("collc"),
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "python": platform.python_version(),
    }


def as_json(sweep: Sweep, rows: Sequence[Row], complete: bool = True) -> dict[str, Any]:
    """All that the table says, in seconds and bytes; None where something is not possible.

    ``complete`` is False where the sweep was stopped before its end.
    """
    sizes = dict(sweep.mesh.shape)
    known = {label: certify(s, sizes) for label, s in sweep.schedules.items()}
    wrong = [row.wrong for row in rows if row.wrong is not None]
    return {
        "collective": sweep.collective,
        "axes": list(sweep.axes),
        "mesh": sizes,
        "ranks": sweep.ranks,
        "groups": sweep.mesh.devices.size // sweep.ranks,
        "dtype": sweep.dtype,
        "warmup": sweep.warmup,
        "iterations": sweep.iterations,
        "busbw_over_algbw": str(bus_factor(sweep.collective, sweep.ranks)),
        "base": sweep.base,
        "schedules": {
            label: {"schedule": str(c.schedule), "rounds": c.rounds, "digest": c.digest}
            for label, c in known.items()
        },
        "machine": machine(sweep),
        "notes": [CPU] * (machine(sweep)["platform"] == "cpu"),
        "rows": [_row(row) for row in rows],
        "wrong": sum(wrong) if wrong else None,
        "complete": complete,
    }


def _row(row: Row) -> dict[str, Any]:
    units = {
        "size": "size_bytes", "median": "median_s", "p99": "p99_s", "mean": "mean_s",
        "algbw": "algbw_bytes_per_s", "busbw": "busbw_bytes_per_s",
    }  # fmt: skip
    return {units.get(name, name): value for name, value in asdict(row).items()}


def _meaning(collective: str) -> str:
    side = "output" if collective == "all_gather" else "input"
    chunks = ", a chunk for each rank" if collective in CUT else ""
    return f"bytes of a rank's {side}{chunks}"


def _numbers(row: Row) -> list[str]:
    assert row.median is not None and row.p99 is not None and row.variation is not None
    assert row.algbw is not None and row.busbw is not None and row.ratio is not None
    return [
        _digits(row.median * 1e6),
        _digits(row.p99 * 1e6),
        f"{100 * row.variation:.0f}",
        _digits(row.algbw / 1e9),
        _digits(row.busbw / 1e9),
        f"{row.ratio:.2f}",
        "N/A" if row.wrong is None else str(row.wrong),
    ]


def _digits(value: float) -> str:
    """At least three digits, without an exponent.

    >>> [_digits(v) for v in (12345.6, 123.45, 1.2345, 0.012345, 0.0)]
    ['12346', '123.5', '1.23', '0.0123', '0.00']
    """
    if value >= 1000:
        return f"{value:.0f}"
    if value >= 100:
        return f"{value:.1f}"
    if value >= 1 or value == 0:
        return f"{value:.2f}"
    return f"{value:.{2 - math.floor(math.log10(value))}f}"


def _join(cells: Sequence[str]) -> str:
    return "".join(f" {cell:>{width}}" for cell, width in zip(cells, WIDTHS))


def _comment(line: str) -> list[str]:
    return textwrap.wrap(
        line, WIDTH, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False
    )
