"""What a schedule is, once the number of ranks is known: arrays of sends.

    program ::= step*                        one after another
    step    ::= { send, ... }                all at once: reads happen before writes
    send    ::= (add | copy) chunk : rank -> rank
    rank    ::= coordinate on an axis        3
    chunk   ::= coordinate in the buffer     c, or ALL; for all-to-all (source, destination)

A chunk keeps its name wherever it travels. The chunk (s, d) of an all-to-all is stored as s * n + d.
"""

import hashlib
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from collc.errors import ProofError, ScheduleError
from collc.language import states
from collc.language.foreign import shown
from collc.language.states import KINDS, Kind

Ints = NDArray[np.int64]
MOST_SENDS = 1 << 25  # of one step, or stored of a program: about a gigabyte


class _All:
    """Every chunk of the buffer. A sentinel, never an index."""

    def __repr__(self) -> str:
        return "ALL"


ALL: Final = _All()


def ranks(n: int) -> Ints:
    """The ranks 0, 1, ..., n - 1, as an int64 array of shape [n].

    >>> ranks(3)
    array([0, 1, 2])
    """
    return np.arange(n, dtype=np.int64)


def integer(value: Any) -> int | None:
    """The value as an int where it is an integer, also one of NumPy; None for all else, bools too.

    >>> integer(np.int64(4)), integer(True), integer(4.0)
    (4, None, None)
    """
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


@dataclass(frozen=True, eq=False)
class Move:
    """What ``add`` and ``copy`` return: sends of one verb, as int64 arrays of one shape [m]."""

    add: bool
    chunk: Ints | tuple[Ints, Ints] | _All
    src: Ints
    dst: Ints


def add(chunk: Any, src: Any, dst: Any) -> Move:
    """Send ``chunk`` from rank ``src`` to rank ``dst``, which combines it with its own.

    Integers or integer arrays that broadcast together; ``chunk`` may be ``ALL``, or a pair
    (source, destination) in an all-to-all. Raises ScheduleError for anything else.
    """
    return _move(True, chunk, src, dst)


def copy(chunk: Any, src: Any, dst: Any) -> Move:
    """Send ``chunk`` from rank ``src`` to rank ``dst``, where it overwrites. Arguments as ``add``."""
    return _move(False, chunk, src, dst)


def _move(is_add: bool, chunk: Any, src: Any, dst: Any) -> Move:
    names = ["src", "dst"]
    values = [src, dst]
    if isinstance(chunk, tuple):
        if len(chunk) != 2:
            raise ScheduleError(
                f"a chunk is an integer, ALL, or a pair (source, destination), not {shown(chunk)}"
            )
        names += ["chunk source", "chunk destination"]
        values += list(chunk)
    elif not isinstance(chunk, _All):
        names.append("chunk")
        values.append(chunk)
    arrays = [_integers(name, value) for name, value in zip(names, values, strict=True)]
    try:
        shape = np.broadcast_shapes(*(a.shape for a in arrays))
    except ValueError:
        shapes = ", ".join(f"{k} {a.shape}" for k, a in zip(names, arrays, strict=True))
        raise ScheduleError(
            f"{'add' if is_add else 'copy'}: shapes do not broadcast: {shapes}"
        ) from None
    few_enough(math.prod(shape))
    arrays = [np.broadcast_to(a, shape).reshape(-1) for a in arrays]
    match arrays:
        case [s, d, c]:
            return Move(is_add, c, s, d)
        case [s, d, c0, c1]:
            return Move(is_add, (c0, c1), s, d)
        case _:
            return Move(is_add, ALL, arrays[0], arrays[1])


def few_enough(sends: int) -> None:
    """Raises ScheduleError for more sends in a step, or in a program, than fit."""
    if sends > MOST_SENDS:
        raise ScheduleError(
            f"{sends:,} sends are more than the {MOST_SENDS:,} that fit in memory. "
            "Use fewer chunks or ranks."
        )


def _integers(name: str, value: Any) -> Ints:
    array = np.asarray(value)
    if array.size == 0:
        return array.astype(np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise ScheduleError(
            f"{name} has to be an integer or an array of integers, not {shown(value)} ({array.dtype})"
        )
    return array.astype(np.int64)


@dataclass(frozen=True, eq=False)
class Step:
    """Sends that happen at once, as arrays of one shape [m]: ``add`` bool, the others int64.

    With ``orbit`` only the sends of rank 0 are stored: rank r does the same, every rank shifted by
    r, and every chunk too where chunks belong to ranks. ``line`` is that of the ``yield``.
    """

    add: NDArray[np.bool_]
    chunk: Ints
    src: Ints
    dst: Ints
    orbit: bool = False
    line: int = 0

    @property
    def size(self) -> int:
        return len(self.src)

    def pick(self, chosen: NDArray[np.bool_]) -> "Step":
        """Some of its sends."""
        return replace(
            self,
            add=self.add[chosen],
            chunk=self.chunk[chosen],
            src=self.src[chosen],
            dst=self.dst[chosen],
        )


def joined(steps: Sequence[Step]) -> Step:
    """The sends of several steps, none of them an orbit, at once; at the line of the first."""
    chunk, src, dst = (
        np.concatenate([getattr(step, name) for step in steps]) for name in ("chunk", "src", "dst")
    )
    return Step(np.concatenate([step.add for step in steps]), chunk, src, dst, line=steps[0].line)


@dataclass(frozen=True, eq=False)
class Program:
    """Sends for n ranks. Checks itself: ranks and chunks in range, no send to oneself.

    ``chunks`` is the number of chunks of a rank's whole buffer: n where chunk c belongs to rank c,
    or k * n where each of those is cut in k. An all-to-all has n * chunks coordinates, since every
    rank has its own. ``loops``: ranges of steps that differ by a constant stride only, and may be
    lowered to loops. ``roots``: at which rank each of so many equal parts of the buffer is while an
    axis is in the state root. ``name``, ``file`` and ``Step.line`` are for messages only.
    """

    name: str
    kind: Kind
    n: int
    chunks: int
    steps: tuple[Step, ...]
    file: str = ""
    roots: tuple[int, ...] = (0,)
    loops: tuple[range, ...] = ()

    def __str__(self) -> str:
        from collc.language.printing import lines

        return "\n".join(lines(self))

    def __post_init__(self) -> None:
        if self.chunks % len(self.roots) or not all(0 <= r < self.n for r in self.roots):
            raise ProofError(
                f"{self.name} (n = {self.n}): the roots {self.roots} of {self.chunks} chunks have to "
                f"be ranks 0 to {self.n - 1}, and to divide the chunks."
            )
        for t, step in enumerate(self.steps):
            self.check(step, t)

    def check(self, step: Step, t: int) -> None:
        """Raises ProofError where the step, the program's t-th, is out of range or sends to itself."""
        for what, values, size in (
            ("rank", step.src, self.n),
            ("rank", step.dst, self.n),
            ("chunk", step.chunk, self.cells),
        ):
            bad = (values < 0) | (values >= size)
            if bad.any():
                raise ProofError(
                    f"{self._place(step, t)}: {what} {int(values[bad][0])} is out of range: "
                    f"there are {what}s 0 to {size - 1}. NumPy would wrap it round; say % n."
                )
        own = step.src == step.dst
        if own.any():
            raise ProofError(
                f"{self._place(step, t)}: rank {int(step.src[own][0])} sends to itself. "
                "Drop the send."
            )

    @property
    def cells(self) -> int:
        """The number of chunk coordinates."""
        return self.n * self.chunks if self.kind is KINDS["all_to_all"] else self.chunks

    @cached_property
    def starts(self) -> NDArray[np.bool_]:
        """Which (rank, cell) holds something before the first step, [n, cells]."""
        return self.held(self.kind.before, ranks(self.n), np.arange(self.cells))

    @cached_property
    def ends(self) -> NDArray[np.bool_]:
        """Which (rank, cell) has to be finished after the last step, [n, cells]."""
        return self.held(self.kind.after, ranks(self.n), np.arange(self.cells))

    def held(self, state: str, rank: Ints, cell: Ints) -> NDArray[np.bool_]:
        """Which of some ranks hold which of some cells in a state, [ranks, cells]."""
        r, c = rank[:, None], cell[None, :]
        match state:
            case states.PARTIAL | states.REPLICA:
                return np.ones((len(rank), len(cell)), bool)
            case states.ROOT:
                return np.asarray(self.roots)[c * len(self.roots) // self.chunks] == r
            case states.SHARD:
                return c * self.n // self.chunks == r
            case states.OUTBOX:
                return c // self.chunks == r
            case states.INBOX:
                return c % self.chunks * self.n // self.chunks == r
        raise ValueError(state)

    @property
    def turning(self) -> bool:
        """Whether chunks belong to ranks, so that rotating the ranks rotates the chunks."""
        return self.chunks == self.n and len(self.roots) == 1

    @property
    def orbit(self) -> bool:
        """Whether every rank does in every step the same, relative to itself."""
        return self.turning and all(step.orbit for step in self.steps)

    def where(self, t: int) -> str:
        """``name (n = 4), step 2, file.py:17``: the beginning of every message about step t."""
        return self._place(self.steps[t], t)

    def _place(self, step: Step, t: int) -> str:
        place = f", {self.file}:{step.line}" if self.file and step.line else ""
        return f"{self.name} (n = {self.n}), step {t}{place}"

    def rotate(self, chunk: Ints, by: Any) -> Ints:
        """The chunk that ``chunk`` becomes when every rank moves up by ``by``."""
        if not self.turning:
            return chunk + 0 * by
        if self.kind is KINDS["all_to_all"]:
            s, d = np.divmod(chunk, self.n)
            return (s + by) % self.n * self.n + (d + by) % self.n
        return (chunk + by) % self.n

    def dense(self, step: Step) -> Step:
        """The step with the sends of every rank, orbit by orbit, in the order of the source."""
        if not step.orbit:
            return step
        r = ranks(self.n)[None, :]
        chunk = self.rotate(step.chunk[:, None], r)
        return Step(
            np.broadcast_to(step.add[:, None], chunk.shape).reshape(-1),
            chunk.reshape(-1),
            ((step.src[:, None] + r) % self.n).reshape(-1),
            ((step.dst[:, None] + r) % self.n).reshape(-1),
            line=step.line,
        )

    def dense_steps(self) -> Iterator[Step]:
        return (self.dense(step) for step in self.steps)

    def folded(self, step: Step) -> Step:
        """The step stored as an orbit where it is one, else as it is."""
        n, m = self.n, step.size
        if step.orbit or n == 1 or m == 0 or m % n:
            return step
        chunk, dst = self.rotate(step.chunk, -step.src), (step.dst - step.src) % n
        key = (chunk * n + dst) * 2 + step.add
        if m == n and (key == key[0]).all():
            first = np.array([0])
            whole = np.array_equal(np.sort(step.src), ranks(n))
        else:
            order = np.lexsort((step.src, key))
            first = np.sort(order[::n])
            whole = bool(
                (key[order].reshape(-1, n) == key[order[::n], None]).all()
                and (step.src[order].reshape(-1, n) == ranks(n)).all()
            )
        if not whole:
            return step
        zeros = np.zeros(len(first), np.int64)
        return Step(step.add[first], chunk[first], zeros, dst[first], orbit=True, line=step.line)

    @cached_property
    def digest(self) -> str:
        """A SHA-256 of what the program does; names, places and loops do not count."""
        roots = " ".join(map(str, self.roots))
        h = hashlib.sha256(f"{self.kind.name} {self.n} {self.chunks} {roots}".encode())
        for step in self.steps:
            h.update(f"\n{step.size} {step.orbit}".encode())
            for array in (step.add.astype(np.int64), step.chunk, step.src, step.dst):
                h.update(np.ascontiguousarray(array).tobytes())
        return h.hexdigest()
