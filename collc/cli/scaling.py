"""``collc scale``: how a train step scales with the number of devices, schedule by schedule."""

import json as jsons
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

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
from collc.errors import DataError, MachineError
from collc.language.ir import integer
from collc.machine import units
from collc.machine.scaling.growing import machines
from collc.machine.scaling.scale import SCHEDULES, scale
from collc.machine.scaling.study import Point, Study
from collc.machine.scaling.table import explain
from collc.machine.scaling.work import UTILISATION, Work, work

STEP = "The step"
_LEAST = 1024  # bytes of gradients


@guarded
def scaling(
    machine: Machine,
    compute: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Forward and backward of a device, as 120ms; of all the work, if --strong.",
            show_default=False,
            rich_help_panel=STEP,
        ),
    ] = None,
    parameters: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="The gradients that are all-reduced, as they travel: 350M, 64MiB.",
            show_default=False,
            rich_help_panel=STEP,
        ),
    ] = None,
    receipt: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What collc compile --json has printed: both are taken from it.",
            show_default=False,
            rich_help_panel=STEP,
        ),
    ] = None,
    utilisation: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help=f"What a GPU reaches of its peak on the receipt's FLOPs. Default: {UTILISATION}.",
            show_default=False,
            rich_help_panel=STEP,
        ),
    ] = None,
    overlap: Annotated[
        float,
        typer.Option(
            metavar="SHARE", help="The share of the compute that can hide communication, 0 to 1."
        ),
    ] = 0.0,
    strong: Annotated[
        bool, typer.Option("--strong", metavar="", help="Share a fixed batch out: compute / n.")
    ] = False,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="N,...", help="How many devices. Default: 8 to 4,096.", show_default=False
        ),
    ] = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            "--schedule",
            "-s",
            metavar="SCHEDULE",
            help=f"An all-reduce; repeatable. Default: {', '.join(SCHEDULES)}.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    timeout: Timeout = SECONDS,
    debug: Debug = False,
) -> None:
    """Price a data-parallel train step on more and more hosts of one kind.

    Step time, speed-up, efficiency, share of communication, and from where to where each schedule wins.
    XLA's own collective is always among them. What lies beyond twice the number of devices up to which
    prices were compared with logs is marked, and is a range. Nothing is timed.
    """
    counts = None if devices is None else _numbers(devices)
    with files_run(timeout):
        step = None
        if receipt is not None:
            step = _receipt(receipt, machine, utilisation, compute, parameters)
            seconds, size = step.compute, step.parameters
        else:
            seconds, size = _given(compute, parameters, utilisation)
        study = scale(
            machine, seconds, size, counts, named(schedule), overlap=overlap, strong=strong
        )
    if json:
        print_json(as_json(study, step))
        return
    console = Output()
    if step is not None:
        console.line(f"{receipt}: {step.flops:.3g} FLOP a device, {units.size(size)} reduced")
        for note in step.notes:
            console.line(f"  note: {note}", "yellow")
    for line in explain(study).splitlines():
        console.line(line)


def _given(
    compute: str | None, parameters: str | None, utilisation: float | None
) -> tuple[float, float]:
    if compute is None or parameters is None:
        raise MachineError(
            "a step is --compute 120ms --parameters 350M, or --receipt FILE. "
            f"{'Neither is' if compute is parameters is None else 'One of the two is not'} said."
        )
    if utilisation is not None:
        raise MachineError(
            "--utilisation turns a receipt's FLOPs into time. Drop it, or --compute."
        )
    size = units.parse_size(parameters)
    if size < _LEAST:
        raise MachineError(
            f"--parameters {parameters}: {size} bytes are no model. Say the bytes of its gradients: "
            "those of 7 billion parameters in bfloat16 are 14G."
        )
    return units.parse_time(compute), size


def _receipt(
    path: Path,
    machine: str,
    utilisation: float | None,
    compute: str | None,
    parameters: str | None,
) -> Work:
    for name, value in (("--compute", compute), ("--parameters", parameters)):
        if value is not None:
            raise MachineError(f"{name} and --receipt say the same. Drop one of them.")
    try:
        found = jsons.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise DataError(f"receipt {path}: {e.strerror or e}.") from e
    except (ValueError, RecursionError) as e:
        raise DataError(f"receipt {path}: not JSON: {e}. Write one: collc compile --json.") from e
    gpu = machines(machine)(1).gpu
    try:
        return work(found, gpu, UTILISATION if utilisation is None else utilisation)
    except DataError as e:
        raise DataError(f"receipt {path}: {e}") from e


def _numbers(text: str) -> list[int]:
    words = [word.strip().replace("_", "") for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 8 for word in words):
        raise MachineError(f"--devices {text}: give numbers between commas, as in 8,64,512.")
    return [integer(int(word)) or 0 for word in words]


def named(schedules: list[str] | None) -> dict[str, str] | None:
    """The schedules that were asked for, by a name of the default ones or by their own text."""
    if schedules is None:
        return None
    return {text: SCHEDULES.get(text, text) for text in schedules}


# ---- json ---------------------------------------------------------------------------------------


def as_json(study: Study, step: Work | None = None) -> dict[str, Any]:
    """A study as JSON can hold it. Seconds and bytes; every figure is a range, of no width if sure."""
    return {
        "machine": study.machine,
        "strong": study.strong,
        "compute": study.compute,
        "parameters": study.parameters,
        "overlap": study.overlap,
        "calibrated_devices": study.calibrated,
        "receipt": step and asdict(step),
        "schedules": {name: str(schedule) for name, schedule in study.schedules.items()},
        "devices": [
            {
                "devices": n,
                "best": study.at(n)[0].schedule,
                "ties": list(study.ties(n)),
                "steps": [_point(point) for point in study.at(n)],
            }
            for n in study.devices
        ],
        "wins": {name: [asdict(r) for r in study.reigns(name)] for name in study.schedules},
        "left_out": [asdict(x) for x in study.left_out],
    }


def _point(point: Point) -> dict[str, Any]:
    return {
        "schedule": point.schedule,
        "abstract": point.abstract,
        "error": point.error,
        "extrapolated": point.extrapolated,
        "low": asdict(point.low),
        "high": asdict(point.high),
    }
