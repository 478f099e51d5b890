"""What a mesh of JAX is made with."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType

from collc.errors import MeshError


def axis_types(given: Any, count: int) -> tuple[AxisType, ...]:
    """A type for each of so many axes: all Auto, all the one that is given, or those.

    Raises MeshError.
    """
    if given is None or isinstance(given, AxisType):
        return (given or AxisType.Auto,) * count
    several = isinstance(given, Sequence | np.ndarray) and not isinstance(given, str)
    found: tuple[Any, ...] = tuple(given) if several else (given,)
    if len(found) != count or not all(isinstance(kind, AxisType) for kind in found):
        raise MeshError(
            f"axis_types has to be one jax.sharding.AxisType, or one for each of {count} axes, not "
            f"{given!r}."
        )
    return found
