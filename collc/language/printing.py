"""Schedules and programs as text. Says the shortest true thing."""

import numpy as np

from collc.language.algebra import (
    Beside,
    Dual,
    Leaf,
    Placed,
    Relabelled,
    Reversed,
    Schedule,
    Staggered,
    Then,
    Through,
    show_axes,
)
from collc.language.ir import Program, Step
from collc.language.states import KINDS


def text(s: Schedule) -> str:
    """The schedule as ``collc.parse`` reads it: names where there are any, else the expression."""
    return _text(s, 0)


# Python's own precedence: a method call, then @, then >>, then |.
_OR, _THEN, _AT, _CALL = 1, 2, 3, 4


def _text(s: Schedule, outer: int) -> str:
    if s.name and not isinstance(s, Leaf):
        return s.name
    match s:
        case Leaf():
            name = s.name or f"<{getattr(s.steps, '__name__', 'leaf')}>"
            calls = [
                "reversed()" if isinstance(by, Dual) else f"through({by})" for by in s.rewrites
            ]
            name = ".".join([name, *map(str, s.relabels), *calls])
            return _wrap(f"{name} @ {show_axes(s.axes)}", _AT, outer) if s.axes else name
        case Placed(inner=inner, on=axes):
            return _wrap(f"{_text(inner, _CALL)} @ {show_axes(axes)}", _AT, outer)
        case Relabelled(inner=inner, by=by):
            return f"{_text(inner, _CALL)}.{by}"
        case Reversed(inner=inner):
            return f"{_text(inner, _CALL)}.reversed()"
        case Through(inner=inner, by=by):
            return f"{_text(inner, _CALL)}.through({by})"
        case Staggered(parts=parts):
            return f"{_text(parts[0], _CALL)}.through(Pipeline({len(parts)}))"
        case Then(parts=parts):
            return _wrap(" >> ".join(_text(p, _THEN + 1) for p in parts), _THEN, outer)
        case Beside(parts=parts):
            return _wrap(" | ".join(_text(p, _OR + 1) for p in parts), _OR, outer)
    raise TypeError(f"not a schedule: {s!r}")


def _wrap(inside: str, precedence: int, outer: int) -> str:
    return f"({inside})" if precedence < outer else inside


# ---- programs -----------------------------------------------------------------------------------


def lines(program: Program) -> list[str]:
    """A line for each step or loop: relative to a rank g where all ranks do alike, else the edges."""
    loops = {loop.start: loop for loop in program.loops}
    shown, t = [], 0
    while t < len(program.steps):
        step, loop = program.steps[t], loops.get(t, range(t, t + 1))
        if t in loops:
            each = [_relative(program, step, i, loop=True) for i in range(step.size)]
            shown.append(f"{t:4d}  {'    '.join(each)}    t = 0 to {len(loop) - 1}")
        else:
            shown.append(f"{t:4d}  {show_step(program, step)}")
        t = loop.stop
    return shown


def show_step(program: Program, step: Step, most: int = 16) -> str:
    """One line for a step; of a long list of edges the first ``most``."""
    if step.orbit:
        return "    ".join(_relative(program, step, i) for i in range(step.size))
    shown = "    ".join(
        f"{_verb(step, i)} {_chunk(program, int(step.chunk[i]))}  "
        f"{int(step.src[i])} -> {int(step.dst[i])}"
        for i in range(min(step.size, most))
    )
    return shown + (f"    ... {step.size - most} more" if step.size > most else "")


def around(program: Program, t: int) -> str:
    """The steps about step t, that one marked."""
    shown = range(max(0, t - 2), min(len(program.steps), t + 2))
    return "\n".join(
        f"{'>' if i == t else ' '} {i:4d}  {show_step(program, program.steps[i])}" for i in shown
    )


def _verb(step: Step, i: int) -> str:
    return "add" if step.add[i] else "copy"


def _relative(program: Program, step: Step, i: int, loop: bool = False) -> str:
    n = program.n
    cell, d = int(step.chunk[i]), int(step.dst[i])
    if not program.turning:
        chunk = _chunk(program, cell)
    elif program.kind is KINDS["all_to_all"]:
        chunk = "c[" + ", ".join(_offset("g", x, n) for x in divmod(cell, n)) + "]"
    else:
        # In a loop a rank sends on what it has just received.
        stride = _offset("", -d % n, n)
        moves = f"{stride[0] if stride in ('+1', '-1') else stride}t" if loop else ""
        chunk = f"c[{_offset('g', cell, n)}{moves}]"
    return f"{_verb(step, i)} {chunk}  g -> {_offset('g', d, n)}"


def _offset(name: str, by: int, n: int) -> str:
    by = by - n if by > n // 2 else by
    return name if by == 0 else f"{name}{by:+d}"


def _chunk(program: Program, cell: int) -> str:
    if program.kind is KINDS["all_to_all"]:
        return f"c[{', '.join(str(int(x)) for x in np.divmod(cell, program.chunks))}]"
    return f"c[{cell}]"
