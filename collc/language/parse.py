"""From text to a schedule. Reads Python's expression syntax; never evaluates code."""

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass

from collc.errors import ScheduleError, nearest
from collc.language.algebra import Order, Pass, Schedule
from collc.language.foreign import shown
from collc.language.leaves import Family
from collc.language.library import Named, lookup, passes


def parse(source: str, *, lookup: Callable[[str], Named] = lookup) -> Schedule:
    """The schedule that the text denotes, so that ``parse(str(s)) == s``.

    ``ring.reduce_scatter @ gpu >> tree.all_reduce @ host >> ring.all_gather @ gpu``. Axes may be
    quoted. ``lookup`` says what a name means. Raises ScheduleError, naming the place in the text
    and the nearest known name.

    >>> str(parse('ring.all_reduce @ "gpu"'))
    'ring.all_reduce @ gpu'
    """
    if not isinstance(source, str):
        raise ScheduleError(f"parse takes text, not {shown(source)}")
    try:
        tree = ast.parse(source.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        offset = getattr(e, "offset", None)
        at = f", at column {offset}" if offset else ""
        why = getattr(e, "msg", None) or str(e)
        raise ScheduleError(f"cannot read the schedule {_brief(source)}{at}: {why}") from None
    try:
        return _Reader(source, lookup).schedule(tree)
    except RecursionError:
        raise ScheduleError(f"the schedule is nested too deeply: {_brief(source)}") from None


@dataclass(frozen=True)
class _Reader:
    """One text, and how its names are looked up."""

    source: str
    lookup: Callable[[str], Named]

    def schedule(self, node: ast.expr) -> Schedule:
        match node:
            case ast.BinOp(left=left, op=ast.MatMult(), right=right):
                return self.schedule(left) @ self.axes(right)
            case ast.BinOp(left=left, op=ast.RShift(), right=right):
                return self.schedule(left) >> self.schedule(right)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self.schedule(left) | self.schedule(right)
            case ast.Call(func=ast.Attribute(value=inner, attr="reversed"), args=[], keywords=[]):
                return self.schedule(inner).reversed()
            case ast.Call(
                func=ast.Attribute(value=inner, attr="relabel"),
                args=[],
                keywords=[ast.keyword(arg="shift", value=value)],
            ):
                shift = self.literal(value)
                if not isinstance(shift, int) or isinstance(shift, bool):
                    raise self.refuse(value, "shift= takes an integer")
                return self.schedule(inner).relabel(shift=shift)
            case ast.Call(
                func=ast.Attribute(value=inner, attr="relabel"),
                args=[],
                keywords=[ast.keyword(arg="order", value=value)],
            ):
                return self.schedule(inner).relabel(order=self.order(value))
            case ast.Call(func=ast.Attribute(value=inner, attr="through"), args=args, keywords=[]):
                return self.schedule(inner).through(*map(self.rewriting, args))
            case ast.Call(func=function, args=args, keywords=keywords) if (
                keywords and not _is_method(function)
            ):
                family = self.named(function)
                if not isinstance(family, Family):
                    raise self.refuse(node, f"{ast.unparse(function)} takes no parameters")
                called = f"{ast.unparse(function)}({_positional(family, args, keywords)})"
                raise self.refuse(node, f"arguments are positional: {called}")
            case ast.Call(func=function, args=args, keywords=[]):
                family = self.named(function)
                if not isinstance(family, Family):
                    raise self.refuse(node, f"{ast.unparse(function)} takes no parameters")
                return family(*(self.literal(arg) for arg in args))  # type: ignore[arg-type]
            case ast.Name() | ast.Attribute():
                found = self.named(node)
                if isinstance(found, Family):
                    raise self.refuse(node, f"{found.name} has parameters: {found.name}(...)")
                if isinstance(found, Order):
                    raise self.refuse(node, f"{found.name} is an order, not a schedule")
                return found
        raise self.refuse(node, "a schedule is made of names, @, >>, |, relabel and reversed")

    def named(self, node: ast.expr) -> Named:
        match node:
            case ast.Name(id=name):
                return self.lookup(name)
            case ast.Attribute(value=ast.Name(id=module), attr=attribute):
                return self.lookup(f"{module}.{attribute}")
        raise self.refuse(node, "expected a name such as ring.all_reduce")

    def axes(self, node: ast.expr) -> str | tuple[str, ...]:
        match node:
            case ast.Name(id=name) | ast.Constant(value=str(name)):
                return name
            case ast.Tuple(elts=elements):
                axes = [self.axes(e) for e in elements]
                if all(isinstance(a, str) for a in axes):
                    return tuple(str(a) for a in axes)
        raise self.refuse(node, "after @ comes an axis, or a tuple of axes")

    def order(self, node: ast.expr) -> Order | tuple[int, ...]:
        if isinstance(node, ast.Name | ast.Attribute):
            found = self.named(node)
            if isinstance(found, Order):
                return found
            raise self.refuse(node, f"{ast.unparse(node)} is not an order")
        value = self.literal(node)
        if isinstance(value, tuple | list) and all(type(x) is int for x in value):
            return tuple(value)
        raise self.refuse(node, "order= takes a tuple of integers or the name of an order")

    def rewriting(self, node: ast.expr) -> Pass:
        match node:
            case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
                if name not in passes():
                    raise self.refuse(node, f"no pass {name!r}. {nearest(name, passes())}")
                if any(k.arg is None for k in keywords):
                    raise self.refuse(node, "parameters are literals: no **")
                given = {str(k.arg): self.literal(k.value) for k in keywords}
                try:
                    return passes()[name](*map(self.literal, args), **given)
                except TypeError as e:
                    raise self.refuse(node, str(e)) from None
        raise self.refuse(
            node, "through(...) takes passes of literals, as Pipeline(4) or Relabel(order=(1, 0))"
        )

    def literal(self, node: ast.expr) -> object:
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            raise self.refuse(node, "expected a literal") from None

    def refuse(self, node: ast.expr, why: str) -> ScheduleError:
        part = ast.get_source_segment(self.source.strip(), node) or ast.unparse(node)
        whole = _brief(self.source)
        return ScheduleError(f"cannot read {_brief(part)} in the schedule {whole}: {why}")


def _is_method(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr in (
        "relabel",
        "reversed",
        "through",
    )


def _positional(family: Family, args: list[ast.expr], keywords: list[ast.keyword]) -> str:
    """The arguments of a call as they are to be written, in the order of the parameters."""
    named = {k.arg: k.value for k in keywords if k.arg}
    order = list(inspect.signature(family.function).parameters)
    rest = sorted(named, key=lambda name: order.index(name) if name in order else len(order))
    return ", ".join(ast.unparse(x) for x in (*args, *(named[name] for name in rest)))


def _brief(source: str) -> str:
    return repr(source) if len(source) <= 200 else f"{source[:200]!r}..."
