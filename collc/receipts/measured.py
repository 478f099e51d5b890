"""A collective run for real under the profiler: what each device did, and when."""

import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import Mesh

from collc.errors import DataError, MeshError, ScheduleError, nearest
from collc.language.algebra import Schedule
from collc.language.ir import integer
from collc.language.library import find
from collc.language.states import COLLECTIVES, KINDS
from collc.receipts.profile import Profile, Span, read_profile
from collc.receipts.profile.names import of_text
from collc.receipts.timing import compiled, per_device, zeros

_BYTES = 4  # of a float32
_WARMUP = 2


@dataclass(frozen=True)
class Measured:
    """What a collective did on the devices of a mesh.

    Attributes:
      schedule: as text.
      collective: "all_reduce", ...
      sizes: the mesh's axes, outermost first.
      size: S in bytes, as nccl-tests has it: the whole array, after rounding down.
      platform: "cpu", "gpu".
      cores: that the devices share, if they are threads of this process; else None.
      seconds: of each run, from the call until its result was there, with the profiler on.
      run: the median run, whose spans these are.
      spans: by start, from the first of them on. ``device`` is the place in ``mesh.devices.flat``.
    """

    schedule: str
    collective: str
    sizes: Mapping[str, int]
    size: int
    platform: str
    cores: int | None
    seconds: tuple[float, ...]
    run: int
    spans: tuple[Span, ...] = field(repr=False)

    @property
    def caveat(self) -> str:
        """What the times do not say, "" where they are those of devices with links."""
        if self.cores is None:
            return ""
        devices = math.prod(self.sizes.values())
        return (
            f"{devices} virtual devices, threads that share {self.cores} cores and one memory: which "
            "rounds there are and in what order is real, how long they take is how long threads wait "
            "for one another and says nothing about links."
        )


def measure(schedule: Schedule | str, mesh: Mesh, size_bytes: int, runs: int = 5) -> Measured:
    """Runs a placed schedule's collective on float32 under the profiler, one run after the other.

    ``size_bytes``: S, the whole array, of all ranks' chunks where the collective cuts it. The profiler
    writes into a temporary folder, which is removed.

    Raises ScheduleError for a schedule that is not placed or no one collective, MeshError for axes that
    the mesh lacks or several processes, DataError for sizes or runs that cannot be, memory that does not
    suffice, and a profiler that runs already or misses a device.
    """
    schedule = find(schedule) if isinstance(schedule, str) else schedule
    collective = _collective(schedule, mesh)
    n = math.prod(mesh.shape[axis] for axis in schedule.axes)
    count = _count(collective, size_bytes, n)
    if integer(runs) is None or runs < 1:
        raise DataError(f"runs is {runs!r}: a number of 1 or more is needed.")
    length = count // n if collective == "all_gather" else count
    try:
        x = zeros(mesh, length * mesh.devices.size)
        function = compiled(per_device(collective, schedule), mesh, x, "fresh")
        text = function.as_text()
        seconds, profile = _profiled(lambda: jax.block_until_ready(function(x)), runs, text)
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        raise DataError(
            f"the devices ran out of memory at {size_bytes} bytes on each. Take fewer."
        ) from None
    chosen = sorted(range(runs), key=seconds.__getitem__)[(runs - 1) // 2]
    ranks = {device.local_hardware_id: rank for rank, device in enumerate(mesh.devices.flat)}
    spans = _spans(profile, of_text(text)[0], runs, chosen, ranks)
    platform = mesh.devices.flat[0].platform
    return Measured(
        schedule=str(schedule),
        collective=collective,
        sizes=dict(mesh.shape),
        size=count * _BYTES,
        platform=platform,
        cores=_cores() if platform == "cpu" else None,
        seconds=seconds,
        run=chosen,
        spans=spans,
    )


def _collective(schedule: Schedule, mesh: Mesh) -> str:
    """What the schedule does, if it can be run alone on this mesh."""
    if not schedule.axes:
        raise ScheduleError(f"{schedule} is not placed on an axis. Say {schedule} @ gpu.")
    for axis in schedule.axes:
        if axis not in mesh.shape:
            raise MeshError(
                f"{schedule} is placed on {axis}, which the mesh does not have. "
                f"{nearest(axis, mesh.shape)}"
            )
    kind = schedule.collective
    if kind is None or kind.name not in COLLECTIVES:
        what = f"a {kind.name}" if kind else f"{schedule.type}, which is no one collective"
        raise ScheduleError(f"{schedule} is {what}. What can be run: {', '.join(COLLECTIVES)}.")
    if all(mesh.shape[axis] == 1 for axis in schedule.axes):
        raise MeshError(
            f"{schedule} is for one rank alone, which has nothing to send. Take a larger mesh."
        )
    if jax.process_count() > 1:
        raise MeshError("only one process can be measured, and jax has several. Start it alone.")
    return kind.name


def _count(collective: str, size: int, n: int) -> int:
    """Elements of S, rounded down to what the collective can cut into n."""
    whole = n if KINDS[collective].scatters else 1
    if integer(size) is None or size < whole * _BYTES:
        each = f" for each of {n} ranks" if whole > 1 else ""
        raise DataError(
            f"size_bytes is {size!r}, which is not one float32{each}: {whole * _BYTES} or more is "
            "needed."
        )
    return int(size) // (whole * _BYTES) * whole


def _profiled(call: Callable[[], Any], runs: int, text: str) -> tuple[tuple[float, ...], Profile]:
    """Seconds of each call, one after the other, and what the profiler noted of all."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # which would slow the calls down
    options.host_tracer_level = 1
    for _ in range(_WARMUP):
        call()
    seconds = []
    with tempfile.TemporaryDirectory(prefix="collc-profile-") as folder:
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except RuntimeError as e:
            raise DataError(f"the profiler cannot be started: {e} Stop what it traces.") from None
        try:
            for number in range(runs):
                with jax.profiler.StepTraceAnnotation("collc", step_num=number):
                    began = time.perf_counter()
                    call()
                    seconds.append(time.perf_counter() - began)
        finally:
            jax.profiler.stop_trace()
        return tuple(seconds), read_profile(folder, hlo=text)


def _spans(
    profile: Profile, module: str, runs: int, chosen: int, ranks: Mapping[int, int]
) -> tuple[Span, ...]:
    """The spans of one run, with ranks for devices; of every rank, or it is refused."""
    noted = [run for name, run in profile.runs if name == module]
    if len(noted) != runs:
        raise DataError(
            f"the profiler noted {len(noted)} of {runs} runs. Measure fewer runs, or less in each."
        )
    spans = profile.runs[module, chosen]
    if missing := sorted(ranks.keys() - {span.device for span in spans}):
        raise DataError(
            f"the profiler noted nothing of device {missing[0]} in run {chosen}. Measure again."
        )
    return tuple(replace(span, device=ranks[span.device]) for span in spans)


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
