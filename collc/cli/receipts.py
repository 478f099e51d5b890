"""What the commands that print receipts share: their options, and the printing."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from collc.cli.common import Output, print_json
from collc.errors import DataError

if TYPE_CHECKING:
    from collc.receipts.receipt import Receipt

PRINT = "What comes out"

# ---- options ------------------------------------------------------------------------------------

_POD = typer.Option(
    "--pod",
    metavar="GPU:HOSTSxGPUS",
    help="The GPUs: h100:64x8, a100:2x8, gb200-nvl72:36x4, or my/gpu.toml:4x8.",
    show_default=False,
)
Pod = Annotated[str, _POD]
MaybePod = Annotated[str | None, _POD]
Axes = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="AXIS=SIZE,...",
        help="The axes and their sizes, outermost first. Default: a pod's host and gpu.",
        show_default=False,
    ),
]
Hlo = Annotated[
    bool,
    typer.Option(
        "--hlo",
        metavar="",
        help="Print the HLO, with a comment above each collective.",
        rich_help_panel=PRINT,
    ),
]


def one_output(json: bool, hlo: bool) -> None:
    """Raises DataError where both are asked for."""
    if json and hlo:
        raise DataError("--json and --hlo both say what is printed. Drop one of them.")


# ---- printing -----------------------------------------------------------------------------------


def print_receipt(receipt: "Receipt", text: Callable[[], str], *, json: bool, hlo: bool) -> None:
    """Prints the receipt as tables, as JSON, or as comments in ``text()``, the HLO it is of."""
    from collc.receipts.export import annotated, as_json
    from collc.receipts.show import blocks

    if json:
        print_json(as_json(receipt))
    elif hlo:
        print(annotated(receipt, text()), end="")
    else:
        print_parts(blocks(receipt))


def print_parts(parts: Iterable[Table | Text]) -> None:
    """Prints tables and lines, all or, where one cannot be made, none."""
    console = Output()
    for part in list(parts):
        if isinstance(part, Table):
            console.table(part)
        else:
            console.line(part.plain, str(part.style))
