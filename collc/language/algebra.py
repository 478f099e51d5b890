"""Schedules are expressions: leaves, and the operators that put them together.

    schedule ::= leaf
               | schedule @ axis            on a mesh axis, or @ (axis, axis): ranks in tuple order
               | schedule >> schedule       one after another: the states have to meet
               | schedule | schedule        side by side: equal shares, cut inside each chunk
               | schedule.relabel(...)      other ranks, with their chunks and the root
               | schedule.reversed()        the dual
               | schedule.through(pass)     its programs rewritten

A schedule keeps the form in which it was written, for printing. Two schedules are equal when their
normal forms are (``collc.language.normal``).
"""

import keyword
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import or_, rshift
from typing import TYPE_CHECKING, Any

import numpy as np

from collc.errors import ScheduleError
from collc.language.foreign import said, shown
from collc.language.ir import Ints, Program, integer, ranks
from collc.language.states import KINDS, Kind, kind_between

if TYPE_CHECKING:
    from collc.language.types import Type

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


MOST_SLICES = 4096  # each is a message of its own, and a line of the program


class Pass(ABC):
    """A rewriting of programs: a frozen dataclass that prints as its call. As collc.Pipeline.

    ``slices``: into how many it cuts a chain over several axes; 1 where it rewrites leaves alone.
    """

    slices = 1

    @abstractmethod
    def __call__(self, program: Program) -> Program: ...


@dataclass(frozen=True)
class Dual(Pass):
    """What ``reversed`` does to a leaf."""

    def __call__(self, program: Program) -> Program:
        from collc.language.expand import dual

        return dual(program)


@dataclass(frozen=True)
class Relabel:
    """Rank r becomes r + ``shift``, or ``order[r]``; exactly one of the two is given.

    ``order``: integers, or a function named with ``@language.order``. Raises ScheduleError.
    """

    shift: int | None = None
    order: tuple[int, ...] | Order | None = None

    def __post_init__(self) -> None:
        if (self.shift is None) == (self.order is None):
            raise ScheduleError("relabel takes either shift= or order=")
        if self.shift is not None:
            what = f"relabel(shift={shown(self.shift)})"
            object.__setattr__(self, "shift", _integer(self.shift, what))
        elif not isinstance(self.order, Order):
            what = f"relabel(order={shown(self.order)})"
            if callable(self.order):
                raise ScheduleError("relabel(order=function): decorate it with @language.order")
            if not isinstance(self.order, Iterable):
                raise ScheduleError(f"{what}: an order is a sequence of ranks")
            object.__setattr__(self, "order", tuple(_integer(r, what) for r in self.order))

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
        if self.axes:
            raise ScheduleError(f"{self} is placed already: relabel first, then place with @")
        try:
            by = Relabel(shift, order)  # pyright: ignore[reportArgumentType]
        except ScheduleError as e:
            raise ScheduleError(f"{self}.{e}") from None
        return Relabelled(self, by)

    def reversed(self) -> "Schedule":
        """The dual: steps and links turned round, sums for copies and copies for last uses."""
        if isinstance(self, Reversed) and not self.name:
            return self.inner
        return Reversed(self)

    def through(self, *passes: "Pass") -> "Schedule":
        """The same, with its leaves' programs rewritten by passes, such as ``Pipeline(4)``.

        A pass that slices cuts a chain over several axes as a whole, and staggers the slices.
        """
        if not passes:
            raise ScheduleError(f"{self}.through() takes at least one pass, such as Pipeline(4)")
        result = self
        for by in passes:
            if not isinstance(by, Pass):
                raise ScheduleError(
                    f"{self}.through takes passes, such as Pipeline(4), not {shown(by)}"
                )
            result = Through(result, by)
            result.normal  # noqa: B018  refuses here and now what has no steps to rewrite
        return result

    def program(self, n: int) -> Program:
        """The steps of a schedule of one leaf for n ranks, before relabelling.

        Raises ScheduleError for several leaves, and as ``collc.language.expand.expand``.
        """
        from collc.language.expand import expand

        if not isinstance(self.normal, Leaf):
            raise ScheduleError(
                f"{self} has several leaves, each with a program of its own: "
                "[leaf.program(n) for leaf in schedule.leaves()]."
            )
        return expand(self.normal, n)

    @cached_property
    def normal(self) -> "Schedule":
        """The normal form: Leaf, or a flat Then, Beside or Staggered of normal forms."""
        from collc.language.normal import normal

        return normal(self)

    @cached_property
    def axes(self) -> Axes:
        """The mesh axes that it is placed on, in order of appearance; () while unplaced."""
        return tuple(dict.fromkeys(a for leaf in self.leaves() for a in leaf.axes))

    def leaves(self) -> Iterator["Leaf"]:
        """The leaves of the normal form, from left to right."""
        match self.normal:
            case Leaf() as leaf:
                yield leaf
            case Several(parts=parts):
                for part in parts:
                    yield from part.leaves()

    @cached_property
    def type(self) -> "Type":
        """The states before and after, by axis."""
        from collc.language.types import type_of

        return type_of(self.normal)

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
            case Several(parts=parts) as several:
                return (type(several).__name__, *(p._key for p in parts))

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
    """One collective of one algorithm. ``steps`` yields its steps for n; None is XLA's own.

    ``roots``: how many ranks share the state root, each with a chunk of its own.
    """

    name: str | None
    kind: Kind
    steps: Callable[[int], Any] | None
    chunks: int | None = None
    axes: Axes = ()
    relabels: tuple[Relabel, ...] = ()
    rewrites: tuple[Pass, ...] = ()
    file: str = ""
    roots: int = 1

    @property
    def native(self) -> bool:
        return self.steps is None

    @property
    def facing(self) -> Kind:
        """The collective that it does as it stands: the dual one when reversed."""
        turned = sum(isinstance(by, Dual) for by in self.rewrites) % 2
        return KINDS[self.kind.dual] if turned else self.kind

    @property
    def spec(self) -> "Leaf":
        """The leaf as it was declared."""
        return replace(self, axes=(), relabels=(), rewrites=())

    @property
    def key(self) -> Any:
        # By name, so that what was read from text is equal to what was written; a schedule of the
        # same name in another file is another.
        return (
            "leaf",
            (self.name, self.file) if self.name else self.steps,
            self.kind.name,
            self.chunks,
            self.roots,
            self.axes,
            self.relabels,
            self.rewrites,
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
        from collc.language.types import chain

        object.__setattr__(self, "type", chain(self.parts))


@dataclass(frozen=True, eq=False, repr=False)
class Beside(Several):
    """``a | b | c``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _alike(self, "|")
        from collc.language.types import same

        object.__setattr__(self, "type", same(self.parts))


@dataclass(frozen=True, eq=False, repr=False)
class Staggered(Beside):
    """Equal slices of a chain, each a part behind the one before. In normal forms only."""


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


@dataclass(frozen=True, eq=False, repr=False)
class Through(Schedule):
    """``inner.through(by)``, as it was written."""

    inner: Schedule
    by: Pass
    name: str | None = None


def then(*parts: Schedule) -> Schedule:
    """``a >> b >> c``. Raises ScheduleError for no parts."""
    return reduce(rshift, _some(parts, "then"))


def beside(*parts: Schedule) -> Schedule:
    """``a | b | c``. Raises ScheduleError for no parts."""
    return reduce(or_, _some(parts, "beside"))


def _some(parts: tuple[Schedule, ...], caller: str) -> tuple[Schedule, ...]:
    if not parts:
        raise ScheduleError(f"{caller}() needs at least one schedule")
    for part in parts:
        if not isinstance(part, Schedule):
            raise ScheduleError(f"{caller}() takes schedules, not {shown(part)}")
    return parts


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
        case (
            Placed(inner=inner)
            | Relabelled(inner=inner)
            | Reversed(inner=inner)
            | Through(inner=inner)
        ):
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
