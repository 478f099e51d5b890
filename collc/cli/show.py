"""``collc show``: a schedule's program, step by step."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text

from collc.analysis.certificate import Certificate, program_of, verify
from collc.analysis.mesh import parse_mesh
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
from collc.cli.verifying import as_json
from collc.language.algebra import Beside, Leaf, Schedule, Staggered, Then
from collc.language.expand import permutation, relabelled
from collc.language.ir import Program, Step
from collc.language.library import find
from collc.language.printing import lines, show_step
from collc.language.states import KINDS


@guarded
def show(
    schedule: Named,
    mesh: Mesh,
    json: Json = False,
    timeout: Timeout = SECONDS,
    debug: Debug = False,
) -> None:
    """Print a schedule's program: who sends which chunk to whom, step by step.

    Where every rank does the same relative to itself, g stands for the rank; else the sends are
    listed. The program has been proved: one that is wrong is refused, with the steps at fault.
    """
    sizes = parse_mesh(mesh)
    with files_run(timeout):
        what = placed(find(schedule), sizes, schedule)
        certificate = verify(what, **sizes)
        programs = [(leaf, _program(leaf, certificate)) for leaf in what.leaves()]
    if json:
        leaves = [_leaf(leaf, program) for leaf, program in programs]
        print_json({"certificate": as_json(certificate), "leaves": leaves})
        return
    console = Output()
    first, *rest = str(certificate).splitlines()
    console.line(first, "bold")
    for line in rest:
        console.line(line)
    own = dict(programs)
    for title, leaf in _sections(what.normal):
        if leaf is None:
            console.line(f"  {title}", "dim")
            continue
        program = own[leaf]
        console.print(Text(f"  {leaf}", "cyan"), soft_wrap=True)
        if program is None:
            console.line(f"        XLA's own {leaf.facing}: trusted, its steps are not ours")
        elif not program.steps:
            console.line("        nothing to send")
        else:
            for line in lines(program):
                console.line(f"  {line}")


def _sections(s: Schedule) -> Iterator[tuple[str, Leaf | None]]:
    """The leaves in order, with titles before what is side by side."""
    match s:
        case Leaf():
            yield "", s
        case Then(parts=parts):
            for part in parts:
                yield from _sections(part)
        case Staggered(parts=parts):
            yield f"{len(parts)} slices, each a stage of this chain behind the one before:", None
            yield from _sections(parts[0])
        case Beside(parts=parts):
            for i, part in enumerate(parts):
                yield f"part {i + 1} of {len(parts)}, side by side:", None
                yield from _sections(part)


def _program(leaf: Leaf, certificate: Certificate) -> Program | None:
    if leaf.native:
        return None
    program = program_of(leaf, dict(certificate.sizes))
    return relabelled(program, permutation(leaf.relabels, program.n))


def _leaf(leaf: Leaf, program: Program | None) -> Mapping[str, Any]:
    """A leaf as JSON: every send of every rank, as [verb, chunk, from, to]."""
    known = {"leaf": str(leaf), "axes": list(leaf.axes), "collective": leaf.facing.name}
    if program is None:
        return {**known, "native": True}
    steps = [
        {"text": show_step(program, step), "line": step.line, "sends": _sends(program, step)}
        for step in program.steps
    ]
    size = {"ranks": program.n, "chunks": program.chunks, "roots": list(program.roots)}
    return {**known, "native": False, **size, "file": program.file, "steps": steps}


def _sends(program: Program, step: Step) -> list[list[Any]]:
    dense = program.dense(step)
    chunks: list[Any] = dense.chunk.tolist()
    if program.kind is KINDS["all_to_all"]:
        chunks = [list(divmod(c, program.chunks)) for c in chunks]
    verbs = ["add" if a else "copy" for a in dense.add.tolist()]
    return [list(s) for s in zip(verbs, chunks, dense.src.tolist(), dense.dst.tolist())]
