"""What a proved schedule sends, operation by operation, as XLA names them.

It is read off the proved program, round by round, not off the code that lowering makes of it: so a
receipt that equals it says that lowering and XLA both kept to the plan.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from collc.analysis.certificate import Certificate
from collc.analysis.relative import messages
from collc.analysis.rounds import rounds
from collc.language.algebra import Leaf, Schedule, Several, Then
from collc.language.expand import expand, permutation, relabelled
from collc.language.ir import Ints, Program, ranks
from collc.lowering.lower import Frame, frame, scope_of
from collc.lowering.wire import Wire

Edges = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Asked:
    """A collective that a program asks for.

    Attributes:
      kind: XLA's name of it, such as "all-reduce".
      axes: the mesh axes over which it goes, in mesh order.
      edges: of a collective-permute its (source, destination) pairs, sorted, of a grouped one its
        groups where it does not take the axes as a whole; in ranks, linear in ``axes``. Else None.
      dtype: what travels, by HLO's name ("f32", "bf16", "pred").
      elements: of the result of one execution on one device.
      count: executions by one device in one call; None in a loop whose trips nobody knows.
      scope: the schedule's scope, as profilers show it; of a lax call the primitive's name.
      plan: whether a schedule asks for it, not a lax call.
      reduction: of an all-reduce or a reduce-scatter "add", "max" or "min", else "".
      free: whether automatic axes of the mesh may share the elements out as XLA decides.
    """

    kind: str
    axes: tuple[str, ...]
    edges: Edges | None
    dtype: str
    elements: int
    count: int | None
    scope: str
    plan: bool
    reduction: str = ""
    free: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of the result of one execution on one device; 4-bit types count as packed."""
        return -(-self.elements * bits(self.dtype) // 8)


def title(scope: str) -> str:
    """A scope as one reads it, a schedule's as in a plan.

    >>> title("collc/ring.all_gather/gpu"), title("collc/ring.all_reduce/host,gpu"), title("mlp/psum")
    ('ring.all_gather @ gpu', 'ring.all_reduce @ (host, gpu)', 'mlp/psum')
    """
    if not scope.startswith("collc/"):
        return scope
    name, _, axes = scope.removeprefix("collc/").rpartition("/")
    return f"{name} @ {axes}" if "," not in axes else f"{name} @ ({axes.replace(',', ', ')})"


def hlo_dtype(dtype: Any) -> str:
    """HLO's name of a dtype.

    >>> hlo_dtype(jnp.bfloat16), hlo_dtype(np.int8), hlo_dtype(bool), hlo_dtype(jnp.float8_e4m3fn)
    ('bf16', 's8', 'pred', 'f8e4m3fn')
    """
    name = jnp.dtype(dtype).name
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "s")):
        if name.startswith(long):
            return short + name.removeprefix(long).replace("_", "")
    return {"bool": "pred", "complex64": "c64", "complex128": "c128"}[name]


def bits(dtype: str) -> int:
    """Bits of an element, by HLO's name of its dtype.

    >>> bits("bf16"), bits("pred"), bits("f8e4m3fn"), bits("c64")
    (16, 8, 8, 64)
    """
    found = re.match(r"[a-z]+(\d+)", dtype)
    return int(found[1]) if found else 8


def in_mesh_order(
    edges: Sequence[Sequence[int]],
    named: Sequence[str],
    axes: Sequence[str],
    sizes: Mapping[str, int],
) -> Edges:
    """Edges between ranks in the order of ``named``, as ranks in that of the mesh, sorted."""
    order = [a for a in named if sizes[a] > 1]
    grid = np.arange(math.prod(sizes[a] for a in axes)).reshape([sizes[a] for a in axes])
    linear = grid.transpose([list(axes).index(a) for a in order]).reshape(-1)
    return tuple(sorted(tuple(int(linear[r]) for r in edge) for edge in edges))


def of_schedule(
    certificate: Certificate, op: str, wire: Wire, shape: Sequence[int], dtype: Any
) -> list[Asked]:
    """What one call of a proved schedule sends for an operand [s, ...] of that dtype, as `lower` has it.

    ``op``: "sum", "mean", "max" or "min".
    """
    schedule, sizes = certificate.schedule, dict(certificate.sizes)
    cut = frame(schedule, sizes)
    before = {a: s for a, (s, _) in schedule.type.before.items()}
    dims = {a: 1 if before.get(a) == "shard" else sizes[a] for a in cut.axes}
    m = -(-shape[0] // math.prod(dims.values()))
    m = -(-m // cut.grain) * cut.grain
    own = _Sender(cut, op, wire, math.prod(shape[1:]), dtype)
    counted: Counter[Asked] = Counter()
    for one, times in own.walk(schedule.normal, m, dims):
        counted[one] += times
    return [replace(a, count=n) for a, n in counted.items()]


@dataclass(frozen=True)
class _Sender:
    """Counts elements through a schedule; ``rest``: elements of an operand behind dimension 0."""

    cut: Frame
    op: str
    wire: Wire
    rest: int
    dtype: Any

    def walk(self, s: Schedule, m: int, dims: dict[str, int]) -> Iterator[tuple[Asked, int]]:
        """What is sent, and how often. ``dims``: how much of each axis a rank holds; changed as the
        schedule goes.
        """
        match s:
            case Leaf():
                yield from self.leaf(s, math.prod(dims.values()) * m * self.rest)
                for a in s.axes if s.facing.scatters else ():
                    dims[a] = 1 if s.facing.after == "shard" else self.cut.sizes[a]
            case Then(parts=parts):
                for part in parts:
                    yield from self.walk(part, m, dims)
            case Several(parts=parts):  # side by side, also in slices that are staggered
                ends = dict(dims)
                for part in parts:
                    ends = dict(dims)
                    yield from self.walk(part, m // len(parts), ends)
                dims.update(ends)

    def leaf(self, leaf: Leaf, held: int) -> Iterator[tuple[Asked, int]]:
        """``held``: elements of the operand that a rank holds before this leaf."""
        sizes = self.cut.sizes
        axes = tuple(a for a in sizes if a in leaf.axes and sizes[a] > 1)
        n = math.prod(sizes[a] for a in leaf.axes)
        if n == 1 or not held:
            return
        if leaf.native:
            kind, elements = _native(leaf, self.op, held, n)
            one = self.one(leaf, kind, axes, None, elements, self.dtype)
            reduces = kind in ("all-reduce", "reduce-scatter")
            yield replace(one, reduction=_REDUCTIONS.get(self.op, "add") if reduces else ""), 1
            return
        program = expand(leaf, n)
        chunk = held
        if leaf.facing.before != "shard":
            chunk = held // (n if leaf.facing.scatters else program.chunks)
        order = [a for a in leaf.axes if sizes[a] > 1]
        for src, dst, width, times in _messages(leaf, program):
            pairs = np.stack([src, dst], axis=1).tolist()
            edges = in_mesh_order(pairs, order, axes, sizes)
            value = jax.ShapeDtypeStruct((width * chunk,), self.dtype)
            for sent in jax.tree.leaves(jax.eval_shape(self.wire.pack, value)):
                one = self.one(leaf, "collective-permute", axes, edges, sent.size, sent.dtype)
                yield one, times

    def one(
        self,
        leaf: Leaf,
        kind: str,
        axes: tuple[str, ...],
        edges: Edges | None,
        elements: int,
        dtype: Any,
    ) -> Asked:
        return Asked(kind, axes, edges, hlo_dtype(dtype), elements, 1, scope_of(leaf), True)


def _messages(leaf: Leaf, program: Program) -> Iterator[tuple[Ints, Ints, int, int]]:
    """Sources, destinations, the most chunks that one pair exchanges, and in how many rounds so."""
    names = permutation(leaf.relabels, program.n)
    if program.orbit:
        src = ranks(program.n)
        # All rounds of a ring are alike: what is written out of one is that of all.
        alike = Counter((m.distance, len(m.sends)) for step in messages(program) for m in step)
        for (distance, width), times in alike.items():
            yield names[src], names[(src + distance) % program.n], width, times
        return
    moved = relabelled(program, names)
    for round in rounds(moved):
        sends = moved.dense(round.sends)
        pairs, width = np.unique(sends.src * program.n + sends.dst, return_counts=True)
        yield pairs // program.n, pairs % program.n, int(width.max()), 1


_NATIVE: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "all_reduce": ("all-reduce", lambda held, n: held),
    "reduce": ("all-reduce", lambda held, n: held),
    "broadcast": ("all-reduce", lambda held, n: held),  # a sum to which the root alone contributes
    "reduce_scatter": ("reduce-scatter", lambda held, n: held // n),
    "scatter": ("reduce-scatter", lambda held, n: held // n),
    "all_gather": ("all-gather", lambda held, n: held * n),
    "gather": ("all-gather", lambda held, n: held * n),
    "all_to_all": ("all-to-all", lambda held, n: held),
}


_REDUCTIONS = {"max": "max", "min": "min"}  # all others add


def _native(leaf: Leaf, op: str, held: int, n: int) -> tuple[str, int]:
    """XLA's own collective for a leaf, and the elements of its result on a device."""
    name = leaf.facing.name
    if name == "reduce_scatter" and op in ("max", "min"):
        name = "all_to_all"  # XLA reduces and scatters by sums only
    kind, elements = _NATIVE[name]
    return kind, elements(held, n)
