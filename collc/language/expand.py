"""From a leaf and a number of ranks to its program."""

import functools
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from collc.errors import CollcError, ScheduleError
from collc.language.algebra import Leaf, Pass, Relabel
from collc.language.foreign import line_in, reworded, said, short, shown
from collc.language.ir import ALL, MOST_SENDS, Ints, Move, Program, Step, few_enough, integer, ranks
from collc.language.states import KINDS, Kind


def expand(leaf: Leaf, n: int) -> Program:
    """The program of a leaf for n ranks, as if it had not been relabelled (see ``relabelled``).

    Raises ScheduleError where the schedule raises, never ends, or yields something else than
    steps, with the file and line; ProofError where a rank or chunk is out of range.
    """
    if leaf.steps is None:
        raise ScheduleError(f"{leaf} is XLA's own collective: it has no steps of ours")
    given, n = n, integer(n) or 0
    if n < 1:
        raise ScheduleError(f"{leaf}: n is a number of ranks, at least 1, not {shown(given)}")
    name = leaf.name or getattr(leaf.steps, "__name__", "schedule")
    program = _expand(leaf.steps, name, leaf.kind, leaf.chunks, n, leaf.file, leaf.roots)
    for by in leaf.rewrites:
        program = _rewritten(program, by)
    return program


@functools.lru_cache(maxsize=256)
def _rewritten(program: Program, by: Pass) -> Program:
    return by(program)


def most_steps(n: int) -> int:
    """How many steps a schedule may have before it counts as one that never ends."""
    return 64 * n + 1024


@functools.lru_cache(maxsize=256)
def _expand(
    steps: Callable[[int], Any],
    name: str,
    kind: Kind,
    chunks: int | None,
    n: int,
    file: str,
    roots: int,
) -> Program:
    if roots > n:
        raise ScheduleError(
            f"{name} (n = {n}): {roots} roots need as many ranks, and there are {n}. "
            f"Take at most {n}."
        )
    count = n if kind.scatters else chunks or 1
    if not kind.scatters and count * n > MOST_SENDS:
        raise ScheduleError(
            f"{name} (n = {n}): {count:,} chunks on each of {n:,} ranks are more than the "
            f"{MOST_SENDS:,} that fit in memory. Use fewer chunks."
        )
    try:
        free = not kind.scatters and chunks is None
        return _run(steps, name, kind, count, n, file, roots, free)
    except _IntegerChunk:
        return _run(steps, name, kind, n, n, file, roots, free=False)


class _IntegerChunk(Exception):
    """A leaf that may choose its chunks, and seemed to have one, names one by number: it has n."""


def _run(
    steps: Callable[[int], Any],
    name: str,
    kind: Kind,
    chunks: int,
    n: int,
    file: str,
    roots: int,
    free: bool,
) -> Program:
    shown_file = short(file)
    blank = Program(name, kind, n, chunks, (), shown_file, tuple(range(roots)))
    done: list[Step] = []
    line = stored = 0

    def where() -> str:
        place = f", {shown_file}:{line}" if shown_file and line else ""
        return f"{name} (n = {n}), step {len(done)}{place}"

    iterator: Any = None
    try:
        iterator = _iterator(steps(n))
        for yielded, step in enumerate(_whole(iterator)):
            frame = getattr(iterator, "gi_frame", None)
            line = frame.f_lineno if frame else 0
            if yielded >= most_steps(n):  # empty ones count: they may never end either
                raise ScheduleError(
                    f"{where()}: still yielding after {most_steps(n)} steps. "
                    "A schedule has to end; check its loop."
                )
            made = replace(_merge(step, kind, chunks, n, free, where), line=line)
            if made.size:
                # Range before folding: folding would hide an index that NumPy wraps.
                blank.check(made, len(done))
                done.append(blank.folded(made))
                stored += done[-1].size
                few_enough(stored)
    except (_IntegerChunk, KeyboardInterrupt):
        raise
    except CollcError as e:
        line = line_in(file, e) or line
        message = str(e)
        ours = message.startswith(f"{name} (n")
        raise reworded(e, message if ours else f"{where()}: {message}") from e
    except BaseException as e:
        line = line_in(file, e) or line
        raise ScheduleError(
            f"{where()}: the schedule raised {said(e)}. Run it alone, "
            f"list({name}.steps({n})), to see why."
        ) from e
    return replace(blank, steps=tuple(done))


def _iterator(steps: Any) -> Any:
    if not isinstance(steps, Iterable):
        raise ScheduleError(
            f"the schedule returned {shown(steps)}. Say yield before each add(...) or copy(...): "
            "a step that is not yielded is not sent."
        )
    return iter(steps)


def _whole(iterator: Any) -> Generator[Any, None, None]:
    """The same steps; ScheduleError where a generator returns one more at its end."""
    last = yield from iterator
    if last is not None:
        raise ScheduleError(f"the schedule ends with return {shown(last)}. Say yield instead.")


def _merge(
    step: Any, kind: Kind, chunks: int, n: int, free: bool, where: Callable[[], str]
) -> Step:
    """What was yielded, as one step; not checked yet."""
    moves = list(step) if isinstance(step, tuple | list) else [step]
    pairs = kind is KINDS["all_to_all"]
    columns: list[tuple[Any, Ints, Ints, Ints]] = []
    for move in moves:
        if not isinstance(move, Move):
            raise ScheduleError(
                f"{where()}: yielded {shown(move)}. "
                "A step is an add(...) or copy(...), or a tuple of them."
            )
        src, dst, chunk = move.src, move.dst, move.chunk
        if chunk is ALL:
            if pairs:
                raise ScheduleError(
                    f"{where()}: ALL in an all_to_all: name the chunk as (source, destination)"
                )
            few_enough(len(src) * chunks)
            chunk = np.tile(np.arange(chunks), len(src))
            src, dst = np.repeat(src, chunks), np.repeat(dst, chunks)
        elif isinstance(chunk, tuple):
            if not pairs:
                raise ScheduleError(
                    f"{where()}: a pair as chunk in a {kind}: only an all_to_all has those"
                )
            for half in chunk:
                if ((half < 0) | (half >= n)).any():
                    raise ScheduleError(
                        f"{where()}: chunk ({int(chunk[0][0])}, {int(chunk[1][0])}) and its like: "
                        f"source and destination have to be ranks 0 to {n - 1}. Say % n."
                    )
            chunk = chunk[0] * n + chunk[1]
        elif pairs:
            raise ScheduleError(f"{where()}: the chunks of an all_to_all are (source, destination)")
        elif free:
            raise _IntegerChunk
        assert isinstance(chunk, np.ndarray)
        columns.append((np.full(len(src), move.add), chunk, src, dst))
    if not columns:
        empty = np.zeros(0, np.int64)
        return Step(np.zeros(0, bool), empty, empty, empty)
    add, chunk, src, dst = (np.concatenate(column) for column in zip(*columns, strict=True))
    return Step(add, chunk, src, dst)


# ---- relabelling and duals ----------------------------------------------------------------------


def permutation(relabels: Iterable[Relabel], n: int) -> Ints:
    """The new name of each rank after all the relabellings, [n]."""
    names = ranks(n)
    for by in relabels:
        names = by.permutation(n)[names]
    return names


def relabelled(program: Program, names: Ints) -> Program:
    """The program with rank r named ``names[r]``, roots too, and chunks that belong to ranks."""
    n = program.n
    if np.array_equal(names, ranks(n)):
        return program
    if program.kind is KINDS["all_to_all"]:
        s, d = np.divmod(np.arange(n * n), n)
        chunk = names[s] * n + names[d]
    else:
        chunk = names if program.turning else np.arange(program.cells)

    def rename(step: Step) -> Step:
        step = program.dense(step)
        return Step(step.add, chunk[step.chunk], names[step.src], names[step.dst], line=step.line)

    steps = tuple(program.folded(rename(step)) for step in program.steps)
    roots = tuple(names[list(program.roots)].tolist())
    return replace(program, steps=steps, roots=roots, loops=())


def dual(program: Program) -> Program:
    """The transposed program: steps reversed and links turned round.

    A send whose source is dead afterwards becomes a copy, any other an add; a send whose result
    nobody uses is dropped. The chunk (s, d) of an all-to-all becomes (d, s).
    """
    kind = KINDS[program.kind.dual]
    blank = replace(program, kind=kind, steps=(), loops=())
    # Of an orbit, rank 0 stands for all: its cells are named relative to it, in one row.
    orbit, n = program.orbit, program.n
    rows = ranks(1 if orbit else n)
    live = program.held(program.kind.after, rows, np.arange(program.cells)).copy()
    steps: list[Step] = []
    for step in reversed(program.steps):
        if orbit:
            read, write = step.chunk, program.rotate(step.chunk, -step.dst)
            at, to, back = step.src, step.src, -step.dst % n
        else:
            step = program.dense(step)
            read = write = step.chunk
            at, to, back = step.src, step.dst, step.src
        used = live[to, write]
        after = live.copy()
        after[to[~step.add], write[~step.add]] = False
        read, write, at, to, back = (a[used] for a in (read, write, at, to, back))
        stays = after[at, read]
        live = after
        live[at, read] = True
        # Of several sends from a cell that dies, the first back in copies and the others add to it.
        _, first = np.unique(at * program.cells + read, return_index=True)
        leads = np.zeros(len(read), bool)
        leads[first] = True
        late = ~stays & ~leads
        for chosen in (~late, late):
            if chosen.any():
                turned = Step(
                    (stays | late)[chosen],
                    _transposed(program, write[chosen]),
                    to[chosen],
                    back[chosen],
                    orbit,
                    step.line,
                )
                steps.append(blank.folded(turned))
    return replace(blank, steps=tuple(steps))


def _transposed(program: Program, chunk: Ints) -> Ints:
    if program.kind is not KINDS["all_to_all"]:
        return chunk
    s, d = np.divmod(chunk, program.n)
    return d * program.n + s
