"""``collc compile``: a whole train step compiled for a pod that is not there, and its receipt."""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from collc.cli.common import SECONDS, Debug, Json, Output, Timeout, guarded, print_json
from collc.cli.devices import Platform, choose_platform
from collc.cli.given import Against, Given, names
from collc.errors import DataError

if TYPE_CHECKING:
    from collc.cli.attempts import Made
    from collc.receipts.receipt import Receipt

STEP = "The step"
PRINT = "What comes out"

Pod = Annotated[
    str,
    typer.Option(
        "--pod",
        metavar="GPU:HOSTSxGPUS",
        help="h100:64x8, a100:2x8, gb200-nvl72:36x4, or my/gpu.toml:4x8.",
        show_default=False,
    ),
]
Axes = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="AXIS=SIZE,...",
        help="The axes of the pod, outermost first. Default: host and gpu.",
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


@guarded
def compile_step(
    step: Annotated[
        str,
        typer.Argument(
            metavar="STEP",
            help="path/to/file.py:function, with a factory of its shapes beside it; or a model with "
            "its size: transformer:medium.",
            show_default=False,
        ),
    ],
    pod: Pod,
    mesh: Axes = None,
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS=SCHEDULE,...",
            help="A schedule for each axis, or the file of a saved plan. The step is then written per "
            "device; without, it is plain JAX over global arrays.",
            show_default=False,
            rich_help_panel=STEP,
        ),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="The arguments that the plan splits on dimension 0. Default: batch.",
            show_default=False,
            rich_help_panel=STEP,
        ),
    ] = None,
    donate: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="The arguments whose memory the results may take.",
            show_default=False,
            rich_help_panel=STEP,
        ),
    ] = None,
    shapes: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The factory of the arguments' shapes. Default: FUNCTION_shapes, or shapes.",
            show_default=False,
            rich_help_panel=STEP,
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of a model: examples on each GPU. Default: 8.",
            show_default=False,
            rich_help_panel=STEP,
        ),
    ] = None,
    seq: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of a model: tokens that an example predicts. Default: 1024.",
            show_default=False,
            rich_help_panel=STEP,
        ),
    ] = None,
    xla: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A compile option of XLA's; repeatable.",
            show_default=False,
            rich_help_panel=STEP,
        ),
    ] = None,
    against: Annotated[
        Against | None,
        typer.Option(
            metavar="native|blueconnect",
            help="Compile the step also with XLA's own collectives, or with XLA splitting them by "
            "host, and print the two side by side.",
            show_default=False,
            rich_help_panel=PRINT,
        ),
    ] = None,
    json: Json = False,
    hlo: Hlo = False,
    timeout: Timeout = SECONDS,
    debug: Debug = False,
) -> None:
    """Compile a train step for a pod of GPUs that are not there, and print its receipt.

    The receipt says which collectives XLA runs, over which axes, with how many bytes and beside
    which compute, and in what that differs from what the step asked for; then memory, FLOPs and
    bytes on NVLink and the network. No GPU is needed: pip install "collc\\[pods]".

    A step that needs more memory than the GPU has is an error, after its receipt.
    """
    if json and hlo:
        raise DataError("--json and --hlo both say what is printed. Drop one of them.")
    if hlo and against:
        raise DataError(
            "--hlo prints the text of one program, and --against compiles two. Drop one."
        )
    options = {"--batch": batch, "--donate": donate, "--shapes": shapes}
    sizes = {"batch": batch_size, "seq": seq}
    choose_platform(Platform.CPU)
    # Else XLA complains on stderr of a program that is too large, which is what the receipt says.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    named = {option: names(option, text) for option, text in options.items() if text is not None}
    given = Given(step, plan, against, xla or (), named, sizes)
    given.check()
    from collc.receipts.pods import flags

    flags.probe_environment()
    from collc.cli.attempts import Attempts
    from collc.receipts import pods

    where = pods.parse_pod(pod, mesh)
    chosen = flags.parse_options(xla or ())
    flags.check_options(chosen)
    with ExitStack() as stack:
        attempts = Attempts(given, where, chosen, timeout, stack)
        made = {"step": attempts.plain()}
        if against is not None:
            made[str(against)] = attempts.against(against)
    _print(made, json, hlo)
    _fits(made["step"].receipt)


# ---- printing -------------------------------------------------------------------------------------


def _print(made: Mapping[str, "Made"], json: bool, hlo: bool) -> None:
    from collc.receipts.against import side_by_side
    from collc.receipts.export import annotated, as_json
    from collc.receipts.show import blocks

    step = made["step"]
    if json:
        found = {name: as_json(m.receipt) for name, m in made.items()}
        print_json(found["step"] if len(found) == 1 else found)
    elif hlo:
        print(annotated(step.receipt, step.hlo), end="")
    else:
        parts = [(name, m.receipt) for name, m in made.items()]
        show(side_by_side(parts) if len(parts) > 1 else blocks(step.receipt))


def show(parts: Any) -> None:
    """Prints a receipt's tables and lines."""
    from rich.table import Table

    console = Output()
    for part in parts:
        if isinstance(part, Table):
            console.table(part)
        else:
            console.line(part.plain, str(part.style))


def _fits(receipt: "Receipt") -> None:
    from collc.receipts.compare import size

    memory = receipt.memory
    if memory is None or memory.fits:
        return
    assert memory.capacity is not None
    largest = [
        f"  {size(b.bytes)}  {b.dtype}[{','.join(map(str, b.shape))}]  {b.op_name or b.name}"
        for b in receipt.largest
    ]
    gpu = receipt.pod.name if receipt.pod else "device"
    raise DataError(
        f"the step needs {memory.total:,} bytes ({size(memory.total)}) on each {gpu}, which has "
        f"{memory.capacity:,} ({size(memory.capacity)}). Split its arguments over more devices, donate "
        "them, or make the batch smaller. The largest buffers:\n" + "\n".join(largest)
    )
