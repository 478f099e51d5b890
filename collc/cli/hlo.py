"""``collc hlo``: the receipt of any HLO dump."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from collc.analysis.mesh import parse_mesh
from collc.cli.common import Debug, Json, guarded
from collc.cli.devices import Platform, choose_platform
from collc.cli.receipts import Axes, Hlo, MaybePod, one_output, print_receipt
from collc.errors import HloError


@guarded
def hlo(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="Optimised HLO text: of compiled.as_text(), or the after_optimizations.txt of "
            "--xla_dump_to. - is standard input.",
            show_default=False,
        ),
    ],
    mesh: Axes = None,
    pod: MaybePod = None,
    json: Json = False,
    annotate: Hlo = False,
    debug: Debug = False,
) -> None:
    """Print the receipt of an HLO text: its collectives, and what runs beside them.

    Neither devices nor the program are needed. Without a mesh, groups are shown by their sizes; a pod
    adds bytes on NVLink and the network. What the program asked for, its memory and its compile time
    are not in the text.
    """
    one_output(json, annotate)
    text = _read(file)
    choose_platform(Platform.CPU)
    from collc.receipts.pods import parse_pod
    from collc.receipts.reading import receipt

    if pod is not None:
        over = parse_pod(pod, mesh)
    else:
        over = None if mesh is None else parse_mesh(mesh)
    try:
        print_receipt(receipt(text, mesh=over), lambda: text, json=json, hlo=annotate)
    except HloError as e:
        raise HloError(f"{_name(file)}: {e}") from e


def _name(file: str) -> str:
    return "standard input" if file == "-" else file


def _read(file: str) -> str:
    """The text of a file. Raises HloError where it is none."""
    path = Path(file)
    if file == "-" and sys.stdin is None:
        raise HloError("standard input is closed. Name a file.")
    if file != "-" and path.is_dir():
        raise HloError(
            f"{file} is a folder. Name one file in it: those that end in .txt hold HLO text."
        )
    try:
        found = sys.stdin.buffer.read() if file == "-" else path.read_bytes()
    except FileNotFoundError:
        raise HloError(f"there is no file {file}. Check its path.") from None
    except ValueError as e:  # a NUL in the name
        raise HloError(f"{file!r} cannot be a file: {e}.") from None
    name = _name(file)
    try:
        text = found.decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise HloError(
            f"{name} is binary, and collc reads HLO as text. Take compiled.as_text(), or the "
            "after_optimizations.txt of --xla_dump_to."
        )
    if not text.strip():
        raise HloError(f"{name} is empty. Take all of compiled.as_text().")
    return text
