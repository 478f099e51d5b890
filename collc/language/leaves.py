"""The decorators that turn a generator of steps into a schedule, and a function into a family."""

from collections.abc import Callable
from typing import Any, overload

from collc.errors import CollcError, ScheduleError
from collc.language.algebra import Leaf, Order, Schedule, named
from collc.language.foreign import line_in, reworded, said, short, shown
from collc.language.ir import integer
from collc.language.states import KINDS, ROOT, Kind

Steps = Callable[[int], Any]
Literal = int | str | tuple["Literal", ...]


def qualified(function: Any) -> str | None:
    """``ring.reduce_scatter``; the module alone where it bears the same name.

    None in a closure, and for what is no function, such as a ``functools.partial``.
    """
    if "<locals>" in getattr(function, "__qualname__", "<locals>"):
        return None
    module = function.__module__.rpartition(".")[2]
    return module if function.__name__ == module else f"{module}.{function.__name__}"


def _file(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return code.co_filename if code else ""


class _Decorator:
    """``@reduce_scatter``, or ``@all_reduce(chunks=2)`` where the kind lets a leaf choose.

    ``@reduce(roots=2)``: two chunks, of which chunk c has rank c as its root.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.__doc__ = (
            f"A schedule leaf: {kind.before} -> {kind.after}. Decorates a generator function of "
            "the number of ranks n, which yields steps: an ``add`` or ``copy``, or a tuple of them."
        )

    @overload
    def __call__(self, steps: Steps) -> Leaf: ...
    @overload
    def __call__(
        self, *, chunks: int | None = None, roots: int | None = None
    ) -> Callable[[Steps], Leaf]: ...
    def __call__(
        self, steps: Steps | None = None, *, chunks: int | None = None, roots: int | None = None
    ) -> Any:
        if roots is not None:
            if self.kind.scatters or ROOT not in (self.kind.before, self.kind.after):
                raise ScheduleError(
                    f"@{self.kind}(roots={shown(roots)}): only a reduce or a broadcast has several "
                    "roots. Drop roots=."
                )
            if chunks is not None:
                raise ScheduleError(
                    f"@{self.kind}: roots= cuts the buffer in one chunk for each root. Drop chunks=."
                )
            chunks = roots = self._positive("roots", roots)
        elif chunks is not None:
            if self.kind.scatters:
                raise ScheduleError(
                    f"@{self.kind}(chunks={chunks!r}): in a {self.kind} chunk c belongs to rank c, "
                    "so there are always n of them. Drop chunks=."
                )
            chunks = self._positive("chunks", chunks)
        if steps is None:
            return lambda steps: self._leaf(steps, chunks, roots or 1)
        return self._leaf(steps, chunks, roots or 1)

    def _positive(self, name: str, value: object) -> int:
        found = integer(value)
        if found is None or found < 1:
            raise ScheduleError(f"@{self.kind}: {name} is a positive integer, not {shown(value)}")
        return found

    def _leaf(self, steps: Steps, chunks: int | None, roots: int) -> Leaf:
        if not callable(steps):
            raise ScheduleError(f"@{self.kind} decorates a generator function, not {shown(steps)}")
        leaf = Leaf(qualified(steps), self.kind, steps, chunks, file=_file(steps), roots=roots)
        object.__setattr__(leaf, "__doc__", steps.__doc__)
        return leaf


all_reduce = _Decorator(KINDS["all_reduce"])
reduce_scatter = _Decorator(KINDS["reduce_scatter"])
all_gather = _Decorator(KINDS["all_gather"])
reduce = _Decorator(KINDS["reduce"])
broadcast = _Decorator(KINDS["broadcast"])
gather = _Decorator(KINDS["gather"])
scatter = _Decorator(KINDS["scatter"])
all_to_all = _Decorator(KINDS["all_to_all"])


def native(kind: str) -> Leaf:
    """XLA's own collective of that kind: an axiom, trusted and not proved."""
    return Leaf(f"native.{kind}", KINDS[kind], None)


class Family:
    """Schedules with parameters: a function of literals, whose results print as its calls."""

    def __init__(self, function: Callable[..., Schedule]) -> None:
        if not callable(function):
            raise ScheduleError(f"@family decorates a function, not {shown(function)}")
        self.function = function
        self.__name__ = str(getattr(function, "__name__", "family"))
        self.name = qualified(function) or self.__name__
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__
        # Leaves without a name are equal where they are the same: one text has to mean one schedule.
        self._made: dict[str, Schedule] = {}

    def __call__(self, *args: Literal) -> Schedule:
        literals = [_literal(arg, self.name) for arg in args]
        call = f"{self.name}({', '.join(map(show_literal, literals))})"
        if call not in self._made:
            self._made[call] = self._make(call, literals)
        return self._made[call]

    def _make(self, call: str, literals: list[Literal]) -> Schedule:
        try:
            schedule = self.function(*literals)
        except KeyboardInterrupt:
            raise
        except CollcError as e:
            raise reworded(e, f"{call}: {e}") from e
        except BaseException as e:
            file = _file(self.function)
            line = line_in(file, e)
            place = f", {short(file)}:{line}" if line else ""
            raise ScheduleError(f"{call}{place}: {said(e)}") from e
        if not isinstance(schedule, Schedule):
            raise ScheduleError(f"{call} has to return a schedule, not {shown(schedule)}")
        return named(schedule, call)

    def __repr__(self) -> str:
        return f"<{self.name}(...)>"


def _literal(value: Any, family: str) -> Literal:
    """The value as it prints and is read again, one of NumPy as Python's."""
    if isinstance(value, str):
        return value
    if isinstance(value, tuple | list):
        return tuple(_literal(each, family) for each in value)
    whole = integer(value)
    if whole is None:
        raise ScheduleError(
            f"{family} takes integers, axis names and tuples of those, not {shown(value)}"
        )
    return whole


def show_literal(value: Literal) -> str:
    """The literal as it is printed: with double quotes, as everywhere in collc."""
    if isinstance(value, tuple):
        inside = ", ".join(map(show_literal, value))
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    return f'"{value}"' if isinstance(value, str) and value.isidentifier() else repr(value)


def family(function: Callable[..., Schedule]) -> Family:
    """Decorates a function of integers, axis names and tuples of those that returns a schedule."""
    return Family(function)


def order(function: Callable[[int], Any]) -> Order:
    """Decorates a function from n to an order of the n ranks, so that ``relabel`` can print it."""
    name = qualified(function)
    if name is None:
        raise ScheduleError(
            f"@order: {shown(function)} has to be a function at the top of its module"
        )
    return Order(name, function)
