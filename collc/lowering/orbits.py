"""Programs in which every rank does the same relative to itself, lowered to values that flow.

What a rank just received is what it sends next, so it is carried as a value: the buffer is only
read, or written once. Cells are named by their distance: o is chunk ``rank + o``. Runs of steps
whose cells move by a constant stride become one loop.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from collc.analysis.rounds import colours
from collc.language.ir import Program, ranks
from collc.language.states import KINDS
from collc.lowering.loops import Loop, Lowering
from collc.lowering.ranks import Place

Values = list[jax.Array]  # one for each operand
Cell = int  # (chunk - rank) mod n; in an all-to-all (source - rank) * n + (destination - rank)


@dataclass(frozen=True)
class Send:
    """One chunk that every rank sends: the cell it reads, and the one that the receiver writes."""

    add: bool
    read: Cell
    write: Cell


@dataclass(frozen=True)
class Message:
    """What every rank sends to the rank at ``distance``, in one round."""

    distance: int
    sends: tuple[Send, ...]


Messages = tuple[Message, ...]


def messages(program: Program) -> list[Messages]:
    """The rounds of each step, in relative cells."""
    steps = []
    for step in program.steps:
        write = program.rotate(step.chunk, -step.dst)
        colour = colours(program, step)
        sends = [
            (int(k), int(d), Send(bool(a), int(r), int(w)))
            for k, d, a, r, w in zip(colour, step.dst, step.add, step.chunk, write, strict=True)
        ]
        steps.append(
            tuple(
                Message(
                    next(d for j, d, _ in sends if j == k),
                    tuple(send for j, _, send in sends if j == k),
                )
                for k in range(int(colour.max(initial=-1)) + 1)
            )
        )
    return steps


def lower(program: Program, place: Place, xs: Values, spare: Values | None) -> Lowering:
    """Lowers a program all of whose steps are orbits.

    Takes and returns one array for each operand: [n, ...] where the axis is whole, [...] where it
    is a shard. ``spare``: dead buffers [n, ...] that an all_gather may write into.
    """
    steps = messages(program)
    cells = _Cells(program, place, xs, spare)
    t = number = 0
    while t < len(steps):
        run = _run(program, steps[t:])
        if run is not None:
            yield from _rolled(program, place, cells, run, steps[t + run.count :], number)
            number += run.count * len(run.first)
            t += run.count
        else:
            _unrolled(place, cells, steps[t], number)
            number += len(steps[t])
            t += 1
    return cells.result()


class _Cells:
    """What the cells hold: buffers [n, ...], and over them the values that are newer."""

    def __init__(self, program: Program, place: Place, xs: Values, spare: Values | None) -> None:
        self.program, self.n, self.place = program, program.n, place
        self.rank = place.rank()
        if place.moved:
            self.rank = jnp.asarray(np.argsort(place.names), jnp.int32)[self.rank]
        self.values: dict[Cell, Values] = {}
        self.unsaved: set[Cell] = set()
        kind = program.kind
        if kind.before == "shard":
            self.base = spare or [blank(self.n, x) for x in xs]
            self.write(0, xs)
        else:
            self.base = xs

    def slot(self, distance: jax.Array | int) -> jax.Array:
        """The chunk at a distance, as an index in the buffer."""
        chunk = (self.rank + distance) % self.n
        return jnp.asarray(self.place.names, jnp.int32)[chunk] if self.place.moved else chunk

    def at(self, base: Values, distance: jax.Array | int) -> Values:
        i = self.slot(distance)
        return [lax.dynamic_index_in_dim(b, i, 0, keepdims=False) for b in base]

    def put(self, base: Values, distance: jax.Array | int, values: Values) -> Values:
        i = self.slot(distance)
        return [
            lax.dynamic_update_index_in_dim(b, v, i, 0) for b, v in zip(base, values, strict=True)
        ]

    def read(self, cell: Cell) -> Values:
        if cell not in self.values:
            self.values[cell] = self.at(self.base, cell)
        return self.values[cell]

    def write(self, cell: Cell, values: Values) -> None:
        self.values[cell] = values
        self.unsaved.add(cell)

    def save(self, cells: Iterable[Cell]) -> None:
        """Writes the newer values of some cells to the buffer."""
        for cell in sorted(self.unsaved & set(cells)):
            self.base = self.put(self.base, cell, self.values[cell])
            self.unsaved.discard(cell)

    def result(self) -> Values:
        kind = self.program.kind
        if kind.after == "shard":
            return self.read(0)
        if kind is KINDS["all_to_all"]:
            # Own chunk stays where it is; the one from the rank at a distance has moved to its slot.
            out = self.base
            for cell in sorted(c for c in self.values if c % self.n == 0 and c):
                out = self.put(out, cell // self.n, self.values[cell])
            return out
        self.save(self.unsaved.copy())
        return self.base


def blank(n: int, x: jax.Array) -> jax.Array:
    """Zeros [n, ...] with the type that x has on the mesh."""
    return jnp.broadcast_to(jnp.zeros_like(x)[None], (n, *x.shape))


def _unrolled(place: Place, cells: _Cells, step: Messages, number: int) -> None:
    # Reads happen before writes, and in an all-to-all a cell's buffer is only ever read.
    held = {send.read: cells.read(send.read) for m in step for send in m.sends}
    lossy = place.wire.lossy
    arrived: list[tuple[Send, Values]] = []
    for k, message in enumerate(step):
        dst = (ranks(cells.n) + message.distance) % cells.n
        parts = [held[send.read] for send in message.sends]
        joined = parts[0] if len(parts) == 1 else [jnp.stack(p) for p in zip(*parts, strict=True)]
        got = place.send(joined, place.names, place.names[dst], f"r{number + k}")
        for j, send in enumerate(message.sends):
            arrived.append((send, got if len(parts) == 1 else [g[j] for g in got]))
    if lossy:
        for send, _ in arrived:
            if not send.add:
                cells.write(send.read, place.kept(held[send.read]))
    # After rounding: what a rank adds to is what it keeps.
    own = {s.write: cells.read(s.write) for m in step for s in m.sends if s.add}
    for send, values in arrived:
        if send.add:
            own[send.write] = [
                place.combine(a, b) for a, b in zip(own[send.write], values, strict=True)
            ]
            cells.write(send.write, own[send.write])
    for send, values in arrived:
        if not send.add:
            cells.write(send.write, values)


# ---- rolling ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """``count`` steps like the first, where send j's cells move by ``strides[j]`` each time.

    Every send is of what it received in the step before.
    """

    count: int
    first: Messages
    strides: tuple[int, ...]

    def writes(self, n: int) -> list[list[Cell]]:
        sends = [m.sends[0] for m in self.first]
        return [
            [(send.write + s * i) % n for i in range(self.count)]
            for send, s in zip(sends, self.strides, strict=True)
        ]


def _run(program: Program, steps: Sequence[Messages]) -> _Run | None:
    """The longest run at the beginning, or None where fewer than two steps are alike."""
    n, first = program.n, steps[0]
    if program.kind is KINDS["all_to_all"] or any(len(m.sends) != 1 for m in first):
        return None
    # Sent on in the next step: the cell that is read moves as the one that was written.
    strides = tuple(-m.distance % n for m in first)
    count = 1
    while count < len(steps) and _alike(first, steps[count], strides, count, n):
        count += 1
    # Cells of different sends must not meet, nor may a send come back to a cell.
    while count > 1:
        cells = [c for cs in _Run(count, first, strides).writes(n) for c in cs]
        reads = [m.sends[0].read for m in first]
        if len(set(cells + reads)) == len(cells) + len(reads):
            return _Run(count, first, strides)
        count -= 1
    return None


def _alike(first: Messages, step: Messages, strides: Sequence[int], i: int, n: int) -> bool:
    return len(step) == len(first) and all(
        len(b.sends) == 1
        and a.distance == b.distance
        and a.sends[0].add == b.sends[0].add
        and (a.sends[0].read + s * i) % n == b.sends[0].read
        for a, b, s in zip(first, step, strides, strict=True)
    )


def _live(program: Program, later: Sequence[Messages]) -> set[Cell]:
    """The cells that are still needed before the steps ``later``."""
    after = program.kind.after
    live = {0} if after == "shard" else set(range(program.n))
    for step in reversed(later):
        sends = [send for m in step for send in m.sends]
        live -= {s.write for s in sends if not s.add}
        live |= {s.read for s in sends}
    return live


def _rolled(
    program: Program,
    place: Place,
    cells: _Cells,
    run: _Run,
    later: Sequence[Messages],
    number: int,
) -> Lowering:
    n = program.n
    sends = [m.sends[0] for m in run.first]
    writes = run.writes(n)
    live = _live(program, later)
    # The last value of each send stays a value; the others go to the buffer if anyone needs them.
    stored = [bool(live & set(w[:-1])) for w in writes]
    cells.save(c for w in writes for c in w)
    carried = []
    for send in sends:
        value = cells.read(send.read)
        if place.wire.lossy and not send.add:
            value = place.kept(value)
            cells.write(send.read, value)
        carried.append(value)
    constant = cells.base
    rounds = f"r{number}-{number + run.count * len(run.first) - 1}"

    def body(i: jax.Array, carry: tuple[list[Values], Values]) -> tuple[list[Values], Values]:
        values, base = carry
        readable = base or constant
        out, puts = [], []
        for message, send, stride, value in zip(run.first, sends, run.strides, values, strict=True):
            dst = (ranks(n) + message.distance) % n
            got = place.send(value, place.names, place.names[dst], rounds)
            where = send.write + _signed(stride, n) * i
            if send.add:
                own = cells.at(readable, where)
                got = [place.combine(a, b) for a, b in zip(own, got, strict=True)]
            out.append(got)
            puts.append((where, got))
        if base:
            for (where, got), store in zip(puts, stored, strict=True):
                base = cells.put(base, where, got) if store else base
        return out, base

    start = (carried, constant if any(stored) else [])
    values, base = yield Loop(run.count, body, start)
    cells.base = base or constant
    for w, value, store in zip(writes, values, stored, strict=True):
        for cell in w:
            cells.values.pop(cell, None)
            cells.unsaved.discard(cell)
        cells.values[w[-1]] = value
        if not store:
            cells.unsaved.add(w[-1])


def _signed(stride: int, n: int) -> int:
    return stride - n if stride > n // 2 else stride
