"""What is fastest here: a short sweep over sizes, kept for this machine and mesh.

Tracing cannot see whether a value is donated, and that decides more than the algorithm does; so the
sweep is for one use of the buffer, as ``collc.receipts.timing`` has them. What is not clearly
faster than XLA's own, compared call by call, does not replace it.
"""

import hashlib
import json
import math
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh

from collc.analysis import cache
from collc.analysis.certificate import certify
from collc.errors import CollcError, PlanError
from collc.language.algebra import Schedule
from collc.language.parse import parse
from collc.planning.agree import share
from collc.planning.by_size import BySize
from collc.planning.compose import composed, native
from collc.planning.registry import algorithm
from collc.receipts.timing import Repeated, compiled, in_turns, per_device, zeros

SIZES = tuple(4096 * 8**i for i in range(5))  # bytes per device: 4 KiB to 16 MiB
WORTH = 0.95  # a schedule replaces XLA's own where it takes at most this much of its time
HOPELESS = 1.3  # of the best one's time in the first turns: not measured any further
TURNS = (3, 20)  # to see what is hopeless, and to compare the rest

INNER = ("native", "ring", "halving")
OUTER = ("native", "ring", "tree")
ALONE = (
    "native.reduce_scatter >> native.all_gather",
    "ring.all_reduce",
    "halving.all_reduce",
    "tree.double_all_reduce",
    "allpairs.two_shot",
)


@dataclass(frozen=True)
class Tuned:
    """The all-reduce of each size.

    ``use``: how the swept values were used. ``entries``: those of ``choices``. ``where``: the file
    that keeps it.
    """

    use: str
    entries: tuple[tuple[int, Schedule], ...]
    where: str = ""

    @property
    def choices(self) -> BySize:
        """From how many bytes on, which schedule."""
        return BySize(self.entries)


def tune(mesh: Mesh | AbstractMesh, axes: tuple[str, ...], use: str) -> Tuned:
    """What a sweep on the mesh's own devices chose, now or earlier on the same machine and mesh.

    All processes take part, and take what process 0 decides. Raises PlanError where the mesh has no
    devices to run on.
    """
    if isinstance(mesh, AbstractMesh):
        raise PlanError(
            '"auto" runs schedules on the devices: give a jax.sharding.Mesh that has some.'
        )
    options = list(candidates(mesh, axes))
    if len(options) == 1:
        return Tuned(use, ((0, options[0]),))
    path = _path(mesh, axes, use, options)
    kept = share("the schedules chosen earlier", _read(path, options))
    if not kept:
        _ready()
        with _among(mesh):
            found = "\n".join(_sweep(mesh, axes, use, options))
        kept = share("the schedules chosen now", found)
        cache.keep(path, kept)
    return Tuned(use, _choices(kept).entries, str(path) if path.exists() else "")


def _ready() -> None:
    """Raises PlanError where programs cannot be run for their time."""
    if isinstance(jnp.zeros(()), Tracer):
        raise PlanError(
            '"auto" runs schedules on the devices: make the plan outside of jit and shard_map.'
        )
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        raise PlanError('"auto" times compiled schedules: make the plan without jax_disable_jit.')


def _among(mesh: Mesh) -> AbstractContextManager[Any]:
    """The mesh as the current one, where another may be."""
    return nullcontext() if jax.sharding.get_abstract_mesh().empty else jax.set_mesh(mesh)


def candidates(mesh: Mesh, axes: tuple[str, ...]) -> Iterator[Schedule]:
    """The all-reduces that a sweep compares, XLA's own first; all of them proved and consistent."""
    yield native("all_reduce") @ axes
    if math.prod(mesh.shape[a] for a in axes) == 1:
        return
    if len(axes) == 1:
        found = [parse(text) @ axes for text in ALONE]
    else:
        found = [parse(ALONE[0]) @ axes]
        for outer, inner in product(OUTER, INNER):
            own = {axis: algorithm(outer if axis == axes[0] else inner) for axis in axes}
            found.append(composed(own, "all_reduce", axes))
    for schedule in dict.fromkeys(found):
        if certify(schedule, dict(mesh.shape)).narrow is not False:
            yield schedule


def _sweep(
    mesh: Mesh, axes: tuple[str, ...], use: str, options: Sequence[Schedule]
) -> Iterator[str]:
    """The lines of what is chosen: at each size the fastest, and between two sizes the change.

    Before them, as comments, what was measured.
    """
    found = [_ratios(mesh, axes, use, options, size) for size in SIZES]
    for size, each in zip(SIZES, found, strict=True):
        measured = ", ".join(f"{s} {each[s]:.2f}" for s in options[1:] if s in each)
        yield f"# {size} bytes, to {options[0]}: {measured or 'all others were hopeless'}"
    best = [min(each, key=lambda s, each=each: each[s]) for each in found]
    yield f"0 = {best[0]}"
    for i, (one, two) in enumerate(pairwise(best)):
        if one != two:
            yield f"{_crossing(SIZES[i], found[i], SIZES[i + 1], found[i + 1], one, two)} = {two}"


def _ratios(
    mesh: Mesh, axes: tuple[str, ...], use: str, options: Sequence[Schedule], size: int
) -> dict[Schedule, float]:
    """The time of what is not hopeless at one size, to that of XLA's own; that itself has WORTH."""
    count = mesh.size * size // 4  # float32
    own, calls, x = options[0], {}, zeros(mesh, count)
    for schedule in options:
        x = zeros(mesh, count) if use == "donated" else x
        on = axes if schedule == own else schedule
        run = compiled(per_device("all_reduce", on), mesh, x, use)
        calls[str(schedule)] = Repeated(run, x, use == "donated")
    first = {name: float(np.median(t)) for name, t in in_turns(calls, TURNS[0]).items()}
    hopeful = [name for name in calls if first[name] <= HOPELESS * min(first.values())]
    # All processes have to measure the same.
    hopeful = share("what is measured further", json.dumps(hopeful))
    kept = {name: calls[name] for name in (str(own), *json.loads(hopeful))}
    seconds = in_turns(kept, TURNS[1])
    found = {own: WORTH}
    for schedule in options[1:]:
        if (name := str(schedule)) in kept:
            ratios = seconds[name] / seconds[str(own)]
            steady = np.quantile(ratios, 0.75) < 1  # not by luck
            found[schedule] = float(np.median(ratios) if steady else max(1, np.median(ratios)))
    return found


def _crossing(
    low: int,
    at_low: Mapping[Schedule, float],
    high: int,
    at_high: Mapping[Schedule, float],
    one: Schedule,
    two: Schedule,
) -> int:
    """The size from which on ``two`` is taken: log-linear between the two swept ones.

    What was hopeless at one of them counts there as a third slower.
    """
    slow = math.log(4 / 3)
    before = math.log(at_low[two] / at_low[one]) if two in at_low else slow
    after = math.log(at_high[two] / at_high[one]) if one in at_high else -slow
    at = before / (before - after) if before > 0 > after else 0.5
    return round(low * (high / low) ** at)


def _path(mesh: Mesh, axes: tuple[str, ...], use: str, options: Sequence[Schedule]) -> Path:
    """Where the choice is kept: another machine, jax, mesh or schedule has another file."""
    devices = [d.device_kind for d in np.ravel(mesh.devices)]
    facts = [
        platform.node(), platform.machine(), os.cpu_count(), jax.__version__, jax.process_count(),
        mesh.devices.flat[0].platform, sorted(set(devices)), [d.id for d in mesh.devices.flat],
        dict(mesh.shape), axes, use, SIZES, WORTH, os.environ.get("XLA_FLAGS", ""),
        [certify(s, dict(mesh.shape)).digest for s in options],
    ]  # fmt: skip
    name = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]
    return cache.folder() / "tuned" / f"{name}.txt"


def _read(path: Path, options: Sequence[Schedule]) -> str:
    """What is kept there; "" where there is nothing, or nothing that a sweep would have written."""
    try:
        text = path.read_text(encoding="utf-8")
        known = all(schedule in options for _, schedule in _choices(text).entries)
    except (OSError, ValueError, CollcError):
        return ""
    return text if known else ""


def _choices(kept: str) -> BySize:
    """What a sweep chose, among comments. Raises ValueError where it is not there, ScheduleError."""
    return BySize.read(line for line in kept.splitlines() if not line.startswith("#"))
