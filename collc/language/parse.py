"""From text to a schedule. Reads Python's expression syntax; never evaluates code."""

import ast

from collc.errors import ScheduleError
from collc.language.algebra import Order, Schedule
from collc.language.leaves import Family
from collc.language.library import Named, lookup


def parse(source: str) -> Schedule:
    """The schedule that the text denotes, so that ``parse(str(s)) == s``.

    ``ring.reduce_scatter @ gpu >> tree.all_reduce @ host >> ring.all_gather @ gpu``. Axes may be
    quoted. Raises ScheduleError, naming the place in the text and the nearest known name.

    >>> str(parse('ring.all_reduce @ "gpu"'))
    'ring.all_reduce @ gpu'
    """
    if not isinstance(source, str):
        raise ScheduleError(f"parse takes text, not {source!r}")
    try:
        tree = ast.parse(source.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        offset = getattr(e, "offset", None)
        at = f", at column {offset}" if offset else ""
        why = getattr(e, "msg", None) or str(e)
        raise ScheduleError(f"cannot read the schedule {_brief(source)}{at}: {why}") from None
    try:
        return _schedule(tree, source)
    except RecursionError:
        raise ScheduleError(f"the schedule is nested too deeply: {_brief(source)}") from None


def _schedule(node: ast.expr, source: str) -> Schedule:
    match node:
        case ast.BinOp(left=left, op=ast.MatMult(), right=right):
            return _schedule(left, source) @ _axes(right, source)
        case ast.BinOp(left=left, op=ast.RShift(), right=right):
            return _schedule(left, source) >> _schedule(right, source)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _schedule(left, source) | _schedule(right, source)
        case ast.Call(func=ast.Attribute(value=inner, attr="reversed"), args=[], keywords=[]):
            return _schedule(inner, source).reversed()
        case ast.Call(
            func=ast.Attribute(value=inner, attr="relabel"),
            args=[],
            keywords=[ast.keyword(arg="shift", value=value)],
        ):
            shift = _literal(value, source)
            if not isinstance(shift, int) or isinstance(shift, bool):
                raise _refuse(value, source, "shift= takes an integer")
            return _schedule(inner, source).relabel(shift=shift)
        case ast.Call(
            func=ast.Attribute(value=inner, attr="relabel"),
            args=[],
            keywords=[ast.keyword(arg="order", value=value)],
        ):
            return _schedule(inner, source).relabel(order=_order(value, source))
        case ast.Call(func=function, args=args, keywords=[]):
            family = _named(function, source)
            if not isinstance(family, Family):
                raise _refuse(node, source, f"{ast.unparse(function)} takes no parameters")
            literals = [_literal(arg, source) for arg in args]
            if not all(isinstance(x, int | str) for x in literals):
                raise _refuse(node, source, "parameters are integers and axis names")
            return family(*literals)  # type: ignore[arg-type]
        case ast.Name() | ast.Attribute():
            found = _named(node, source)
            if isinstance(found, Family):
                raise _refuse(node, source, f"{found.name} has parameters: {found.name}(...)")
            if isinstance(found, Order):
                raise _refuse(node, source, f"{found.name} is an order, not a schedule")
            return found
    raise _refuse(node, source, "a schedule is made of names, @, >>, |, relabel and reversed")


def _named(node: ast.expr, source: str) -> Named:
    match node:
        case ast.Name(id=name):
            return lookup(name)
        case ast.Attribute(value=ast.Name(id=module), attr=attribute):
            return lookup(f"{module}.{attribute}")
    raise _refuse(node, source, "expected a name such as ring.all_reduce")


def _axes(node: ast.expr, source: str) -> str | tuple[str, ...]:
    match node:
        case ast.Name(id=name) | ast.Constant(value=str(name)):
            return name
        case ast.Tuple(elts=elements):
            axes = [_axes(e, source) for e in elements]
            if all(isinstance(a, str) for a in axes):
                return tuple(str(a) for a in axes)
    raise _refuse(node, source, "after @ comes an axis, or a tuple of axes")


def _order(node: ast.expr, source: str) -> Order | tuple[int, ...]:
    if isinstance(node, ast.Name | ast.Attribute):
        found = _named(node, source)
        if isinstance(found, Order):
            return found
        raise _refuse(node, source, f"{ast.unparse(node)} is not an order")
    value = _literal(node, source)
    if isinstance(value, tuple | list) and all(type(x) is int for x in value):
        return tuple(value)
    raise _refuse(node, source, "order= takes a tuple of integers or the name of an order")


def _literal(node: ast.expr, source: str) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise _refuse(node, source, "expected a literal") from None


def _refuse(node: ast.expr, source: str, why: str) -> ScheduleError:
    part = ast.get_source_segment(source.strip(), node) or ast.unparse(node)
    return ScheduleError(f"cannot read {_brief(part)} in the schedule {_brief(source)}: {why}")


def _brief(source: str) -> str:
    return repr(source) if len(source) <= 200 else f"{source[:200]!r}..."
