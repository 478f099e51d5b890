"""The sweep: schedules and XLA's own collective take turns, size by size and use by use."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from collc.bench import memory
from collc.bench.alike import alike
from collc.bench.telltale import TellTale
from collc.bench.terms import (
    DTYPES,
    RESHAPED,
    bus_factor,
    counts,
    lengths,
    parse_dtype,
)
from collc.errors import DataError, MeshError, ScheduleError, nearest
from collc.language.algebra import Schedule, show_axes
from collc.language.library import find
from collc.receipts.timing import USES, Repeated, compiled, in_turns, per_device, ratio, zeros

ALL, ALONE = "all", "alone"
LAX = {
    "all_reduce": "lax.psum",
    "reduce_scatter": "lax.psum_scatter",
    "all_gather": "lax.all_gather",
    "all_to_all": "lax.all_to_all",
    "broadcast": "lax.psum (masked)",  # lax.pbroadcast has no CPU lowering
}


@dataclass(frozen=True)
class Row:
    """One schedule at one size. Times in seconds, bandwidths in bytes per second.

    ``size``: S in bytes, after rounding down; ``variation``: standard deviation over mean;
    ``ratio``: the median over the turns of its time to that of XLA's own collective; ``wrong``:
    elements over all devices, None where it was not checked. Times, bandwidths and ratio are None
    where the use is not possible.
    """

    groups: str
    size: int
    count: int
    use: str
    schedule: str
    median: float | None = None
    p99: float | None = None
    mean: float | None = None
    variation: float | None = None
    algbw: float | None = None
    busbw: float | None = None
    ratio: float | None = None
    wrong: int | None = None


@dataclass(frozen=True)
class Sweep:
    """What is measured. Made by ``prepare``, which checks it.

    ``schedules``: placed ones by label. ``axes``: those of the collective, in the order of ranks.
    """

    mesh: Mesh
    collective: str
    axes: tuple[str, ...]
    schedules: Mapping[str, Schedule]
    counts: tuple[int, ...]
    dtype: str = "float32"
    warmup: int = 5
    iterations: int = 20
    uses: tuple[str, ...] = ("fresh", "donated")
    groups: tuple[str, ...] = (ALL,)
    check: bool = True

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def base(self) -> str:
        """The label of XLA's own collective."""
        return LAX[self.collective]

    @property
    def labels(self) -> tuple[str, ...]:
        """The base, then the schedules."""
        return (self.base, *self.schedules)

    def possible(self, use: str) -> bool:
        """Whether the input can be given up for the output, where the use wants that."""
        return use != "donated" or self.collective not in RESHAPED or self.ranks == 1

    def blocks(self, going: Callable[[], None] = lambda: None) -> Iterator[list[Row]]:
        """The rows of one size and use at a time, the base first.

        ``going`` is called before each call of a collective, and may raise to end the sweep.
        """
        for groups in self.groups:
            mesh = self.mesh if groups == ALL else one_group(self.mesh, self.axes)
            for count in self.counts:
                for use in self.uses:
                    going()
                    yield self._block(mesh, groups, count, use, going)

    def _block(
        self, mesh: Mesh, groups: str, count: int, use: str, going: Callable[[], None]
    ) -> list[Row]:
        size = count * DTYPES[self.dtype]
        row = partial(Row, groups, size, count, use)
        if not self.possible(use):
            return [row(label) for label in self.labels]
        try:
            found, wrong = self._measured(mesh, count, use, going)
        except jax.errors.JaxRuntimeError as e:
            raise memory.exhausted(e, size) or e from None
        base = found[self.base]
        return [
            row(
                label,
                **_statistics(seconds),
                algbw=size / float(np.median(seconds)),
                busbw=size / float(np.median(seconds)) * bus_factor(self.collective, self.ranks),
                ratio=ratio(seconds, base),
                wrong=wrong.get(label),
            )
            for label, seconds in found.items()
        ]

    def _measured(
        self, mesh: Mesh, count: int, use: str, going: Callable[[], None]
    ) -> tuple[dict[str, NDArray[np.float64]], dict[str, int]]:
        """Seconds of each call, [iterations], and the number of wrong elements, by label."""
        length, _ = lengths(self.collective, count, self.ranks)
        x = zeros(mesh, length * mesh.devices.size, self.dtype)
        functions = {}
        for label, on in {self.base: self.axes, **self.schedules}.items():
            going()
            functions[label] = compiled(per_device(self.collective, on), mesh, x, use)
        wrong: dict[str, int] = {}
        if self.check:
            scaled = use == "intermediate"
            tell = TellTale(mesh, self.collective, self.axes, length, self.dtype, scaled)
            wrong = tell.wrong({k: _if_going(f, going) for k, f in functions.items()})
        donated = use == "donated"
        calls = {}
        for label, function in functions.items():
            own = zeros(mesh, x.size, self.dtype) if donated else x
            calls[label] = _if_going(Repeated(function, own, donated), going)
        del x  # where it is donated nobody needs it
        return in_turns(calls, self.iterations, self.warmup), wrong


def prepare(
    mesh: Mesh,
    schedules: Mapping[str, Schedule | str] | Sequence[Schedule | str],
    sizes: Sequence[int],
    *,
    dtype: str = "float32",
    warmup: int = 5,
    iterations: int = 20,
    uses: Sequence[str] = ("fresh", "donated"),
    groups: Sequence[str] = (ALL,),
    check: bool = True,
) -> Sweep:
    """Checks what is to be measured: placed schedules, by label or by their text, and sizes S in bytes.

    Sizes are rounded down to whole elements, for each rank where the collective cuts S. ``uses``:
    "fresh" (nccl-tests' out-of-place), "donated" (its in-place) and "intermediate", as in
    ``collc.receipts.timing``. ``groups``: "all" groups of the axes at once, as in training, or the
    first one "alone". Raises ScheduleError, ProofError, MeshError or DataError.
    """
    if not isinstance(schedules, Mapping):
        schedules = {str(s): s for s in schedules}
    placed = {k: find(s) if isinstance(s, str) else s for k, s in schedules.items()}
    collective, axes = alike(placed, dict(mesh.shape))
    if LAX[collective] in placed:
        raise ScheduleError(
            f"{LAX[collective]} is measured anyhow. Give that schedule another name."
        )
    dtype = parse_dtype(dtype)
    if DTYPES[dtype] == 8 and not jax.config.jax_enable_x64:  # pyright: ignore
        raise DataError(f"jax has no {dtype} unless jax_enable_x64 is set. Set JAX_ENABLE_X64=1.")
    if iterations < 1 or warmup < 0:
        raise DataError(
            f"{iterations} iterations after {warmup} calls to warm up: at least 1 and 0 are needed."
        )
    _known("use", uses, USES)
    _known("groups", groups, (ALL, ALONE))
    if jax.process_count() > 1:
        raise MeshError("bench runs in one process, and jax has several here. Start it alone.")
    n = math.prod(mesh.shape[axis] for axis in axes)
    if ALONE in groups and n == mesh.devices.size:
        raise MeshError(
            f"the mesh is a single group of {show_axes(axes)}, so alone is what it always is. "
            "Leave groups out, or take a mesh with another axis."
        )
    whole = counts(collective, sizes, n, dtype)
    found = Sweep(
        mesh, collective, axes, placed, tuple(whole), dtype, warmup, iterations, tuple(uses),
        tuple(groups), check,
    )  # fmt: skip
    if not any(found.possible(use) for use in uses):
        raise DataError(
            f"a donated buffer cannot be used again by {collective}: its output has another shape. "
            "Take fresh or intermediate."
        )
    inputs = len(found.labels) if "donated" in uses and found.possible("donated") else 1
    for chosen in groups:
        own = mesh if chosen == ALL else one_group(mesh, axes)
        memory.fits(own, max(whole) * DTYPES[dtype], inputs, check)
    return found


def sweep(
    mesh: Mesh,
    schedules: Mapping[str, Schedule | str] | Sequence[Schedule | str],
    sizes: Sequence[int],
    **options: Any,
) -> list[Row]:
    """All rows of a sweep, whose options are those of ``prepare``: by size, use and schedule."""
    return [row for block in prepare(mesh, schedules, sizes, **options).blocks() for row in block]


def one_group(mesh: Mesh, axes: Sequence[str]) -> Mesh:
    """The devices of the first group of these axes, as a mesh whose other axes have size 1."""
    first = tuple(slice(None) if name in axes else slice(0, 1) for name in mesh.axis_names)
    return Mesh(mesh.devices[first], mesh.axis_names, axis_types=mesh.axis_types)


def _known(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise DataError(f"{what} cannot be {name!r}. {nearest(name, known)}")
    if not given or len(set(given)) < len(given):
        raise DataError(f"{what} is {', '.join(given) or 'nothing'}. Give each of them once.")


def _statistics(seconds: NDArray[np.float64]) -> dict[str, float]:
    mean = float(seconds.mean())
    return {
        "median": float(np.median(seconds)),
        "p99": float(np.percentile(seconds, 99)),
        "mean": mean,
        "variation": float(seconds.std()) / mean,
    }


def _if_going(function: Callable[..., Any], going: Callable[[], None]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        going()
        return function(*args)

    return call
