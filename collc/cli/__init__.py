"""The command line: a module for each command.

``list``, ``show``, ``verify``, ``cost``, ``scale`` and the help of all commands never load jax.
"""

import importlib.metadata
import inspect
import io
import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from collc.cli import (
    bench,
    common,
    compiling,
    doctor,
    hlo,
    launching,
    listing,
    planning,
    pricing,
    scaling,
    show,
    timelines,
    train,
    verifying,
)


class _Help:
    """Help without ``<bool>`` and braces, and with the examples in lines, whatever the typer."""

    examples: Sequence[str] = ()

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # pyright: ignore[reportAttributeAccessIssue]
        if option is not None:
            option.metavar = ""
        return option

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = super().collect_usage_pieces(ctx)  # pyright: ignore[reportAttributeAccessIssue]
        return [piece.strip("{}") for piece in pieces]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)  # pyright: ignore[reportAttributeAccessIssue]
        console = common.Output()
        console.line(" Examples:")
        for line in self.examples:
            console.line(f"   {line}", "bold")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)  # pyright: ignore[reportAttributeAccessIssue]
        except Exception as e:
            message = getattr(e, "message", None)
            if isinstance(message, str) and "unexpected extra argument" in message:
                e.message = f"{message}. Quote the expression."  # pyright: ignore
            raise


class _Group(_Help, TyperGroup):
    examples = ("collc list", "collc show ring.all_reduce --mesh gpu=8")


app = typer.Typer(
    cls=_Group,
    name="collc",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _add(
    name: str, command: Callable[..., None], *examples: str, settings: dict[str, Any] | None = None
) -> None:
    # The docstring's paragraphs unwrapped, so that they fit any terminal.
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    cls = type("_Command", (_Help, TyperCommand), {"examples": examples})
    app.command(name, cls=cls, help=text, context_settings=settings)(command)


_add("list", listing.list_schedules, "collc list", "collc list --mesh gpu=8")
_add(
    "show",
    show.show,
    "collc show ring.all_reduce --mesh gpu=8",
    'collc show "server.shards(4)" --mesh gpu=8',
    "collc show my/ring.py:all_reduce --mesh gpu=8 --json",
)
_add(
    "verify",
    verifying.verify,
    "collc verify ring.all_reduce --mesh gpu=8",
    'collc verify "ring.reduce_scatter @ gpu >> tree.all_reduce @ host >> ring.all_gather @ gpu" '
    "--mesh host=4,gpu=8",
    "collc verify my/ring.py:all_reduce --mesh gpu=8 --json",
)
_add(
    "cost",
    pricing.cost,
    "collc cost ring.all_reduce --machine dgx-h100 --size 64MiB",
    'collc cost \'hierarchical("host", "gpu")\' --machine dgx-h100:4 --size 1G',
    'collc cost my/ring.py:mine --machine "gpus=8 link=25GB/s,3us" --mesh gpu=8 --size 4K --json',
)
_add(
    "scale",
    scaling.scaling,
    "collc scale --machine dgx-h100 --compute 120ms --parameters 350M",
    "collc scale --machine dgx-h100 --receipt receipt.json --overlap 0.3",
    "collc scale --machine ethernet --compute 40ms --parameters 350M --devices 8,64,512 -s ring --json",
)
_add(
    "plan",
    planning.plan,
    "collc plan --machine dgx-h100:4 --mesh host=4,gpu=8 --size 64MiB",
    "collc plan --machine dgx-h100:4 --mesh host=4,gpu=8 --collective all_to_all",
    "collc plan --machine dgx-h100:4 --mesh host=4,gpu=8 --plan gpu=ring,host=tree --save plan.txt",
)
_add(
    "trace",
    timelines.trace,
    "collc trace ring.all_reduce --machine dgx-h100 --size 64MiB -o ring.svg -o ring.json",
    'collc trace ring.all_reduce --machine dgx-h100 --size 64MiB --fault "slow rank 3 x2"',
    "collc trace --plan gpu=ring,host=tree --machine dgx-h100:4 --size 1G --compute 120ms --buckets 8",
    "collc trace ring.all_reduce --machine pcie-8 --size 4M --measured run",
)
_add(
    "bench",
    bench.bench,
    "collc bench --mesh gpu=8",
    "collc bench --mesh host=2,gpu=4 -s ring.all_reduce -s tree.all_reduce --axis gpu -b 4K -e 1M",
    "collc bench --mesh gpu=8 -s ring.all_gather --json --plot out.png",
)
_add(
    "train",
    train.train,
    "collc train --demo",
    "collc train --mesh gpu=8 --schedule gpu=ring --steps 500 --run runs/mine",
    "collc train --resume runs/mine",
)
_add(
    "launch",
    launching.launch,
    "collc launch --hosts 4 --devices-per-host 2 -- python train.py",
    "collc launch --hosts 2 --max-restarts 3 -- python train.py",
    settings=launching.SETTINGS,
)
_add(
    "doctor",
    doctor.doctor,
    "collc doctor",
    "collc launch --hosts 4 -- collc doctor",
    "collc doctor --links --json",
)
_add(
    "compile",
    compiling.compile_step,
    "collc compile examples/pod_step.py:train_step --pod h100:2x8 --plan gpu=ring,host=tree",
    "collc compile transformer:medium --pod h100:512x8 --plan gpu=ring,host=tree --against native",
    "collc compile my/step.py:step --pod gb200-nvl72:36x4 --mesh data=2,model=72 --donate state",
)
_add(
    "hlo",
    hlo.hlo,
    "collc hlo after_optimizations.txt",
    "collc hlo after_optimizations.txt --mesh host=64,gpu=8",
    "collc hlo - --json",
)


def _version(asked: bool) -> None:
    if asked:
        found = (f"{name} {importlib.metadata.version(name)}" for name in ("collc", "jax"))
        typer.echo(f"{', '.join(found)}, python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def collc(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            metavar="",
            callback=_version,
            is_eager=True,
            help="Print versions and leave.",
        ),
    ] = False,
    debug: common.Debug = False,
) -> None:
    """Collective schedules for JAX: proved, priced, and compiled into Flax train steps.

    Each command has examples: collc verify --help
    """
    common.debug_from_here(debug)


def main() -> None:
    """The console script. Leaves with 0, 1 (an error), 2 (wrong usage), 130 (Ctrl-C)."""
    # Closed by the shell: written to all the same, by print and by libraries.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # never fail over a letter
    try:
        app(prog_name="collc")
    except KeyboardInterrupt:
        os._exit(common.INTERRUPTED)
    except SystemExit as e:
        if any(thread.is_alive() for thread in common.left_behind):
            sys.stderr.flush()
            os._exit(e.code if isinstance(e.code, int) else 0)
        raise
