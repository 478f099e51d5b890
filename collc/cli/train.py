"""``collc train``: a byte-level language model learns, its gradients reduced by schedules."""

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from collc.analysis.certificate import certify
from collc.analysis.mesh import parse_mesh, show_mesh
from collc.cli.common import LOOP, SECONDS, Debug, Report, files_run, guarded
from collc.cli.devices import Platform, choose_platform, devices_for
from collc.errors import DataError, MeshError, ScheduleError, nearest
from collc.planning.registry import algorithm
from collc.training.fitting.interrupt import Interrupt

if TYPE_CHECKING:
    from collc.training.lm.config import TrainConfig


def _folder(text: str) -> Path:
    if not text.strip():
        raise typer.BadParameter("it is empty: give the name of a folder.")
    return Path(text)


RUN = "The run"
MODEL = "What decides the result"


@guarded
def train(
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS=SIZE,...",
            help="The axes and their sizes, outermost first. Default: host=2,gpu=4.",
            show_default=False,
            rich_help_panel=MODEL,
        ),
    ] = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="AXIS=SCHEDULE",
            help="The schedule of an axis; repeatable. Default: ring for the innermost axis, "
            "tree for others.",
            show_default=False,
            rich_help_panel=MODEL,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="tiny, mini, small or base. Default: small.",
            show_default=False,
            rich_help_panel=MODEL,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Default: 1500, with --demo 400.", show_default=False, rich_help_panel=MODEL
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Examples a step, over all devices. Default: 32.",
            show_default=False,
            rich_help_panel=MODEL,
        ),
    ] = None,
    seq: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Bytes that an example predicts. Default: 128.",
            show_default=False,
            rich_help_panel=MODEL,
        ),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(
            help="The highest learning rate. Default: 0.004.",
            show_default=False,
            rich_help_panel=MODEL,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Default: 0.", show_default=False, rich_help_panel=MODEL),
    ] = None,
    demo: Annotated[
        bool,
        typer.Option("--demo", help="The smaller run of make demo.", rich_help_panel=RUN),
    ] = False,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            parser=_folder,
            help="The folder of a fresh run. Default: a new one in runs/.",
            show_default=False,
            rich_help_panel=RUN,
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            parser=_folder,
            help="Go on with the run in this folder, which knows its options.",
            show_default=False,
            rich_help_panel=RUN,
        ),
    ] = None,
    platform: Annotated[
        Platform | None,
        typer.Option(
            help="cpu: as many virtual devices as the mesh has; default: the devices that jax "
            "finds. Without it: cpu, unless JAX_PLATFORMS is set.",
            show_default=False,
            show_choices=True,
            rich_help_panel=RUN,
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Train a byte-level Transformer on Python's own standard library.

    Gradients are reduced by one schedule for each mesh axis. At the end it prints the loss on
    unseen files beside what counting bytes and pairs achieves, and compares the first steps with
    the same ones under jax.lax.pmean. The run folder holds metrics, the plan and checkpoints.
    Ctrl-C saves, and --resume goes on.
    """
    with Interrupt(starting=True) as interrupt:
        # What needs no jax comes first: jax reads its environment when it is imported or first used.
        words = {"model": model, "steps": steps, "batch": batch, "seq": seq, "lr": lr, "seed": seed}
        given: dict[str, Any] = {name: value for name, value in words.items() if value is not None}
        if mesh is not None:
            given["mesh"] = show_mesh(parse_mesh(mesh))
        schedules = parse_schedules(schedule or [])
        if resume is not None and (run is not None or demo):
            other = "--demo" if demo else "--run"
            raise DataError(
                f"{other} begins a fresh run, and --resume goes on with one. Drop {other}."
            )
        choose_platform(platform)
        config = _config(given, schedules, demo, run, resume)
        if resume is None:
            _proved(config)
        devices_for(parse_mesh(config.mesh))

        from collc.training.lm import train as lm

        try:
            status = lm.train(config, Report(), interrupt=interrupt).exit_status
        except KeyboardInterrupt:  # the second signal; training has said what there is to say
            status = 128 + (interrupt.signal or signal.SIGINT)
    if status:
        raise typer.Exit(status)


def _proved(config: "TrainConfig") -> None:
    """Runs the code of schedule files where it is bounded in time; training finds it proved."""
    sizes = parse_mesh(config.mesh)
    with files_run(SECONDS, LOOP):
        for axis, source in config.schedules.items():
            for _, schedule in algorithm(source).schedules:
                certify(schedule @ axis, sizes)


def parse_schedules(texts: list[str]) -> dict[str, str]:
    """The axes and schedules of ``["gpu=ring", "host=tree"]``. Raises ScheduleError."""
    found: dict[str, str] = {}
    for text in texts:
        axis, equals, schedule = (word.strip() for word in text.partition("="))
        if not equals or not axis.isidentifier() or not schedule:
            raise ScheduleError(
                f"--schedule {text!r}: found no axis with its schedule. Write it as gpu=ring."
            )
        if axis in found:
            raise ScheduleError(f"--schedule gives axis {axis} twice. Drop one.")
        found[axis] = schedule
    return found


def _config(
    given: dict[str, Any],
    schedules: Mapping[str, str],
    demo: bool,
    run: Path | None,
    resume: Path | None,
) -> "TrainConfig":
    """The run's config. What is given for a resumed run is passed on: training compares it."""
    from collc.training.lm import config as configs

    if resume is not None:
        begun = configs.resumed(resume)
        if schedules:
            given["schedules"] = {**begun.schedules, **schedules}
        return configs.resumed(resume, **given)
    plain = configs.TrainConfig()
    axes = list(parse_mesh(given.get("mesh", plain.mesh)))
    for axis in schedules:
        if axis not in axes:
            raise MeshError(
                f"--schedule names axis {axis}, which the mesh {given.get('mesh', plain.mesh)} "
                f"does not have. {nearest(axis, axes)}"
            )
    usual = {axis: "ring" if axis == axes[-1] else "tree" for axis in axes}
    given["schedules"] = {**usual, **schedules}
    given["folder"] = run
    return configs.demo(**given) if demo else configs.TrainConfig(**given)
