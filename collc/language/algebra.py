"""Schedules are expressions: leaves, and the operators that put them together.

    schedule ::= leaf
               | schedule @ axis            on a mesh axis, or @ (axis, axis): ranks in tuple order
               | schedule >> schedule       one after another: the states have to meet
               | schedule | schedule        side by side: equal shares, cut inside each chunk
               | schedule.relabel(...)      other ranks, with their chunks and the root
               | schedule.reversed()        the dual

A schedule keeps the form in which it was written, for printing. Two schedules are equal when their
normal forms are: there ``@``, ``relabel`` and ``reversed`` stand at the leaves, ``>>`` and ``|`` are
flat, and ``(a | b) >> (c | d)`` is ``(a >> c) | (b >> d)``.
"""

import keyword
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from collc.errors import ScheduleError
from collc.language.foreign import said, shown
from collc.language.ir import Ints, integer, ranks
from collc.language.states import KINDS, ROOT, Kind, kind_between

Axes = tuple[str, ...]
DEEPEST = 100  # operators inside one another: far below what Python's own stack bears


@dataclass(frozen=True)
class Order:
    """A named function from n to an order of the ranks: rank r becomes ``order(n)[r]``.

    Made with ``@language.order``, so that ``relabel(order=...)`` prints.
    """

    name: str
    function: Callable[[int], Any] = field(compare=False)

    def __call__(self, n: int) -> Any:
        return self.function(n)


@dataclass(frozen=True)
class Relabel:
    """Rank r becomes r + ``shift``, or ``order[r]``; exactly one of the two is given."""

    shift: int | None = None
    order: tuple[int, ...] | Order | None = None

    def __str__(self) -> str:
        if self.order is None:
            return f"relabel(shift={self.shift})"
        order = self.order.name if isinstance(self.order, Order) else self.order
        return f"relabel(order={order})"

    def permutation(self, n: int) -> Ints:
        """The new name of each rank, [n]. Raises ScheduleError where it is no permutation of n."""
        if self.shift is not None:
            return (ranks(n) + self.shift % n) % n
        order: Any = self.order
        if isinstance(order, Order):
            try:
                order = order(n)
            except KeyboardInterrupt:
                raise
            except BaseException as e:
                raise ScheduleError(f"{self}: {order.name}({n}) raised {said(e)}") from e
        try:
            array = np.asarray(order)
        except ValueError:
            array = np.asarray(None)
        whole = array.shape == (n,) and np.issubdtype(array.dtype, np.integer)
        if not whole or not np.array_equal(np.sort(array), ranks(n)):
            raise ScheduleError(
                f"{self}: needs each of the ranks 0 to {n - 1} once, as n = {n} integers, but the "
                f"order is {shown(order)}."
            )
        return array.astype(np.int64)


class Schedule:
    """A collective schedule. Made by the decorators of ``collc.language`` and by its operators."""

    name: str | None

    def __post_init__(self) -> None:
        if self.depth > DEEPEST:
            raise ScheduleError(
                f"a schedule with more than {DEEPEST} operators inside one another is nested too "
                "deeply. Join its relabellings into one, and its parts in one chain of >> or |."
            )

    @cached_property
    def depth(self) -> int:
        """How many operators stand inside one another."""
        return max((1 + part.depth for part in _inside(self)), default=0)

    def __matmul__(self, axes: str | Axes) -> "Schedule":
        names = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
        if not names or not all(is_axis(a) for a in names):
            raise ScheduleError(f"{self} @ {shown(axes)}: an axis is a name, or a tuple of names")
        if len(set(names)) != len(names):
            raise ScheduleError(f"{self} @ {axes!r}: an axis is named twice")
        if self.axes:
            raise ScheduleError(f"{self} is placed already, on {show_axes(self.axes)}. Drop one @.")
        return Placed(self, names)

    def __rshift__(self, other: "Schedule") -> "Schedule":
        if not isinstance(other, Schedule):
            return NotImplemented
        return Then((*_parts(self, Then), *_parts(other, Then)))

    def __or__(self, other: "Schedule") -> "Schedule":
        if not isinstance(other, Schedule):
            return NotImplemented
        return Beside((*_parts(self, Beside), *_parts(other, Beside)))

    def relabel(
        self, *, shift: int | None = None, order: Iterable[int] | Order | None = None
    ) -> "Schedule":
        """The same with rank r named r + ``shift``, or ``order[r]``, its chunks and root with it.

        ``order`` is data, or a function named with ``@language.order``. Relabel before placing.
        """
        if (shift is None) == (order is None):
            raise ScheduleError(f"{self}.relabel takes either shift= or order=")
        if self.axes:
            raise ScheduleError(f"{self} is placed already: relabel first, then place with @")
        if shift is not None:
            shift = _integer(shift, f"{self}.relabel(shift={shown(shift)})")
        if order is not None and not isinstance(order, Order):
            if callable(order):
                raise ScheduleError("relabel(order=function): decorate it with @language.order")
            what = f"{self}.relabel(order={shown(order)})"
            if not isinstance(order, Iterable):
                raise ScheduleError(f"{what}: an order is a sequence of ranks")
            order = tuple(_integer(r, what) for r in order)
        return Relabelled(self, Relabel(shift, order))

    def reversed(self) -> "Schedule":
        """The dual: steps and links turned round, sums for copies and copies for last uses."""
        if isinstance(self, Reversed) and not self.name:
            return self.inner
        return Reversed(self)

    @cached_property
    def normal(self) -> "Schedule":
        """The normal form: Leaf, or a flat Then or Beside of normal forms."""
        return _normal(self)

    @cached_property
    def axes(self) -> Axes:
        """The mesh axes that it is placed on, in order of appearance; () while unplaced."""
        return tuple(dict.fromkeys(a for leaf in self.leaves() for a in leaf.axes))

    def leaves(self) -> Iterator["Leaf"]:
        """The leaves of the normal form, from left to right."""
        match self.normal:
            case Leaf() as leaf:
                yield leaf
            case Then(parts=parts) | Beside(parts=parts):
                for part in parts:
                    yield from part.leaves()

    @cached_property
    def type(self) -> "Type":
        """The states before and after, by axis."""
        return _type(self.normal)

    @property
    def collective(self) -> Kind | None:
        """The collective that it does on all its axes alike, or None where they differ."""
        pairs = {(b, a) for b, a in self.type.signature().values()}
        return kind_between(*pairs.pop()) if len(pairs) == 1 else None

    @cached_property
    def _key(self) -> Any:
        match self.normal:
            case Leaf() as leaf:
                return leaf.key
            case Then(parts=parts):
                return ("then", *(p._key for p in parts))
            case Beside(parts=parts):
                return ("beside", *(p._key for p in parts))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __str__(self) -> str:
        from collc.language.printing import text

        return text(self)

    def __repr__(self) -> str:
        return f"<{self}>"

    def __copy__(self) -> "Schedule":
        return self

    def __deepcopy__(self, memo: Any) -> "Schedule":
        return self

    def __reduce__(self) -> Any:
        """By its text, since generators cannot be pickled; ScheduleError where that is not enough."""
        from collc.language.parse import parse

        try:
            found = parse(str(self))
        except ScheduleError:
            found = None
        if found != self:
            raise ScheduleError(
                f"{self} cannot be pickled: its text does not lead back to it. Pass on what does, "
                "such as path/to/file.py:name, and call collc.find there."
            )
        return parse, (str(self),)


@dataclass(frozen=True, eq=False, repr=False)
class Leaf(Schedule):
    """One collective of one algorithm. ``steps`` yields its steps for n; None is XLA's own."""

    name: str | None
    kind: Kind
    steps: Callable[[int], Any] | None
    chunks: int | None = None
    axes: Axes = ()
    relabels: tuple[Relabel, ...] = ()
    dual: bool = False
    file: str = ""

    @property
    def native(self) -> bool:
        return self.steps is None

    @property
    def facing(self) -> Kind:
        """The collective that it does as it stands: the dual one when reversed."""
        return KINDS[self.kind.dual] if self.dual else self.kind

    @property
    def spec(self) -> "Leaf":
        """The leaf as it was declared."""
        return replace(self, axes=(), relabels=(), dual=False)

    @property
    def key(self) -> Any:
        # By name, so that what was read from text is equal to what was written; a schedule of the
        # same name in another file is another.
        return (
            "leaf",
            (self.name, self.file) if self.name else self.steps,
            self.kind.name,
            self.chunks,
            self.axes,
            self.relabels,
            self.dual,
        )


@dataclass(frozen=True, eq=False, repr=False)
class Several(Schedule):
    """What ``>>`` and ``|`` have in common."""

    parts: tuple[Schedule, ...]
    name: str | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Then(Several):
    """``a >> b >> c``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _alike(self, ">>")
        # Of the parts as written, so that messages name those.
        object.__setattr__(self, "type", _chain(self.parts))


@dataclass(frozen=True, eq=False, repr=False)
class Beside(Several):
    """``a | b | c``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _alike(self, "|")
        object.__setattr__(self, "type", _same(self.parts))


@dataclass(frozen=True, eq=False, repr=False)
class Placed(Schedule):
    """``inner @ on``, as it was written."""

    inner: Schedule
    on: Axes
    name: str | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Relabelled(Schedule):
    """``inner.relabel(...)``, as it was written."""

    inner: Schedule
    by: Relabel
    name: str | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Reversed(Schedule):
    """``inner.reversed()``, as it was written."""

    inner: Schedule
    name: str | None = None


def is_axis(name: Any) -> bool:
    """Whether an axis can have that name: an identifier, and no word of Python's own."""
    # A keyword would print as what cannot be read again.
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


def _integer(value: Any, what: str) -> int:
    found = integer(value)
    if found is None:
        raise ScheduleError(f"{what}: ranks and shifts are integers, not {shown(value)}")
    return found


def _inside(s: Schedule) -> tuple[Schedule, ...]:
    match s:
        case Placed(inner=inner) | Relabelled(inner=inner) | Reversed(inner=inner):
            return (inner,)
        case Several(parts=parts):
            return parts
    return ()


def named(schedule: Schedule, name: str) -> Schedule:
    """The same schedule, which prints as ``name``."""
    return replace(schedule, name=name)  # type: ignore[type-var]


def show_axes(axes: Axes) -> str:
    """One axis as its name, several as a tuple of names."""
    return axes[0] if len(axes) == 1 else f"({', '.join(axes)})"


def _parts(schedule: Schedule, cls: type[Several]) -> tuple[Schedule, ...]:
    # A name is worth keeping in print, so a named part stays whole; the normal form flattens it.
    return schedule.parts if isinstance(schedule, cls) and not schedule.name else (schedule,)


def _alike(schedule: Then | Beside, operator: str) -> None:
    placed = [bool(part.axes) for part in schedule.parts]
    if any(placed) != all(placed):
        loose = schedule.parts[placed.index(False)]
        raise ScheduleError(
            f"{schedule}: one side of {operator} is placed on axes, {loose} is not. "
            "Place it with @, or place the whole."
        )


# ---- normal form ------------------------------------------------------------------------------


def _normal(s: Schedule) -> Schedule:
    match s:
        case Leaf():
            return s
        case Placed(inner=inner, on=axes):
            return _map(inner.normal, lambda leaf: replace(leaf, axes=axes))
        case Relabelled(inner=inner, by=by):
            return _map(inner.normal, lambda leaf: replace(leaf, relabels=_join(leaf.relabels, by)))
        case Reversed(inner=inner):
            return _dual(inner.normal)
        case Then(parts=parts):
            return _then([p for part in parts for p in _flat(part.normal, Then)])
        case Beside(parts=parts):
            flat = tuple(p for part in parts for p in _flat(part.normal, Beside))
            return flat[0] if len(flat) == 1 else _raw(Beside, flat)
    raise TypeError(f"not a schedule: {s!r}")


def _flat(s: Schedule, cls: type[Several]) -> tuple[Schedule, ...]:
    return s.parts if isinstance(s, cls) else (s,)


def _then(parts: list[Schedule]) -> Schedule:
    """(a | b) >> (c | d) = (a >> c) | (b >> d) where as many stand side by side."""
    merged: list[Schedule] = []
    for part in parts:
        last = merged[-1] if merged else None
        if (
            isinstance(part, Beside)
            and isinstance(last, Beside)
            and len(part.parts) == len(last.parts)
        ):
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
        case Then(parts=parts) | Beside(parts=parts):
            return _raw(type(s), tuple(_map(p, change) for p in parts))
    raise TypeError(f"not a normal form: {s!r}")


def map_leaves(s: Schedule, change: Callable[[Leaf], Leaf]) -> Schedule:
    """The normal form with every leaf changed."""
    return _map(s.normal, change)


def _dual(s: Schedule) -> Schedule:
    match s:
        case Leaf():
            return replace(s, dual=not s.dual)
        case Then(parts=parts):
            return _raw(Then, tuple(_dual(p) for p in parts[::-1]))
        case Beside(parts=parts):
            return _raw(Beside, tuple(_dual(p) for p in parts))
    raise TypeError(f"not a normal form: {s!r}")


def _join(relabels: tuple[Relabel, ...], by: Relabel) -> tuple[Relabel, ...]:
    if by.shift is not None and relabels and relabels[-1].shift is not None:
        by, relabels = Relabel(shift=relabels[-1].shift + by.shift), relabels[:-1]
    return relabels if by.shift == 0 else (*relabels, by)


# ---- types ------------------------------------------------------------------------------------

State = tuple[str, tuple[Any, ...]]  # the state's name, and which root it means


@dataclass(frozen=True)
class Type:
    """The state of each axis before and after. The axis of an unplaced schedule is ""."""

    before: dict[str, State]
    after: dict[str, State]

    def signature(self) -> dict[str, tuple[str, str]]:
        return {axis: (state[0], self.after[axis][0]) for axis, state in self.before.items()}

    def __str__(self) -> str:
        signature = self.signature()
        pairs = list(signature.values())
        if len(set(pairs)) == 1:
            return f"{','.join(b for b, _ in pairs)} -> {','.join(a for _, a in pairs)}"
        # Where axes differ, which is which matters.
        return ", ".join(f"{axis} {b} -> {a}" for axis, (b, a) in signature.items())


def _type(s: Schedule) -> Type:
    match s:
        case Leaf():
            before, after = ((k, _root(s) if k == ROOT else ()) for k in _ends(s))
            axes = s.axes or ("",)
            return Type(dict.fromkeys(axes, before), dict.fromkeys(axes, after))
        case Then(parts=parts):
            return _chain(parts)
        case Beside(parts=parts):
            return _same(parts)
    raise TypeError(f"not a normal form: {s!r}")


def _same(parts: tuple[Schedule, ...]) -> Type:
    first = parts[0].type
    for part in parts[1:]:
        if part.type != first:
            raise ScheduleError(
                f"{parts[0]} | {part}: the parts differ in type: {_by_axis(first)} beside "
                f"{_by_axis(part.type)}. Every part has to do the same on the same axes."
            )
    return first


def _ends(leaf: Leaf) -> tuple[str, str]:
    return leaf.facing.before, leaf.facing.after


def _root(leaf: Leaf) -> tuple[Any, ...]:
    # Rank 0 is rank 0 on every axis; any other root is told apart by how it got its name.
    return (leaf.axes, leaf.relabels) if leaf.relabels else ()


def _by_axis(t: Type) -> str:
    signature = t.signature().items()
    return ", ".join(f"{axis} {b} -> {a}".strip() for axis, (b, a) in signature)


def _chain(parts: tuple[Schedule, ...]) -> Type:
    before: dict[str, State] = {}
    after: dict[str, State] = {}
    by: dict[str, Schedule] = {}
    for part in parts:
        step = part.type
        for axis, needed in step.before.items():
            found = after.get(axis)
            if found is not None and found != needed:
                place = axis or "its axis"
                if found[0] == needed[0]:
                    raise ScheduleError(
                        f"{part} needs another root on {place} than the one that {by[axis]} "
                        "leaves. Relabel both alike."
                    )
                drop = kind_between(needed[0], found[0])
                remedy = (
                    f"Drop the second {drop.name.rsplit('_')[-1]}."
                    if drop and found[0] == step.after[axis][0]
                    else f"Put something between that makes {found[0]} {needed[0]}, or drop one."
                )
                raise ScheduleError(
                    f"`{part}` needs {place} to be {needed[0]}, but after `{by[axis]}` it is "
                    f"{found[0]}. {remedy}"
                )
            if found is None:
                before[axis] = needed
        after.update(step.after)
        by.update(dict.fromkeys(step.after, part))
    return Type(before, after)
