"""Programs in which every rank does the same relative to itself, lowered to values that flow.

What a rank just received is what it sends next, so it is carried as a value: the buffer is only
read, or written once. The loops that a program has marked become loops. Where a message carries
many chunks, `bulk` moves them together.
"""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from collc.analysis.relative import Cell, Messages, Run, Send, messages, run
from collc.language.ir import Program, ranks
from collc.language.states import KINDS
from collc.lowering import bulk
from collc.lowering.loops import Loop, Lowering
from collc.lowering.ranks import Place

Values = list[jax.Array]  # one for each operand


def lower(program: Program, place: Place, xs: Values, spare: Values | None) -> Lowering:
    """Lowers a program all of whose steps are orbits.

    Takes and returns one array for each operand: [n, ...] where the axis is whole, [...] where it
    is a shard. ``spare``: dead buffers [n, ...] that an all_gather may write into.
    """
    steps = messages(program)
    if bulk.pays(steps):
        return bulk.lower(program, place, steps, xs)
    loops = {loop.start: len(loop) for loop in program.loops}
    cells = _Cells(program, place, xs, spare)
    t = number = 0
    while t < len(steps):
        if t in loops:
            found = run(steps[t], loops[t], program.n)
            yield from _looped(program, place, cells, found, steps[t + found.count :], number)
            number += found.count * len(found.first)
            t += found.count
        else:
            _unrolled(place, cells, steps[t], number)
            number += len(steps[t])
            t += 1
    return cells.result()


class _Cells:
    """What the cells hold: buffers, and over them the values that are newer.

    A buffer is [n * k, ...], with the n chunks one after another: seen as [n, k, ...] between two
    loops, XLA would copy it.
    """

    def __init__(self, program: Program, place: Place, xs: Values, spare: Values | None) -> None:
        self.program, self.n, self.place = program, program.n, place
        self.rank = place.before()
        self.values: dict[Cell, Values] = {}
        self.unsaved: set[Cell] = set()
        kind = program.kind
        if kind.before == "shard":
            self.base = [_joined(b) for b in spare or [blank(self.n, x) for x in xs]]
            self.write(0, xs)
        else:
            self.base = [_joined(x) for x in xs]

    def slot(self, distance: jax.Array | int) -> jax.Array:
        """The chunk at a distance, as an index in the buffer."""
        chunk = (self.rank + distance) % self.n
        return jnp.asarray(self.place.names, jnp.int32)[chunk] if self.place.moved else chunk

    def at(self, base: Values, distance: jax.Array | int) -> Values:
        i = self.slot(distance)
        sizes = [b.shape[0] // self.n for b in base]
        return [lax.dynamic_slice_in_dim(b, i * k, k) for b, k in zip(base, sizes, strict=True)]

    def put(self, base: Values, distance: jax.Array | int, values: Values) -> Values:
        i = self.slot(distance)
        return [
            lax.dynamic_update_slice_in_dim(b, v, i * v.shape[0], 0)
            for b, v in zip(base, values, strict=True)
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
            return [self.apart(b) for b in out]
        self.save(self.unsaved.copy())
        return [self.apart(b) for b in self.base]

    def apart(self, base: jax.Array) -> jax.Array:
        """The buffer as its n chunks, [n, k, ...]."""
        return base.reshape(self.n, base.shape[0] // self.n, *base.shape[1:])


def _joined(x: jax.Array) -> jax.Array:
    """[n, k, ...] as [n * k, ...]."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


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


def _live(program: Program, later: Sequence[Messages]) -> set[Cell]:
    """The cells that are still needed before the steps ``later``."""
    after = program.kind.after
    live = {0} if after == "shard" else set(range(program.n))
    for step in reversed(later):
        sends = [send for m in step for send in m.sends]
        live -= {s.write for s in sends if not s.add}
        live |= {s.read for s in sends}
    return live


def _looped(
    program: Program,
    place: Place,
    cells: _Cells,
    run: Run,
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
    if any(stored):
        # Before the loop: after it XLA would have to copy the whole buffer to write into it.
        cells.save(live)
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
