"""``collc hlo``: the receipt of any HLO dump."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from collc.analysis.mesh import parse_mesh
from collc.cli.common import Debug, Json, guarded, print_json
from collc.cli.compiling import Axes, Hlo, show
from collc.cli.devices import Platform, choose_platform
from collc.errors import DataError, HloError


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
    pod: Annotated[
        str | None,
        typer.Option(
            "--pod",
            metavar="GPU:HOSTSxGPUS",
            help="The pod that it is for, as h100:64x8: adds bytes on NVLink and the network.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    annotate: Hlo = False,
    debug: Debug = False,
) -> None:
    """Print the receipt of an HLO text: its collectives, and what runs beside them.

    Neither devices nor the program are needed. Without a mesh, groups are shown by their sizes. What
    the program asked for, its memory and its compile time are not in the text.
    """
    if json and annotate:
        raise DataError("--json and --hlo both say what is printed. Drop one of them.")
    text = _read(file)
    choose_platform(Platform.CPU)
    from collc.receipts.export import annotated, as_json
    from collc.receipts.pods import parse_pod
    from collc.receipts.reading import receipt
    from collc.receipts.show import blocks

    if pod is not None:
        over = parse_pod(pod, mesh)
    else:
        over = None if mesh is None else parse_mesh(mesh)
    name = "standard input" if file == "-" else file
    try:
        found = receipt(text, mesh=over)
        parts = list(blocks(found))
    except HloError as e:
        raise HloError(f"{name}: {e}") from e
    if json:
        print_json(as_json(found))
    elif annotate:
        print(annotated(found, text), end="")
    else:
        show(parts)


def _read(file: str) -> str:
    """The text of a file. Raises HloError where it is none."""
    path = Path(file)
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
    name = "standard input" if file == "-" else file
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
