"""What the replication check knows about one value of a jaxpr, and the user line to blame."""

import functools
import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core as jex

_NONE: frozenset[str] = frozenset()
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax", "collc")

# Primitives that return zero when an operand is (0), or when all operands are (all).
_ZERO_IF_ANY = frozenset({"mul", "dot_general"})
_ZERO_IF_FIRST = frozenset({"div", "dynamic_slice", "gather"})
_ZERO_IF_ALL = frozenset(
    "add add_any sub neg convert_element_type broadcast_in_dim reshape squeeze expand_dims copy "
    "transpose reduce_sum slice concatenate pad rev pvary "
    "psum psum_invariant reduce_scatter all_gather all_to_all collc_collective".split()
)
# What was reduced is still that after these: they move elements about, or scale and add them.
_MOVES = frozenset(
    "reshape squeeze expand_dims transpose rev copy copy_p convert_element_type broadcast_in_dim "
    "concatenate slice split unstack pad pvary pcast optimization_barrier device_put".split()
)
_SCALES = frozenset("mul div neg add add_any sub select_n clamp".split())


# -- source lines ---------------------------------------------------------------------------------


@functools.cache
def _is_library(path: str) -> bool:
    """Whether a file belongs to jax, flax, collc itself, or Python's own library."""
    if path.startswith("<"):  # <string>, <frozen importlib...>
        return True
    # A library that appears in a frame has been imported.
    files = (getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES)
    homes = [os.path.dirname(file) for file in files if file]
    if not _is_installed(path):  # site-packages lies within the stdlib folder outside a venv
        homes.append(sysconfig.get_path("stdlib"))
    return any(os.path.abspath(path).startswith(home + os.sep) for home in homes)


@functools.cache
def _is_installed(path: str) -> bool:
    return bool({"site-packages", "dist-packages"} & set(os.path.abspath(path).split(os.sep)))


def user_line(eqn: Any) -> str:
    """The innermost user frame of an equation, "file.py:12 in train_step"; "" if it has none.

    Frames of installed packages count only where there are no others: a project may be installed.
    """
    traceback = getattr(eqn.source_info, "traceback", None)
    frames = [f for f in (traceback.frames if traceback else ()) if not _is_library(f.file_name)]
    own = [f for f in frames if not _is_installed(f.file_name)] or frames
    if not own:
        return ""
    function = own[0].function_name.rsplit(".", 1)[-1]
    return f"{os.path.basename(own[0].file_name)}:{own[0].line_num} in {function}"


class Where(NamedTuple):
    """An equation, and the call around it, whose line stands in for helpers that have none."""

    eqn: Any
    outer: "Where | None"

    def line(self) -> str:
        """Found only when asked for: a traceback costs more than the check of an equation."""
        return user_line(self.eqn) or (self.outer.line() if self.outer else "")

    def __str__(self) -> str:
        return self.line() or "in the step"


# -- values ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Value:
    """What is known of a value.

    axes: the manual axes over which it varies. constant: it depends on no input. zero: it is 0.
    reduced: the axes over which it, or a part, is a sum or mean, whatever it was scaled by since;
    summed: a sum, as it came. first, last: where its variation set in (None: at an argument) and
    where it was computed.
    """

    axes: frozenset[str] = _NONE
    constant: bool = False
    zero: bool = False
    reduced: frozenset[str] = _NONE
    summed: frozenset[str] = _NONE
    first: Where | None = None
    last: Where | None = None

    @property
    def state(self) -> tuple[Any, ...]:
        """What a fixpoint compares."""
        return self.axes, self.constant, self.zero, self.reduced, self.summed

    def chain(self) -> tuple[str, ...]:
        """The first and the last user line of its variation; empty where it does not vary."""
        if not self.axes:
            return ()
        lines = [w.line() for w in (self.first, self.last) if w]
        return tuple(dict.fromkeys(line for line in lines if line)) or ("an argument",)

    def over(self, axes: Iterable[str], where: Where) -> "Value":
        """The same value after an equation that leaves it varying over `axes`."""
        axes = frozenset(axes)
        first = (self.first or where) if axes else None
        return replace(self, axes=axes, first=first, last=where)


def constant(literal: Any) -> Value:
    """The value of a literal of the program; only scalars are known to be zero."""
    scalar = scalar_of(literal)
    return Value(constant=True, zero=scalar is not None and scalar == 0)


def is_literal(atom: Any) -> bool:
    """Whether an operand of an equation is a number of the program, and no variable."""
    return hasattr(atom, "val")


def scalar_of(literal: Any) -> Any:
    """A literal as a NumPy scalar, or None where it is something else (an array, a random key)."""
    if getattr(literal, "shape", ()) != () or not isinstance(
        getattr(literal, "dtype", np.dtype(float)), np.dtype
    ):
        return None
    scalar = np.asarray(literal)[()]
    return None if scalar.dtype == jax.dtypes.float0 else scalar


def union(values: Sequence[Value], where: Where) -> Value:
    """What an ordinary equation returns: it varies wherever an operand does."""
    axes = _NONE.union(*(v.axes for v in values))
    blame = max(values, key=lambda v: len(v.axes), default=Value())  # max keeps the first of equals
    first = (blame.first or where) if axes else None
    name = where.eqn.primitive.name
    moves = name in _MOVES
    return Value(
        axes,
        constant=all(v.constant for v in values),
        zero=_zero(values, name),
        reduced=_NONE.union(*(v.reduced for v in values if moves or name in _SCALES)),
        summed=_NONE.union(*(v.summed for v in values if moves)),
        first=first,
        last=where,
    )


def _zero(values: Sequence[Value], name: str) -> bool:
    if name in _ZERO_IF_ANY:
        return any(v.zero for v in values)
    if name in _ZERO_IF_FIRST:
        return bool(values) and values[0].zero
    return name in _ZERO_IF_ALL and bool(values) and all(v.zero for v in values)


def join(a: Value, b: Value) -> Value:
    """Either of two values: of two branches, or of two iterations."""
    blame = a if a.axes else b
    return Value(
        a.axes | b.axes,
        constant=a.constant and b.constant,
        zero=a.zero and b.zero,
        reduced=a.reduced | b.reduced,
        summed=a.summed | b.summed,
        first=blame.first,
        last=blame.last,
    )


def taint(value: Value, by: Value, where: Where) -> Value:
    """A value that was chosen by a predicate: it varies wherever the predicate does, too."""
    axes = value.axes | by.axes
    blame = value if value.axes else by
    first = (blame.first or where) if axes else None
    constant, last = value.constant and by.constant, value.last or where
    return replace(value, axes=axes, constant=constant, first=first, last=last)


# Equations that call one jaxpr on all their operands, by the parameter that holds it.
REMAT = dict.fromkeys(("remat", "remat2", "checkpoint"), "jaxpr")
PLAIN_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
}
CALLS = {
    **PLAIN_CALLS,
    **REMAT,
    "eval_jaxpr": "call_jaxpr",
    "call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "custom_partitioning": "call",
    "linear_call": "callee",
}


# -- both versions of jax -------------------------------------------------------------------------


def opened(jaxpr: Any) -> Any:
    """The jaxpr without its constants' values. (jax 0.12 has one class for open and closed.)"""
    return getattr(jaxpr, "jaxpr", jaxpr)


def rebuilt(jaxpr: Any, eqns: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """A jaxpr, open or closed, with other equations and results."""
    old = opened(jaxpr)
    new = old.replace(eqns=list(eqns), outvars=list(outvars), debug_info=old.debug_info)
    return new if old is jaxpr else jaxpr.replace(jaxpr=new)


def holds_jaxpr(param: Any) -> bool:
    """Whether an equation's parameter is a jaxpr, or a container of one."""
    if isinstance(param, jex.Jaxpr | jex.ClosedJaxpr):
        return True
    if isinstance(param, dict):
        param = tuple(param.values())
    return isinstance(param, tuple | list) and any(holds_jaxpr(p) for p in param)


def scan_split(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = (len(list(group)) for group in params["ft_in"].unpack())
    return consts, carry


def is_cotangent(eqn: Any, inherited: bool) -> bool:
    """Whether an equation computes a cotangent: transposed, and not rematerialised after that."""
    answer = inherited
    for entry in eqn.source_info.name_stack.stack:
        if entry.name == "transpose" and type(entry).__name__ == "Transform":
            answer = True
        elif entry.name == "rematted_computation":
            answer = False
    return answer
