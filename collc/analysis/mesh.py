"""Axes with sizes, outermost first: as text, ``host=4,gpu=8``, and as a mapping."""

import math
import re
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from collc.errors import MeshError
from collc.language.algebra import is_axis

MOST_RANKS = 1 << 16  # of a whole mesh: beyond that a proof is a matter of hours, not of a prompt

NAMES = "letters, digits and _ can, but no word of Python's own"


def parse_mesh(text: str) -> dict[str, int]:
    """The axes and sizes of ``host=4,gpu=8``, in that order. Raises MeshError for anything else.

    >>> parse_mesh("host=4, gpu=8")
    {'host': 4, 'gpu': 8}
    """
    mesh: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, size = (word.strip() for word in part.partition("="))
        if not equals or not axis:
            found = f"{part.strip()!r}, which is not an axis with its size" if part else "nothing"
            raise _bad_mesh(text, f"found {found}")
        if not is_axis(axis):
            raise _bad_mesh(text, f"{axis!r} cannot name an axis: {NAMES}")
        if axis == "n":
            raise _bad_mesh(text, "n is the number of ranks of any axis; give the axis a name")
        if axis in mesh:
            raise _bad_mesh(text, f"axis {axis} is named twice")
        # Long before int() would mind the length of the number.
        if not re.fullmatch(r"0*[1-9][0-9]{0,9}", size, re.ASCII):
            raise _bad_mesh(text, f"the size of {axis} has to be a positive integer, not {size!r}")
        mesh[axis] = int(size)
    if math.prod(mesh.values()) > MOST_RANKS:
        raise _bad_mesh(
            text, f"{math.prod(mesh.values()):,} ranks are more than the {MOST_RANKS:,} that fit"
        )
    return mesh


def checked_axes(axes: Any) -> dict[str, int]:
    """Axes that a caller gave as a mapping. Raises MeshError where they are none.

    >>> checked_axes({"host": 4, "gpu": 8})
    {'host': 4, 'gpu': 8}
    """
    if not isinstance(axes, Mapping) or not axes:
        raise MeshError(f"axes maps names to sizes, as in {{'host': 2, 'gpu': 8}}, not {axes!r}.")
    for axis, size in axes.items():
        if not isinstance(axis, str) or not is_axis(axis) or axis == "n":
            raise MeshError(f"{axis!r} cannot name an axis: {NAMES}, and not n.")
        if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
            raise MeshError(f"the size of axis {axis} has to be a positive integer, not {size!r}.")
    return {axis: int(size) for axis, size in axes.items()}


def _bad_mesh(text: str, why: str) -> MeshError:
    return MeshError(f"the mesh {text!r}: {why}. Write it as gpu=8, or host=4,gpu=8.")


def show_mesh(mesh: Mapping[str, int]) -> str:
    """The mesh as ``parse_mesh`` reads it."""
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())
