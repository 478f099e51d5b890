"""Programs in which ranks do different things, lowered to a buffer and tables of indices."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from collc.analysis.rounds import Round, rounds
from collc.language.ir import Ints, Program
from collc.language.states import KINDS
from collc.lowering.loops import Lowering
from collc.lowering.orbits import Values, blank
from collc.lowering.ranks import Place


@dataclass(frozen=True, eq=False)
class Table:
    """One round. Each rank has ``width`` places for chunks in its message, some of them unused.

    ``src``, ``dst``: the pairs. ``read`` [n, width]: the chunk that a rank sends in each place;
    ``write`` [n, width]: where the one that it receives goes; ``adds`` and ``used`` [n, width]:
    whether a received one is added, and whether there is one; ``copied`` [n, width]: whether the one
    that is sent overwrites at its destination.
    """

    src: Ints
    dst: Ints
    read: Ints
    write: Ints
    adds: NDArray[np.bool_]
    used: NDArray[np.bool_]
    copied: NDArray[np.bool_]


def table(program: Program, round: Round) -> Table:
    """The table of a round."""
    sends = program.dense(round.sends)
    pair = sends.src * program.n + sends.dst
    order = np.lexsort((sends.chunk, pair))
    pairs, start, size = np.unique(pair[order], return_index=True, return_counts=True)
    place = np.arange(len(order)) - np.repeat(start, size)
    n, width = program.n, int(size.max())
    read = np.zeros((n, width), np.int64)
    write = np.zeros((n, width), np.int64)
    adds, used, copied = (np.zeros((n, width), bool) for _ in range(3))
    src, dst = sends.src[order], sends.dst[order]
    read[src, place] = write[dst, place] = sends.chunk[order]
    adds[dst, place] = sends.add[order]
    used[dst, place] = True
    copied[src, place] = ~sends.add[order]
    # Where a rank takes no part, any index does: the same as the others', so that it is static.
    for index, active in ((read, src), (write, dst)):
        idle = np.setdiff1d(np.arange(n), active)
        index[idle] = index[active[0]]
    return Table(pairs // n, pairs % n, read, write, adds, used, copied)


def lower(program: Program, place: Place, xs: Values, spare: Values | None) -> Lowering:
    """Lowers any program; for its ranks as they are named after relabelling.

    Takes and returns one array for each operand: [chunks, ...] where the axis is whole, [...] where
    it is a shard. ``spare``: dead buffers [n, ...] that a gather may write into.
    """
    rank = place.rank()
    buffers = _start(program, rank, xs, spare)
    by_step: dict[int, list[Round]] = {}
    for round in rounds(program):
        by_step.setdefault(round.step, []).append(round)
    number = 0
    for step in by_step.values():
        tables = [table(program, round) for round in step]
        # Reads happen before writes.
        sent = [[_take(t.read, rank, b) for b in buffers] for t in tables]
        arrived = []
        for t, values in zip(tables, sent, strict=True):
            arrived.append(place.send(values, t.src, t.dst, f"r{number}"))
            number += 1
        if place.wire.lossy:
            for t, values in zip(tables, sent, strict=True):
                if t.copied.any():
                    kept = place.kept(values)
                    buffers = [
                        _put(t.read, rank, b, k, _at(t.copied, rank))
                        for b, k in zip(buffers, kept, strict=True)
                    ]
        for t, values in zip(tables, arrived, strict=True):
            buffers = [_receive(place, t, rank, b, v) for b, v in zip(buffers, values, strict=True)]
    return _finish(program, rank, buffers)
    yield  # never reached: it makes this a lowering, one that asks for no loop


def _start(program: Program, rank: jax.Array, xs: Values, spare: Values | None) -> Values:
    if program.kind is KINDS["all_to_all"]:
        # Every rank's chunks have cells of their own: row s holds what source s sends.
        empty = [blank(program.n, x) for x in xs]
        rows = [
            lax.dynamic_update_index_in_dim(b, x, rank, 0) for b, x in zip(empty, xs, strict=True)
        ]
        return [b.reshape(program.cells, *b.shape[2:]) for b in rows]
    if program.kind.before == "shard":
        base = spare or [blank(program.n, x) for x in xs]
        return [
            lax.dynamic_update_index_in_dim(b, x, rank, 0) for b, x in zip(base, xs, strict=True)
        ]
    return xs


def _finish(program: Program, rank: jax.Array, buffers: Values) -> Values:
    if program.kind is KINDS["all_to_all"]:
        n = program.n
        grids = [b.reshape(n, n, *b.shape[1:]) for b in buffers]
        return [lax.dynamic_index_in_dim(g, rank, 1, keepdims=False) for g in grids]
    if program.kind.after == "shard":
        return [lax.dynamic_index_in_dim(b, rank, 0, keepdims=False) for b in buffers]
    return buffers


def _receive(
    place: Place, t: Table, rank: jax.Array, buffer: jax.Array, got: jax.Array
) -> jax.Array:
    """The buffer after a round. Who receives nothing got zeros, which are nothing to a sum only."""
    zeros_do = place.op == "sum" and t.adds[t.used].all() and t.used[t.dst].all()
    used = None if zeros_do or t.used.all() else _at(t.used, rank)
    if t.adds.any():
        total = place.combine(_take(t.write, rank, buffer), got)
        got = total if t.adds[t.used].all() else _where(_at(t.adds, rank), total, got)
    return _put(t.write, rank, buffer, got, used)


def _at(rows: NDArray[np.generic], rank: jax.Array) -> jax.Array:
    """This rank's row of a table, as a constant where all rows are equal."""
    if (rows == rows[0]).all():
        return jnp.asarray(rows[0])
    return jnp.asarray(rows)[rank]


def _whole(index: Ints, size: int) -> bool:
    return index.shape[1] == size and bool((index == np.arange(size)).all())


def _index(index: Ints, rank: jax.Array) -> jax.Array:
    return _at(index.astype(np.int32), rank)


def _take(index: Ints, rank: jax.Array, buffer: jax.Array) -> jax.Array:
    """The chunks of a message, [width, ...]."""
    if _whole(index, len(buffer)):
        return buffer
    if (index == index[0]).all():
        return buffer[index[0]] if len(index[0]) > 1 else buffer[int(index[0, 0])][None]
    if index.shape[1] == 1:
        return lax.dynamic_index_in_dim(buffer, _index(index, rank)[0], 0)
    return jnp.take(buffer, _index(index, rank), axis=0, mode="clip")


def _put(
    index: Ints, rank: jax.Array, buffer: jax.Array, new: jax.Array, used: jax.Array | None
) -> jax.Array:
    """The buffer with the chunks of a message in it, where they are used."""
    if _whole(index, len(buffer)):
        return new if used is None else _where(used, new, buffer)
    where = _index(index, rank)
    if index.shape[1] == 1:
        if used is not None:
            new = _where(used, new, _take(index, rank, buffer))
        return lax.dynamic_update_slice_in_dim(buffer, new, where[0], 0)
    if used is not None:
        where = jnp.where(used, where, len(buffer))  # out of range, so dropped
    return buffer.at[where].set(new, mode="drop")


def _where(mask: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.where(mask.reshape(-1, *[1] * (a.ndim - 1)), a, b)
