"""Orbits whose messages carry many chunks, lowered to operations on many rows at once.

The cells of a buffer, cell o being chunk r + o on rank r, are kept as rows. What a message carries
is then the same rows on every rank: as many operations move a thousand chunks as move two.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from collc.analysis.relative import Cell, Message, Messages
from collc.language.ir import Program, ranks
from collc.language.states import KINDS
from collc.lowering.ranks import Place

Values = list[jax.Array]  # one for each operand, [rows, ...]
FEW = 8  # up to so many chunks in a message are faster one by one on CPU, as XLA fuses all of it


def pays(steps: Sequence[Messages]) -> bool:
    """Whether some message carries more than a few chunks."""
    return any(len(message.sends) > FEW for step in steps for message in step)


def lower(program: Program, place: Place, steps: Sequence[Messages], xs: Values) -> Values:
    """Runs the messages of an orbit.

    Takes and returns one array for each operand: [n, ...] where the axis is whole, [...] where it
    is a shard.
    """
    n, rank, rows = program.n, place.before(), _Rows()
    if program.kind.before == "shard":
        rows.write([0], [x[None] for x in xs])
    else:
        rows.write(range(n), xs, _from(place.names, rank))
    number = 0
    for step in steps:
        _exchange(place, rows, step, number)
        number += len(step)
    if program.kind.after == "shard":
        return [x[0] for x in rows.read([0])]
    # In an all-to-all these are the chunks of every source for this rank.
    stride = n if program.kind is KINDS["all_to_all"] else 1
    values, row = rows.joined([stride * o for o in range(n)])
    order = _from(row, n - rank)
    if place.moved:
        order = order[np.argsort(place.names)]
    return [_gathered(x, order) for x in values]


def _from(table: Sequence[int] | np.ndarray, start: jax.Array) -> jax.Array:
    """The table read as a circle, from ``start`` on, which is 0 to its length; int32."""
    return lax.dynamic_slice_in_dim(np.tile(table, 2).astype(np.int32), start, len(table))


@dataclass(frozen=True)
class _Piece:
    """Rows in memory; with ``order``, int32[rows], row i is ``values[order[i]]``."""

    values: Values
    order: jax.Array | None = None

    def take(self, rows: Sequence[int]) -> Values:
        if self.order is None:
            return _taken(self.values, rows)
        # No more than is asked for: a whole buffer in another order would be one more in memory.
        (order,) = _taken([self.order], rows)
        return [_gathered(x, order) for x in self.values]


class _Rows:
    """Where the newest value of each cell lies: in pieces, none of which is written to."""

    def __init__(self) -> None:
        self.pieces: list[_Piece] = []
        self.at: dict[Cell, tuple[int, int]] = {}  # piece and row

    def write(self, cells: Sequence[Cell], values: Values, order: jax.Array | None = None) -> None:
        """Makes the rows of a piece the newest values of these cells."""
        self.at |= {cell: (len(self.pieces), row) for row, cell in enumerate(cells)}
        self.pieces.append(_Piece(values, order))

    def joined(self, cells: Sequence[Cell]) -> tuple[Values, list[int]]:
        """The cells' values in the order in which they lie, and the row of each cell in them."""
        lie = sorted(cells, key=self.at.__getitem__)
        parts = [
            self.pieces[piece].take([row for _, row in where])
            for piece, where in groupby([self.at[cell] for cell in lie], key=lambda at: at[0])
        ]
        values = parts[0]
        if len(parts) > 1:
            values = [jnp.concatenate(each) for each in zip(*parts, strict=True)]
            self.write(lie, values)  # or the next to read them would join them again
        row = {cell: i for i, cell in enumerate(lie)}
        return values, [row[cell] for cell in cells]

    def read(self, cells: Sequence[Cell]) -> Values:
        """The cells' values, in the order of ``cells``."""
        return _taken(*self.joined(cells))


def _exchange(place: Place, rows: _Rows, step: Messages, number: int) -> None:
    # Reads happen before writes.
    held: list[tuple[Message, Values]] = []
    for message in step:
        # The order within a message is free, so take the one in which its chunks lie.
        sends = tuple(sorted(message.sends, key=lambda send: rows.at[send.read]))
        values = rows.read([send.read for send in sends])
        held.append((replace(message, sends=sends), values))
    arrived: list[tuple[Message, Values]] = []
    for k, (message, values) in enumerate(held):
        dst = (ranks(place.n) + message.distance) % place.n
        got = place.send(values, place.names, place.names[dst], f"r{number + k}")
        arrived.append((message, got))
    if place.wire.lossy:
        for message, values in held:
            if copied := _sends(message, add=False):
                cells = [message.sends[j].read for j in copied]
                rows.write(cells, place.kept(_taken(values, copied)))
    # After rounding: what a rank adds to is what it keeps.
    for message, values in arrived:
        if added := _sends(message, add=True):
            cells = [message.sends[j].write for j in added]
            pairs = zip(rows.read(cells), _taken(values, added), strict=True)
            rows.write(cells, [place.combine(own, got) for own, got in pairs])
    for message, values in arrived:
        if copied := _sends(message, add=False):
            rows.write([message.sends[j].write for j in copied], _taken(values, copied))


def _sends(message: Message, add: bool) -> list[int]:
    """Which of the sends are adds, or copies."""
    return [j for j, send in enumerate(message.sends) if send.add == add]


def _taken(values: Values, rows: Sequence[int]) -> Values:
    """Some rows: a slice where they lie at equal distances, else a gather."""
    first, last = rows[0], rows[-1]
    stride = max(rows[1] - first, 1) if len(rows) > 1 else 1
    if list(rows) == list(range(first, last + 1, stride)):
        return [
            x if len(rows) == len(x) else lax.slice_in_dim(x, first, last + 1, stride)
            for x in values
        ]
    return [_gathered(x, jnp.asarray(rows, jnp.int32)) for x in values]


def _gathered(x: jax.Array, index: jax.Array) -> jax.Array:
    """The rows with these indices, each of them once."""
    return x.at[index].get(mode="promise_in_bounds", unique_indices=True)
