"""The terms of nccl-tests: how sizes are swept, bus bandwidth, dtypes. Loads no jax."""

import math
from collections.abc import Sequence
from fractions import Fraction

from collc.errors import DataError, nearest
from collc.language.states import COLLECTIVES, KINDS, SHARD
from collc.machine.units import show_size

# Those whose buffer is cut in a chunk for each rank, so that ranks have to be numbered alike.
CUT = tuple(c for c in COLLECTIVES if KINDS[c].scatters)
# An output of another shape takes no input's place.
RESHAPED = tuple(c for c in CUT if SHARD in (KINDS[c].before, KINDS[c].after))
MOST_SIZES = 1000

# Bytes of an element, by jax's names and, where they differ, those of nccl-tests.
DTYPES = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1,
    "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
}  # fmt: skip
ALIASES = {"float": "float32", "double": "float64", "half": "float16"}


def parse_dtype(text: str) -> str:
    """The name that jax has for a dtype of nccl-tests. Raises DataError.

    >>> parse_dtype("half")
    'float16'
    """
    name = ALIASES.get(text, text)
    if name not in DTYPES:
        raise DataError(f"bench has no dtype {text!r}. {nearest(text, [*DTYPES, *ALIASES])}")
    return name


def swept(begin: int, end: int, factor: float = 4, step: int | None = None) -> list[int]:
    """The sizes from ``begin`` to at most ``end`` bytes, each ``factor`` times the last, or ``step``
    bytes more. Raises DataError."""
    if begin > end:
        raise DataError(
            f"the sizes begin at {show_size(begin)} and end at {show_size(end)}, which is less. "
            f"End at {show_size(begin)} or more."
        )
    if step is None and not 1 < factor < math.inf:
        raise DataError(
            f"the factor between sizes is {factor:g}. Give one above 1; for a single size "
            "begin and end with it."
        )
    if step is not None and step < 1:
        raise DataError(f"the step between sizes is {step} bytes. Give 1 or more.")
    sizes, size = [], begin
    while size <= end:
        sizes.append(size)
        if len(sizes) > MOST_SIZES:
            raise DataError(
                f"there are more than {MOST_SIZES} sizes from {show_size(begin)} to "
                f"{show_size(end)}. Take a larger factor or step."
            )
        grown = min(size * factor, end + 1) if step is None else size + step
        size = max(size + 1, int(grown))
    return sizes


def counts(collective: str, sizes: Sequence[int], n: int, dtype: str) -> list[int]:
    """Elements of S for each size, rounded down to what fits; those that come out equal once.

    S is what nccl-tests calls size: the whole array, n chunks where the collective cuts it. Raises
    DataError where a size holds nothing.
    """
    whole = n if collective in CUT else 1
    least = whole * DTYPES[dtype]
    found: dict[int, None] = {}
    for size in sizes:
        if size < least:
            each = f" for each of {n} ranks" if whole > 1 else ""
            raise DataError(
                f"{show_size(size)} bytes do not hold one {dtype}{each}. Begin at {least} or more."
            )
        found[size // least * whole] = None
    return list(found)


def lengths(collective: str, count: int, n: int) -> tuple[int, int]:
    """Elements of a rank's input and output, where S has ``count`` elements."""
    before = count // n if collective == "all_gather" else count
    after = count // n if collective == "reduce_scatter" else count
    return before, after


def bus_factor(collective: str, n: int) -> Fraction:
    """busbw over algbw: what the busiest link has to carry of S, as nccl-tests has it.

    >>> str(bus_factor("all_reduce", 4)), str(bus_factor("all_gather", 4))
    ('3/2', '3/4')
    """
    if collective == "broadcast":
        return Fraction(1)
    return Fraction((2 if collective == "all_reduce" else 1) * (n - 1), n)
