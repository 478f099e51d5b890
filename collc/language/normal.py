"""Normal forms, by which schedules are equal, proved and lowered.

``@``, ``relabel``, ``reversed`` and passes stand at the leaves, ``>>`` and ``|`` are flat, and
``(a | b) >> (c | d)`` is ``(a >> c) | (b >> d)``. A chain over several axes that a pass slices
becomes Staggered.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from collc.errors import ScheduleError
from collc.language.algebra import (
    MOST_SLICES,
    Beside,
    Dual,
    Leaf,
    Pass,
    Placed,
    Relabel,
    Relabelled,
    Reversed,
    Schedule,
    Several,
    Staggered,
    Then,
    Through,
)


def normal(s: Schedule) -> Schedule:
    """The normal form of a schedule as it was written."""
    match s:
        case Leaf():
            return s
        case Placed(inner=inner, on=axes):
            return _map(inner.normal, lambda leaf: replace(leaf, axes=axes))
        case Relabelled(inner=inner, by=by):
            return _map(inner.normal, lambda leaf: replace(leaf, relabels=_join(leaf.relabels, by)))
        case Reversed(inner=inner):
            return _dual(inner.normal)
        case Through(inner=inner, by=by):
            return _through(inner.normal, by)
        case Then(parts=parts):
            return _then([p for part in parts for p in _flat(part.normal, Then)])
        case Beside(parts=parts):
            flat = tuple(p for part in parts for p in _flat(part.normal, Beside))
            return flat[0] if len(flat) == 1 else _raw(Beside, flat)
    raise TypeError(f"not a schedule: {s!r}")


def _flat(s: Schedule, cls: type[Several]) -> tuple[Schedule, ...]:
    return s.parts if type(s) is cls else (s,)


def _then(parts: list[Schedule]) -> Schedule:
    """(a | b) >> (c | d) = (a >> c) | (b >> d) where as many stand side by side."""
    merged: list[Schedule] = []
    for part in parts:
        last = merged[-1] if merged else None
        if type(part) is Beside and type(last) is Beside and len(part.parts) == len(last.parts):
            pairs = zip(last.parts, part.parts, strict=True)
            merged[-1] = _raw(
                Beside, tuple(_then([*_flat(a, Then), *_flat(b, Then)]) for a, b in pairs)
            )
        else:
            merged.append(part)
    return merged[0] if len(merged) == 1 else _raw(Then, tuple(merged))


def _raw(cls: type, parts: tuple[Schedule, ...]) -> Schedule:
    """A node of a normal form: built without checks, since it is checked as it was written."""
    node = object.__new__(cls)
    object.__setattr__(node, "parts", parts)
    object.__setattr__(node, "name", None)
    object.__setattr__(node, "normal", node)
    return node


def _map(s: Schedule, change: Callable[[Leaf], Leaf]) -> Schedule:
    match s:
        case Leaf():
            return change(s)
        case Several(parts=parts):
            return _raw(type(s), tuple(_map(p, change) for p in parts))
    raise TypeError(f"not a normal form: {s!r}")


def stages_of(part: Schedule) -> tuple[Schedule, ...]:
    """The stages of a slice: the parts of its chain."""
    assert isinstance(part, Then), part
    return part.parts


def ticks(slices: int, stages: int) -> Iterator[list[tuple[int, int]]]:
    """What is worked on at once in a Staggered: (slice, stage), each slice a stage behind the last.

    >>> list(ticks(2, 3))
    [[(0, 0)], [(0, 1), (1, 0)], [(0, 2), (1, 1)], [(1, 2)]]
    """
    for t in range(slices + stages - 1):
        yield [(i, t - i) for i in range(slices) if 0 <= t - i < stages]


def map_leaves(s: Schedule, change: Callable[[Leaf], Leaf]) -> Schedule:
    """The normal form with every leaf changed."""
    return _map(s.normal, change)


def _dual(s: Schedule) -> Schedule:
    match s:
        case Leaf():
            turned = s.rewrites[-1:] == (Dual(),)
            return replace(s, rewrites=s.rewrites[:-1] if turned else (*s.rewrites, Dual()))
        case Then(parts=parts):
            return _raw(Then, tuple(_dual(p) for p in parts[::-1]))
        case Beside(parts=parts):
            return _raw(type(s), tuple(_dual(p) for p in parts))
    raise TypeError(f"not a normal form: {s!r}")


def _through(s: Schedule, by: Pass) -> Schedule:
    match s:
        case _ if isinstance(by, Relabel):
            plain = Relabel(by.shift, by.order)
            return _map(s, lambda leaf: replace(leaf, relabels=_join(leaf.relabels, plain)))
        case Leaf(native=True):
            raise ScheduleError(f"{s} is XLA's own collective: it has no steps for {by} to rewrite")
        case Leaf():
            return replace(s, rewrites=(*s.rewrites, by))
        case Staggered(parts=parts) if by.slices > 1:
            return _raw(Staggered, _few(parts, by) * by.slices)
        case Then() if by.slices > 1 and len({leaf.axes for leaf in s.leaves()}) > 1:
            return _raw(Staggered, _few((s,), by) * by.slices)
        case Several(parts=parts):
            return _raw(type(s), tuple(_through(p, by) for p in parts))
    raise TypeError(f"not a normal form: {s!r}")


def _few(parts: tuple[Schedule, ...], by: Pass) -> tuple[Schedule, ...]:
    slices = len(parts) * by.slices
    if slices > MOST_SLICES:
        raise ScheduleError(
            f"{by}: {slices:,} slices are more than the {MOST_SLICES:,} that can be."
        )
    return parts


def _join(relabels: tuple[Relabel, ...], by: Relabel) -> tuple[Relabel, ...]:
    if by.shift is not None and relabels and relabels[-1].shift is not None:
        by, relabels = Relabel(shift=relabels[-1].shift + by.shift), relabels[:-1]
    return relabels if by.shift == 0 else (*relabels, by)
