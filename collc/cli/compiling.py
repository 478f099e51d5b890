"""``collc compile``: a whole train step compiled for a pod that is not there, and its receipt."""

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from collc.cli.common import SECONDS, Debug, Json, Timeout, guarded, print_json
from collc.cli.devices import Platform, choose_platform
from collc.cli.receipts import PRINT, Axes, Hlo, Pod, one_output, print_parts, print_receipt
from collc.cli.request import Against, Request, factory, names
from collc.errors import DataError

if TYPE_CHECKING:
    from collc.receipts.receipt import Receipt

STEP = "The step"


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
    split: Annotated[
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
    one_output(json, hlo)
    if hlo and against:
        raise DataError(
            "--hlo prints the text of one program, and --against compiles two. Drop one."
        )
    choose_platform(Platform.CPU)
    # Else XLA complains on stderr of a program that is too large, which is what the receipt says.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    request = Request(
        step=step,
        plan=plan,
        against=against,
        xla=tuple(xla or ()),
        split=None if split is None else names("--split", split),
        donate=() if donate is None else names("--donate", donate),
        shapes=None if shapes is None else factory(shapes),
        batch_size=batch_size,
        seq=seq,
    )
    request.check()
    from collc.receipts.pods import flags

    flags.probe_environment()
    from collc.cli.compiler import Compiler
    from collc.receipts import pods

    where = pods.parse_pod(pod, mesh)
    chosen = flags.parse_options(request.xla)
    flags.check_options(chosen)
    with ExitStack() as stack:
        compiler = Compiler(request, where, chosen, timeout, stack)
        own = compiler.own()
        other = None if against is None else compiler.other(against)
    if against is None or other is None:
        print_receipt(own.receipt, own.hlo, json=json, hlo=hlo)
    else:
        _print_both({"step": own.receipt, str(against): other.receipt}, json)
    _fits(own.receipt)


def _print_both(receipts: "dict[str, Receipt]", json: bool) -> None:
    from collc.receipts.against import side_by_side
    from collc.receipts.export import as_json

    if json:
        print_json({name: as_json(receipt) for name, receipt in receipts.items()})
    else:
        print_parts(side_by_side(list(receipts.items())))


def _fits(receipt: "Receipt") -> None:
    from collc.receipts.measures import size

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
