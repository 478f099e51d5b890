"""The proof of a program: an abstract interpretation of what every (rank, chunk) holds.

Each cell holds the set of addends in it, as a bit mask, and beside it a hash of the tree in which
they were added (up to commutativity, never associativity) and the depth of that tree. Chunks are
independent, so they are taken in blocks; where every step is invariant under rotation, the chunks
of one orbit prove all.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from collc.analysis.rounds import colours
from collc.errors import ProofError
from collc.language import states
from collc.language.ir import Ints, Program, Step, ranks
from collc.language.states import KINDS

BLOCK_BYTES = 1 << 26


@dataclass(frozen=True)
class Proof:
    """What was found on the way. ``sent`` and ``received`` count chunks, for each rank.

    ``consistent``: all that a finished chunk is at ends with the same bits. ``narrow``: also where
    what travels is narrower than the sums; a rank that copies a chunk out keeps it rounded too.
    """

    steps: int
    rounds: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    chunk: Fraction
    depth: int
    consistent: bool
    narrow: bool


def prove(program: Program) -> Proof:
    """Proves that the program does what its kind says, or raises ProofError."""
    coloured = [colours(program, step) for step in program.steps]
    depth, consistent, narrow = 0, True, True
    for block in _blocks(program):
        state = _State(program, block)
        for t, sends in enumerate(_within(program, block, coloured)):
            state.step(t, *sends)
        state.finish()
        depth = max(depth, int(state.depth[state.ends].max(initial=0)))
        consistent &= state.consistent(state.tree)
        narrow &= state.consistent(state.rounded)
    sent, received = _traffic(program)
    return Proof(
        steps=len(program.steps),
        rounds=sum(int(c.max(initial=-1)) + 1 for c in coloured),
        sent=tuple(sent.tolist()),
        received=tuple(received.tolist()),
        chunk=Fraction(1, program.chunks),
        depth=depth,
        consistent=consistent,
        narrow=narrow,
    )


def _traffic(program: Program) -> tuple[Ints, Ints]:
    """Chunks sent and received by each rank."""
    sent, received = np.zeros(program.n, np.int64), np.zeros(program.n, np.int64)
    for step in program.steps:
        if step.orbit:
            sent += step.size
            received += step.size
        else:
            sent += np.bincount(step.src, minlength=program.n)
            received += np.bincount(step.dst, minlength=program.n)
    return sent, received


def _blocks(program: Program) -> Iterator[Ints]:
    """The chunks that have to be looked at, in blocks whose masks fit in BLOCK_BYTES."""
    if program.orbit:
        # One of each orbit: chunk 0, or the chunks (0, d) of an all-to-all.
        cells = np.arange(program.cells // program.n)
    else:
        cells = np.arange(program.cells)
    each = program.n * _words(program) * 8
    size = max(1, BLOCK_BYTES // each)
    for start in range(0, len(cells), size):
        yield cells[start : start + size]


def _words(program: Program) -> int:
    return -(-program.n // 64) if program.kind.before == states.PARTIAL else 1


Sends = tuple[Step, Ints]  # the sends of a step within a block, and their rounds


def _within(program: Program, block: Ints, coloured: list[Ints]) -> Iterator[Sends]:
    whole = len(block) == program.cells
    for step, colour in zip(program.steps, coloured, strict=True):
        if program.orbit:
            # The member of the orbit whose chunk is the one that stands for it.
            cell = step.chunk
            by = -(cell // program.n if program.kind is KINDS["all_to_all"] else cell)
            chunk = program.rotate(cell, by)
            chosen = (chunk >= block[0]) & (chunk <= block[-1])
            src, dst = by % program.n, (step.dst + by) % program.n
        else:
            dense = program.dense(step)
            colour = np.repeat(colour, program.n) if step.orbit else colour
            chunk, src, dst, step = dense.chunk, dense.src, dense.dst, dense
            if whole:
                yield dense, colour
                continue
            chosen = (chunk >= block[0]) & (chunk <= block[-1])
        yield (
            Step(step.add[chosen], chunk[chosen], src[chosen], dst[chosen], line=step.line),
            colour[chosen],
        )


class _State:
    """What the cells of a block of chunks hold: masks [n, block, words], trees, depths [n, block]."""

    def __init__(self, program: Program, block: Ints) -> None:
        self.program, self.block = program, block
        n, words = program.n, _words(program)
        held = program.held(program.kind.before, ranks(n), block)
        self.ends = program.held(program.kind.after, ranks(n), block)
        self.mask = np.zeros((n, len(block), words), np.uint64)
        if program.kind.before == states.PARTIAL:
            r = ranks(n)
            bit = np.uint64(1) << (r % 64).astype(np.uint64)
            self.mask[r, :, r // 64] = bit[:, None]
            self.full = np.bitwise_or.reduce(self.mask[:, 0], axis=0)
            self.tree = np.broadcast_to(
                _mix(r.astype(np.uint64) + np.uint64(1))[:, None], held.shape
            ).copy()
        else:
            self.mask[held] = 1
            self.full = np.ones(1, np.uint64)
            self.tree = np.ones(held.shape, np.uint64)
        self.rounded = self.tree.copy()
        # Whether the value in ``rounded`` went through the narrow type since its last addition.
        self.cast = np.zeros(held.shape, bool)
        self.depth = np.zeros(held.shape, np.int32)

    def step(self, t: int, sends: Step, colour: Ints) -> None:
        add, src, dst = sends.add, sends.src, sends.dst
        c = sends.chunk - self.block[0]
        if not len(c):
            return
        mask = self.mask[src, c]
        empty = ~mask.any(axis=1)
        if empty.any():
            i = int(np.argmax(empty))
            self.refuse(
                t, f"rank {src[i]} sends {self.chunk(c[i])}, which it does not hold",
                "Send it only after it has arrived, or from a rank that has it.",
            )  # fmt: skip
        self.races(t, add, c, dst)
        tree, depth = self.tree[src, c], self.depth[src, c]
        sent = np.where(self.cast[src, c], self.rounded[src, c], _mix(~self.rounded[src, c]))
        # A rank that copies a chunk out keeps the rounded value that it sends.
        out = ~add
        self.rounded[src[out], c[out]] = sent[out]
        self.cast[src[out], c[out]] = True
        for k in range(int(colour.max()) + 1):
            now = (colour == k) & add
            if now.any():
                self.sums(
                    t, src[now], dst[now], c[now], mask[now], tree[now], sent[now], depth[now]
                )
        to = (dst[out], c[out])
        self.mask[to], self.tree[to], self.depth[to] = mask[out], tree[out], depth[out]
        self.rounded[to], self.cast[to] = sent[out], True

    def races(self, t: int, add: NDArray[np.bool_], c: Ints, dst: Ints) -> None:
        if add.all():
            return
        cell = dst * len(self.block) + c
        _, index, times = np.unique(cell, return_inverse=True, return_counts=True)
        raced = ~add & (times[index] > 1)
        if raced.any():
            i = int(np.argmax(raced))
            self.refuse(
                t, f"two writes race for {self.chunk(c[i])} at rank {dst[i]}, one of them a copy",
                "Put them in different steps, or make both add.",
            )  # fmt: skip

    def sums(
        self, t: int, src: Ints, dst: Ints, c: Ints, mask: NDArray[np.uint64],
        tree: NDArray[np.uint64], sent: NDArray[np.uint64], depth: NDArray[np.int32],
    ) -> None:  # fmt: skip
        own = self.mask[dst, c]
        absent = ~own.any(axis=1)
        if absent.any():
            i = int(np.argmax(absent))
            self.refuse(
                t, f"rank {dst[i]} adds {self.chunk(c[i])} from rank {src[i]} to nothing: "
                "it does not hold the chunk", "Use copy.",
            )  # fmt: skip
        twice = own & mask
        _, index, times = np.unique(
            dst * len(self.block) + c, return_inverse=True, return_counts=True
        )
        double = twice.any(axis=1) | (times[index] > 1)
        if double.any():
            i = int(np.argmax(double))
            common = twice[i] if twice[i].any() else mask[i]
            self.refuse(
                t, f"rank {dst[i]} adds {self.chunk(c[i])} from rank {src[i]}, "
                f"but {self.addends(common)} would be counted twice",
                "Drop the send, or copy instead.",
            )  # fmt: skip
        self.mask[dst, c] = own | mask
        self.tree[dst, c] = _mix(self.tree[dst, c] + tree)
        self.rounded[dst, c] = _mix(self.rounded[dst, c] + sent)
        self.cast[dst, c] = False
        self.depth[dst, c] = np.maximum(self.depth[dst, c], depth) + 1

    def finish(self) -> None:
        kind = self.program.kind
        bad = self.ends & (self.mask != self.full).any(axis=2)
        if not bad.any():
            return
        r, c = (int(i[0]) for i in np.nonzero(bad))
        found = self.mask[r, c]
        t = len(self.program.steps) - 1
        if not found.any():
            what = f"rank {r} does not hold {self.chunk(c)}"
        else:
            what = f"{self.chunk(c)} at rank {r} lacks {self.addends(self.full & ~found)}"
        done = np.nonzero((self.mask[:, c] == self.full).all(axis=1))[0]
        where = f" (it is complete at rank {_some(done)})" if len(done) else ""
        self.refuse(
            t, f"at the end {what}{where}",
            f"{'An' if kind.name.startswith('a') else 'A'} {kind} has to leave {kind.after}: "
            f"{_MEANS[kind.after]}.",
        )  # fmt: skip

    def consistent(self, tree: NDArray[np.uint64]) -> bool:
        first = np.argmax(self.ends, axis=0)
        same = tree == tree[first, np.arange(len(self.block))][None]
        return bool((same | ~self.ends).all())

    def chunk(self, c: int) -> str:
        cell = int(self.block[c])
        if self.program.kind is KINDS["all_to_all"]:
            s, d = divmod(cell, self.program.chunks)
            return f"chunk ({s}, {d})"
        return f"chunk {cell}"

    def addends(self, mask: NDArray[np.uint64]) -> str:
        if self.program.kind.before != states.PARTIAL:
            return "it"
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        return f"the addend of rank {_some(np.nonzero(bits)[0])}"

    def refuse(self, t: int, found: str, remedy: str) -> None:
        from collc.language.printing import around

        program = self.program
        place = program.where(t) if program.steps else f"{program.name} (n = {program.n})"
        context = around(program, t) if program.steps else "  no steps"
        raise ProofError(f"{place}: {found}. {remedy}\n{context}")


_MEANS = {
    states.REPLICA: "every rank holds every chunk, with the addends of all ranks",
    states.SHARD: "rank c holds chunk c, finished",
    states.ROOT: "the root of every chunk holds it, finished",
    states.INBOX: "rank r holds the chunks (., r)",
}


def _some(items: Ints, most: int = 8) -> str:
    shown = ", ".join(str(i) for i in items[:most])
    return shown + (f" and {len(items) - most} more" if len(items) > most else "")


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A hash of 64 bits (the finaliser of splitmix64). Of a sum, so that it commutes."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
