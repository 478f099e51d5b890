"""``collc verify``: what is proved of a schedule on a mesh."""

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from collc.analysis.certificate import Certificate, counted, share
from collc.analysis.certificate import verify as prove
from collc.analysis.mesh import parse_mesh, show_mesh
from collc.cli.common import (
    SECONDS,
    Debug,
    Json,
    Mesh,
    Named,
    Output,
    Timeout,
    files_run,
    guarded,
    placed,
    print_json,
)
from collc.language import states
from collc.language.library import find


@guarded
def verify(
    schedule: Named,
    mesh: Mesh,
    json: Json = False,
    timeout: Timeout = SECONDS,
    debug: Debug = False,
) -> None:
    """Prove a schedule on a mesh and print its certificate.

    A schedule that does not do what its type says is refused, with exit status 1. Bytes are exact
    fractions of S, a rank's whole buffer; bounds are those of any schedule for that collective.
    """
    sizes = parse_mesh(mesh)
    with files_run(timeout):
        certificate = prove(placed(find(schedule), sizes, schedule), **sizes)
    if json:
        print_json(as_json(certificate))
        return
    console = Output()
    console.line(str(certificate.schedule), "bold")
    table = Table(
        box=box.SIMPLE, show_header=False, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0)
    )
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(overflow="fold")
    for name, value in _rows(certificate, sizes):
        table.add_row(name, Text(value))
    console.table(table)


def as_json(c: Certificate) -> dict[str, Any]:
    """The certificate as JSON can hold it: fractions of S as text, such as "7/4"."""

    def fraction(value: Fraction | None) -> str | None:
        return None if value is None else str(value)

    bound = c.bound and {
        "steps": c.bound.steps,
        "sent": fraction(c.bound.sent),
        "received": fraction(c.bound.received),
    }
    return {
        "schedule": str(c.schedule),
        "mesh": dict(c.sizes),
        "type": {a: {"before": b, "after": e} for a, (b, e) in _signature(c).items()},
        "steps": c.steps,
        "rounds": c.rounds,
        "sent": fraction(c.sent),
        "received": fraction(c.received),
        "bound": bound or None,
        "gap": fraction(c.gap),
        "depth": c.depth,
        "consistent": c.consistent,
        "consistent_with_narrow_wire": c.narrow,
        "trusted": list(c.trusted),
        "digest": c.digest,
    }


def _signature(c: Certificate) -> dict[str, tuple[str, str]]:
    """The states of each axis before and after, in the order of the mesh."""
    found = c.schedule.type.signature()
    return {axis: found[axis] for axis, _ in c.sizes}


def _rows(c: Certificate, mesh: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    signature = _signature(c)
    kind = c.schedule.collective
    yield "type", ", ".join(f"{axis}: {b} -> {a}" for axis, (b, a) in signature.items())
    yield "collective", kind.name if kind else "not one: it differs by axis"
    count = math.prod(size for _, size in c.sizes)
    yield "mesh", f"{show_mesh(dict(c.sizes))} ({counted(count, 'rank')})"
    others = {axis: size for axis, size in mesh.items() if axis not in signature}
    if others:
        yield "batch axes", f"{show_mesh(others)}, which the schedule does not name"
    if c.trusted:
        yield "steps", f"{c.steps}, a trusted leaf counted as one"
        yield "rounds", f"{c.rounds} and those of the trusted leaves"
    else:
        least = f", at least {c.bound.steps} with one port" if c.bound else ""
        yield "steps", f"{c.steps}{least}"
        yield "rounds", f"{c.rounds}"
    yield "most sent", _bytes(c.sent, c.bound and c.bound.sent)
    yield "most received", _bytes(c.received, c.bound and c.bound.received)
    unknown = "unknown, since XLA's own part is"
    additions = "" if c.depth is None else f"{counted(c.depth, 'addition')} in a chain"
    yield "rounding depth", additions or unknown
    if all(after != states.REPLICA for _, after in signature.values()):
        yield "consistent", "yes, nothing is replicated"
    else:
        yield "consistent", _agree(c.consistent, unknown)
        yield "  narrow wire", _agree(c.narrow, unknown)
    yield "trusted", ", ".join(c.trusted) or "nothing: all of it is proved"
    yield "digest", c.digest


def _bytes(found: Fraction | None, bound: Fraction | None) -> str:
    if found is None:
        return "unknown, since XLA's own part is"
    shown = share(found)
    if found.denominator > 1:
        shown += f" = {float(found):.4g} S"
    if bound is None:
        return f"{shown} by a rank"
    if found == bound:
        return f"{shown}, the lower bound"
    if not bound:
        return f"{shown}, lower bound 0"
    gap = found / bound
    times = f"{gap} = {float(gap):.4g}" if gap.denominator > 1 else str(gap)
    return f"{shown}, lower bound {share(bound)}, gap {times}"


def _agree(value: bool | None, unknown: str) -> str:
    if value is None:
        return unknown
    if value:
        return "yes, all replicas end with the same bits"
    return "no, replicas may differ in the last bit: refused for training state"
