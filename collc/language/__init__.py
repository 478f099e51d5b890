"""The language of collective schedules. Never imports jax."""

from collc.language.algebra import Order, Schedule, beside, then
from collc.language.ir import ALL, add, copy, ranks
from collc.language.leaves import (
    Family,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    family,
    gather,
    native,
    order,
    reduce,
    reduce_scatter,
    scatter,
)

__all__ = [
    "ALL",
    "Family",
    "Order",
    "Schedule",
    "add",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "beside",
    "broadcast",
    "copy",
    "family",
    "gather",
    "native",
    "order",
    "ranks",
    "reduce",
    "reduce_scatter",
    "scatter",
    "then",
]
