"""The command line: ``collc list``, ``show``, ``verify``, ``train``. One module for each command.

Nothing but ``train`` loads jax.
"""

import importlib.metadata
import inspect
import io
import os
import platform
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from collc.cli import common, listing, show, train, verifying

app = typer.Typer(
    name="collc",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _examples(*lines: str) -> str:
    """The end of a help text; paragraphs, since all else is joined to one line by some typers."""
    return "\n\n".join(["Examples:", *(f"[bold]{line}[/bold]" for line in lines)])


def _add(name: str, command: Callable[..., None], *examples: str) -> None:
    # The docstring's paragraphs unwrapped, so that they fit any terminal.
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    app.command(name, help=text, epilog=_examples(*examples))(command)


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
    "train",
    train.train,
    "collc train --demo",
    "collc train --mesh gpu=8 --schedule gpu=ring --steps 500 --run runs/mine",
    "collc train --resume runs/mine",
)


def _version(asked: bool) -> None:
    if asked:
        found = (f"{name} {importlib.metadata.version(name)}" for name in ("collc", "jax"))
        typer.echo(f"{', '.join(found)}, python {platform.python_version()}")
        raise typer.Exit


@app.callback(epilog=_examples("collc list", "collc show ring.all_reduce --mesh gpu=8"))
def collc(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print versions and leave."
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
