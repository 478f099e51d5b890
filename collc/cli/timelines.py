"""``collc trace``: what every rank or link does when, predicted, and measured beside it."""

import json as jsonlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.table import Table

from collc.analysis.mesh import parse_mesh, show_mesh
from collc.cli.common import (
    SECONDS,
    Debug,
    Json,
    Machine,
    Output,
    Timeout,
    files_run,
    guarded,
    print_json,
)
from collc.cli.devices import choose_platform, devices_for
from collc.cli.machines import Order, notes, on_mesh, own_mesh, parse_order
from collc.errors import DataError, MachineError
from collc.language.algebra import Schedule
from collc.language.library import find
from collc.language.states import KINDS
from collc.machine import units
from collc.machine.flow import Flow, flow
from collc.machine.placement import placed as placement
from collc.machine.simulation.critical import Critical, critical
from collc.machine.simulation.faults import EXAMPLES, parse_fault
from collc.machine.simulation.jobs import Model
from collc.machine.simulation.outcome import Outcome
from collc.machine.simulation.picture import ENDINGS, drawable, picture
from collc.machine.simulation.record import MOST_RECORDED
from collc.machine.simulation.simulate import simulate
from collc.machine.simulation.step import step_timeline
from collc.machine.simulation.timeline import LANES, Noted, chrome
from collc.machine.text import machine as read_machine
from collc.machine.topology import Machine as Topology

RUN = "run"
_MOST_VIRTUAL = 64


def _option(name: str, metavar: str, help: str) -> Any:
    return typer.Option(name, metavar=metavar, help=help, show_default=False)


@guarded
def trace(
    machine: Machine,
    size: Annotated[
        str, _option("--size", "BYTES", "A rank's whole buffer; of a step all its gradients.")
    ],
    schedule: Annotated[
        str, typer.Argument(metavar="[SCHEDULE]", help="As in collc cost; or say --plan.")
    ] = "",
    mesh: Annotated[
        str, _option("--mesh", "AXIS=SIZE,...", "Outermost axis first. Default: host and gpu.")
    ] = "",
    order: Order = "",
    plan: Annotated[
        str, _option("--plan", "PLAN", "The all-reduce of a plan: gpu=ring,host=tree, or its file.")
    ] = "",
    compute: Annotated[
        str, _option("--compute", "TIME", "A whole train step, which computes so long: 120ms.")
    ] = "",
    overlap: Annotated[
        bool | None,
        typer.Option(
            "--overlap/--no-overlap",
            metavar="",
            help="Of a step: reduce during the backward (the default), or after it.",
            show_default=False,
        ),
    ] = None,
    buckets: Annotated[
        int | None, _option("--buckets", "K", "Of a step: gradients in K parts. Default: 1.")
    ] = None,
    fault: Annotated[
        list[str] | None, _option("--fault", "FAULT", f"May be repeated: {EXAMPLES}.")
    ] = None,
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="abstract or lowered: docs/prices.md.")
    ] = "lowered",
    lanes: Annotated[
        str, typer.Option("--lanes", metavar="LANES", help="rank or link: what has a lane.")
    ] = "rank",
    out: Annotated[
        list[Path] | None,
        _option(
            "-o", "FILE", "May be repeated: .json for ui.perfetto.dev, .svg or .png a picture."
        ),
    ] = None,
    measured: Annotated[
        str, _option("--measured", "PROFILE", "A real run beside it: jax's profile, or run: now.")
    ] = "",
    json: Json = False,
    timeout: Timeout = SECONDS,
    debug: Debug = False,
) -> None:
    """Simulate a schedule, a plan or a whole step: who does what when, and what the time is made of.

    No rank waits where the schedule does not make it wait. So a slow rank, a slow NIC or a broken link
    shows who waits for whom. -o writes a timeline, with a lane for each rank or link.

    --measured lays the profiler's timeline of a real run beside it, matched by the schedule's named
    scopes: the folder that jax.profiler.trace was given, or "run" to run it now on the devices here.
    """
    files = list(out or ())
    _check(schedule, plan, compute, (buckets, overlap), model, lanes, measured, order, files)
    bytes, on = units.parse_size(size), read_machine(machine)
    faults = [parse_fault(text) for text in fault or ()]
    with files_run(timeout):
        what = _planned(plan, mesh, on, bytes) if plan else find(schedule)
        what, sizes = on_mesh(what, mesh, on, schedule)
        if lanes == "link" and any(leaf.native for leaf in what.leaves()):
            raise MachineError(
                f"--lanes link: nobody knows which links XLA's own take, and {what} has some. Say rank."
            )
        place = placement(on, sizes, parse_order(order))
        sent = flow(what, sizes)
    if compute:
        if what.collective is not KINDS["all_reduce"]:
            raise MachineError(
                f"--compute: a step all-reduces its gradients, and {what} is no all-reduce."
            )
        took, parts = units.parse_time(compute), 1 if buckets is None else buckets
        outcome = step_timeline(
            what, place, took, bytes, parts, overlap is not False, faults, model=_model(model)
        )
    else:
        keep = bool(files) or _few(sent)
        outcome = simulate(sent, place, bytes, faults, model=_model(model), record=keep)
    with files_run(timeout, "Measure fewer bytes or ranks, or allow more time with --timeout"):
        noted, caveat = _measured(measured, what, sizes, bytes) if measured else ([], "")
    if noted:
        _told(outcome, noted, measured)
    for path in files:
        _write(outcome, path, lanes, noted)
    path = critical(outcome) if outcome.record and not len(outcome.stalls) else None
    if json:
        print_json(as_json(outcome, path, noted))
        return
    console = Output()
    for line in outcome.summary().splitlines():
        console.line(line)
    console.line(f"mesh: {show_mesh(sizes)}")
    for note in notes(place):
        console.line(f"note: {note}", "yellow")
    for line in str(path).splitlines() if path else ():
        console.line(line)
    if noted:
        _beside(console, outcome, noted, caveat)
    for written in files:
        console.line(f"wrote {written}")


def _check(
    schedule: str,
    plan: str,
    compute: str,
    of_steps: tuple[object, ...],
    model: str,
    lanes: str,
    measured: str,
    order: str,
    files: Sequence[Path],
) -> None:
    """Raises MachineError for options that cannot be, or would have no effect."""
    wrong = None
    if bool(schedule) == bool(plan):
        wrong = "say either a schedule or --plan."
    elif model not in get_args(Model):
        wrong = f"--model {model}: say {' or '.join(get_args(Model))}."
    elif lanes not in LANES:
        wrong = f"--lanes {lanes}: say {' or '.join(LANES)}."
    elif lanes != "rank" and not files:
        wrong = f"--lanes {lanes} has an effect on files only. Say -o timeline.svg."
    elif not compute and any(given is not None for given in of_steps):
        wrong = "--buckets and --overlap have an effect on a step only. Say --compute."
    elif measured and order:
        wrong = "--measured runs on the devices as they come. Drop --order."
    elif compute and measured:
        wrong = "--measured runs the collective alone. Drop --compute."
    if wrong:
        raise MachineError(wrong)
    for path in files:
        if path.suffix in ENDINGS:
            drawable(path)
        elif path.suffix != ".json":
            raise MachineError(f"-o {path}: its ending has to be .json, .svg or .png.")
        elif not path.parent.is_dir():
            raise MachineError(f"-o {path}: there is no folder {path.parent}. Make it first.")


def _model(text: str) -> Model:
    return "abstract" if text == "abstract" else "lowered"


def _few(sent: Flow) -> bool:
    """Whether so little is sent that keeping all of it for the critical path costs nothing."""
    steps = sum(len(part.moments or ()) for part in sent.parts)
    return steps * sent.ranks <= MOST_RECORDED // 8


def _planned(text: str, mesh: str, machine: Topology, size: int) -> Schedule:
    """The all-reduce of a plan."""
    from jax.sharding import AbstractMesh

    from collc.cli.plans import read_plan

    own = parse_mesh(mesh) if mesh else own_mesh(machine)
    blank = AbstractMesh(tuple(own.values()), tuple(own))
    return read_plan(text, blank).schedule("all_reduce", size=size)


def _write(outcome: Outcome, path: Path, lanes: str, noted: Sequence[Noted]) -> None:
    by = "link" if lanes == "link" else "rank"
    if path.suffix == ".json":
        path.write_text(jsonlib.dumps(chrome(outcome, by, noted)), encoding="utf-8")
    else:
        picture(outcome, path, by, noted)


# ---- measured -----------------------------------------------------------------------------------


def _measured(
    source: str, schedule: Schedule, sizes: Mapping[str, int], size: int
) -> tuple[list[Noted], str]:
    """What a profiler noted of one run, and what that does not say."""
    if source == RUN:
        choose_platform(None)
        devices_for(sizes)
        from collc.bench.memory import fits
        from collc.planning.meshes import mesh_of
        from collc.receipts.measured import measure

        count = math.prod(sizes.values())
        if os.environ["JAX_PLATFORMS"].split(",")[0] == "cpu" and count > _MOST_VIRTUAL:
            raise MachineError(
                f"--measured run: {count} virtual devices, threads of this process, would wait for each "
                f"other for minutes. Take at most {_MOST_VIRTUAL}, as in --mesh host=2,gpu=8."
            )
        devices = mesh_of(show_mesh(sizes))
        fits(devices, size, inputs=1, check=False)
        found = measure(schedule, devices, size)
        spans, caveat = found.spans, found.caveat
    else:
        from collc.receipts.profile import read_profile
        from collc.receipts.profile.spans import rebased

        profile = read_profile(source)
        titles = {str(leaf) for leaf in schedule.leaves()}
        runs = [r for r in profile.runs.values() if any(span.title in titles for span in r)]
        chosen = sorted(runs, key=lambda r: max(s.end for s in r))[len(runs) // 2] if runs else ()
        spans = chosen or rebased(profile.spans)
        caveat = f"the median of {len(runs)} runs in {profile.file}" if runs else profile.file
    return [Noted(s.device, s.title, s.round, s.start, s.end) for s in spans], caveat


def _told(outcome: Outcome, noted: Sequence[Noted], source: str) -> None:
    """Raises DataError where nothing that was predicted was measured."""
    predicted = outcome.record.phases if outcome.record else ()
    found = sorted({n.title for n in noted if n.title})
    if predicted and not set(predicted) & set(found):
        raise DataError(
            f"--measured {source}: nothing in it belongs to {', '.join(predicted)}. It has "
            f"{', '.join(found[:5]) or 'no named scopes'}. Profile a run of that schedule."
        )


def _beside(console: Output, outcome: Outcome, noted: Sequence[Noted], caveat: str) -> None:
    console.line()
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("what", "predicted", "measured", "ratio", "rounds measured"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for row in _rows(outcome, noted):
        ratio = row["measured"] / row["predicted"] if row["predicted"] else None
        table.add_row(
            row["what"],
            units.seconds(row["predicted"]),
            units.seconds(row["measured"]),
            "-" if ratio is None else f"{ratio:.3g}",
            str(row["rounds"]),
        )
    console.table(table, whole=True)
    console.line(f"measured: {caveat}")


def _rows(outcome: Outcome, noted: Sequence[Noted]) -> Iterator[dict[str, Any]]:
    """For each leaf from its first beginning to its last end, predicted and measured."""
    record = outcome.record
    assert record is not None
    for title in record.phases:
        visits = record.visits
        own = [
            i
            for i, (job, step) in enumerate(zip(visits.job.tolist(), visits.step.tolist()))
            if record.title(job, step) == title
        ]
        real = [n for n in noted if n.title == title and n.round] or [
            n for n in noted if n.title == title
        ]
        yield {
            "what": title,
            "predicted": float(visits.finish[own].max() - visits.start[own].min()),
            "measured": max((n.end for n in real), default=0.0)
            - min((n.start for n in real), default=0.0),
            "rounds": len([n for n in real if n.device == real[0].device and n.round]),
        }


def as_json(outcome: Outcome, path: Critical | None, noted: Sequence[Noted]) -> dict[str, Any]:
    """The outcome as JSON: seconds; null is never."""

    def when(t: float) -> float | None:
        return None if t == float("inf") else t

    return {
        "what": outcome.title,
        "machine": str(outcome.placement.machine),
        "mesh": dict(outcome.placement.sizes),
        "size": outcome.size,
        "model": outcome.model,
        "faults": [str(f) for f in outcome.faults],
        "without_effect": [str(f) for f in outcome.without_effect],
        "seconds": when(outcome.seconds),
        "finish": [when(t) for t in outcome.finish.tolist()],
        "progress": outcome.progress,
        "stalls": [
            {"rank": s.rank, "what": s.title, "step": s.step, "waits": s.waits, "cause": s.cause,
             "share": s.share}
            for s in outcome.stalls
        ],
        "critical": path and {
            "seconds": dict(path.seconds), "ranks": list(path.ranks), "links": list(path.links),
        },
        "measured": list(_rows(outcome, noted)) if noted else None,
    }  # fmt: skip
