"""Certificates: what is proved of a schedule on a mesh. Nothing is lowered without one."""

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import InitVar, dataclass, replace
from fractions import Fraction

import numpy as np

from collc.analysis import cache
from collc.analysis.bounds import Bounds, bounds
from collc.analysis.mesh import MOST_RANKS
from collc.analysis.proof import Proof, prove
from collc.analysis.strands import strands
from collc.errors import MeshError, ProofError, ScheduleError, nearest
from collc.language import states
from collc.language.algebra import Beside, Leaf, Order, Schedule, Staggered, Then
from collc.language.expand import expand, permutation
from collc.language.foreign import shown
from collc.language.ir import Program, integer
from collc.language.normal import stages_of, ticks

_TOKEN = object()


@dataclass(frozen=True, repr=False)
class Certificate:
    """What ``verify`` proved. Bytes are exact fractions of S, the full buffer of a rank.

    ``rounds`` counts partial permutations, so ``collective-permute``s; ``depth`` is the longest
    chain of additions; ``consistent``: replicas end with the same bits, ``narrow``: also where what
    travels is narrower than the sums. Native leaves are trusted: they count no rounds, and
    ``sent`` and ``depth`` are None where one takes part; so is ``consistent``, but False where a
    leaf of ours is not.
    """

    schedule: Schedule
    sizes: tuple[tuple[str, int], ...]
    type: str
    steps: int
    rounds: int
    sent: Fraction | None
    received: Fraction | None
    bound: Bounds | None
    depth: int | None
    consistent: bool | None
    narrow: bool | None
    trusted: tuple[str, ...]
    digest: str
    token: InitVar[object]

    def __post_init__(self, token: object) -> None:
        if token is not _TOKEN:
            raise ProofError("a certificate comes from collc.verify alone: call that.")

    @property
    def gap(self) -> Fraction | None:
        """Bytes sent by the busiest rank over the lower bound; None where there is no bound."""
        if self.bound is None or self.sent is None or not self.bound.sent:
            return None
        return self.sent / self.bound.sent

    def __repr__(self) -> str:
        mesh = ", ".join(f"{axis or 'n'}={n}" for axis, n in self.sizes)
        return f"<certificate {counted(self.rounds, 'round')} {self.schedule}, {mesh}>"

    def __str__(self) -> str:
        mesh = " ".join(f"{axis}={n}" if axis else f"n={n}" for axis, n in self.sizes)
        count = f"{counted(self.steps, 'step')}, {counted(self.rounds, 'round')}"
        sent = f", at most {share(self.sent)} sent by a rank" if self.sent is not None else ""
        trusted = f", trusted: {', '.join(self.trusted)}" if self.trusted else ""
        return f"{self.schedule}  : {self.type}\n  {mesh}   {count}{sent}{trusted}"


def counted(count: int, what: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{count} {what}{'s' * (count != 1)}"


def share(fraction: Fraction) -> str:
    """A fraction of S as ``7/4 S``."""
    if fraction.denominator == 1:
        return f"{fraction.numerator or 0} S" if fraction != 1 else "S"
    return f"{fraction.numerator}/{fraction.denominator} S"


def verify(schedule: Schedule, /, *, n: int | None = None, **axis_sizes: int) -> Certificate:
    """Proves the schedule on axes of these sizes; an unplaced one takes ``n`` or any one axis.

    Raises ProofError with the schedule, axis size, step, ranks, chunk and source line, MeshError
    where an axis has no size or there are more than 65,536 ranks, ScheduleError where the schedule
    is not well formed.

    >>> import collc.schedules.ring as ring
    >>> verify(ring.all_reduce, n=4).sent
    Fraction(3, 2)
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"verify takes a schedule, not {shown(schedule)}. See collc.parse.")
    given = {**({} if n is None else {"n": n}), **axis_sizes}
    if schedule.axes:
        if n is not None and "n" not in schedule.axes:
            raise MeshError(
                f"{schedule} is placed on {', '.join(schedule.axes)}: n= has no meaning"
            )
        return certify(schedule, given)
    if len(given) != 1:
        raise MeshError(f"{schedule} is not placed on axes: say verify(..., n=8), or place it")
    return certify(schedule, {"": next(iter(given.values()))})


def certify(schedule: Schedule, sizes: Mapping[str, int]) -> Certificate:
    """The certificate of a schedule on a mesh, whose axes may be more than the schedule's.

    The one axis of an unplaced schedule is "". Raises what ``verify`` does.
    """
    given, sizes = sizes, {}
    for axis, size in given.items():
        whole = integer(size)
        if whole is None or whole < 1:
            raise MeshError(
                f"{axis or 'n'}={shown(size)}: the size of an axis is a positive integer"
            )
        sizes[axis] = whole
    axes = schedule.axes or ("",)
    for axis in axes:
        if axis not in sizes:
            raise MeshError(
                f"{schedule} is placed on axis {axis!r}, which has no size here. "
                f"{nearest(axis, sizes) if sizes else f'Give it: verify(s, {axis}=8).'}"
            )
    # In mesh order, and no more than the schedule names: others are batch dimensions.
    own = tuple((axis, size) for axis, size in sizes.items() if axis in axes)
    count = math.prod(size for _, size in own)
    if count > MOST_RANKS:
        raise MeshError(
            f"{schedule}: {count:,} ranks are more than the {MOST_RANKS:,} that can be proved. "
            "Choose smaller axes."
        )
    found = _certify(schedule, own, tuple(_sources(schedule)))
    # An equal schedule may have been proved before, but it was written in other words.
    same = found.schedule is schedule
    return found if same else replace(found, schedule=schedule, token=_TOKEN)


def _sources(schedule: Schedule) -> Iterator[object]:
    # Schedules are equal by name; a file that was loaded again has other functions under it.
    for leaf in schedule.leaves():
        yield leaf.steps
        yield from (by.order.function for by in leaf.relabels if isinstance(by.order, Order))


@functools.lru_cache(maxsize=1024)
def _certify(
    schedule: Schedule, sizes: tuple[tuple[str, int], ...], sources: tuple[object, ...]
) -> Certificate:
    size = dict(sizes)
    proofs = [(s.leaf, proof_of(s.leaf, size), s.share) for s in strands(schedule, size)]
    ours = [proof for _, proof, _ in proofs if proof]
    trusted = tuple(dict.fromkeys(str(leaf.spec) for leaf, proof, _ in proofs if not proof))
    sent, received = (
        (None, None)
        if trusted
        else tuple(_busiest(proofs, size, side) for side in ("sent", "received"))
    )
    kind = schedule.collective
    finals = [p for leaf, p, _ in proofs if p and leaf.facing.after == states.REPLICA]
    return Certificate(
        schedule=schedule,
        sizes=sizes,
        type=str(schedule.type),
        steps=_chain(schedule.normal, size, lambda p: p.steps if p else 1, staggered=True),
        rounds=sum(p.rounds for p in ours),
        sent=sent,
        received=received,
        bound=bounds(kind, math.prod(size.values()), schedule.type.roots) if kind else None,
        depth=None
        if trusted
        else _chain(schedule.normal, size, lambda p: p.depth if p else 0, staggered=False),
        consistent=_all(bool(trusted), (p.consistent for p in finals)),
        narrow=_all(bool(trusted), (p.narrow for p in finals)),
        trusted=trusted,
        digest=digest(schedule, size),
        token=_TOKEN,
    )


def _all(unknown: bool, known: Iterable[bool]) -> bool | None:
    """False if any is; else None where native leaves leave it open."""
    if not all(known):
        return False
    return None if unknown else True


def ranks_of(leaf: Leaf, sizes: Mapping[str, int]) -> int:
    """How many ranks the leaf runs over."""
    return math.prod(sizes[axis] for axis in leaf.axes or ("",))


def program_of(leaf: Leaf, sizes: Mapping[str, int]) -> Program:
    """The leaf's program, not relabelled: to rename ranks neither proves nor disproves it."""
    return expand(leaf, ranks_of(leaf, sizes))


def proof_of(leaf: Leaf, sizes: Mapping[str, int]) -> Proof | None:
    """The proof of one leaf, from the cache by its program's digest; None if it is native."""
    n = ranks_of(leaf, sizes)
    permutation(leaf.relabels, n)
    if leaf.native:
        return None
    program = expand(leaf, n)
    try:
        return cache.proof(program, prove)
    except ProofError as e:
        if leaf.axes:
            raise ProofError(f"{leaf}: {e}") from e
        raise


def digest(schedule: Schedule, sizes: Mapping[str, int]) -> str:
    """A digest of all that the schedule's leaves do on these sizes."""
    h = hashlib.sha256()

    def visit(s: Schedule) -> None:
        match s:
            case Leaf():
                n = ranks_of(s, sizes)
                names = permutation(s.relabels, n)
                body = "native" if s.native else expand(s, n).digest
                h.update(f"{s.axes} {s.facing} {body}".encode())
                h.update(np.ascontiguousarray(names).tobytes())
            case Then(parts=parts) | Beside(parts=parts):
                h.update(f"({type(s).__name__}".encode())
                for part in parts:
                    visit(part)
                h.update(b")")

    visit(schedule.normal)
    return h.hexdigest()[:16]


def _chain(
    s: Schedule, size: Mapping[str, int], of: Callable[[Proof | None], int], staggered: bool
) -> int:
    """A count that adds up one after another, and of which the largest counts side by side.

    ``staggered``: whether slices wait for one another, as steps do, but chains of additions do not.
    """
    match s:
        case Leaf():
            return of(proof_of(s, size))
        case Then(parts=parts):
            return sum(_chain(p, size, of, staggered) for p in parts)
        case Staggered(parts=parts) if staggered:
            each = [_chain(stage, size, of, staggered) for stage in stages_of(parts[0])]
            return sum(max(each[j] for _, j in now) for now in ticks(len(parts), len(each)))
        case Beside(parts=parts):
            return max(_chain(p, size, of, staggered) for p in parts)
    raise TypeError(s)


def _busiest(
    proofs: list[tuple[Leaf, Proof | None, Fraction]], size: Mapping[str, int], side: str
) -> Fraction:
    """The largest sum over the leaves of what one rank of the whole mesh sends or receives."""
    axes = list(size)
    unit = math.lcm(*((p.chunk * w).denominator for _, p, w in proofs if p), 1)
    total = np.zeros([size[a] for a in axes], np.int64)
    for leaf, p, weight in proofs:
        if p is None:
            continue
        names = permutation(leaf.relabels, ranks_of(leaf, size))
        chunks = np.zeros(len(names), np.int64)
        chunks[names] = getattr(p, side)
        own = leaf.axes or ("",)
        grid = chunks.reshape([size[a] for a in own])
        # From the leaf's tuple order to the mesh's, the other axes broadcast.
        grid = grid.transpose(sorted(range(len(own)), key=lambda i: axes.index(own[i])))
        grid = grid.reshape([size[a] if a in own else 1 for a in axes])
        total = total + grid * int(p.chunk * weight * unit)
    return Fraction(int(total.max()), unit)
