"""Lower bounds on what any schedule for a collective has to do, without in-network reduction.

Sources: Chan et al. 2007, Patarasuk and Yuan 2009, Thakur, Rabenseifner and Gropp 2005.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from collc.language.states import Kind


@dataclass(frozen=True)
class Bounds:
    """For n ranks and a full buffer of S bytes: steps with one port, and fractions of S.

    ``sent`` and ``received``: what some rank has to send, and some rank to receive.
    """

    steps: int
    sent: Fraction
    received: Fraction


def bounds(kind: Kind, n: int, roots: int = 1) -> Bounds:
    """The lower bounds for a collective over n ranks. ``roots``: of how many a reduce ends at.

    >>> from collc.language.states import KINDS
    >>> bounds(KINDS["all_reduce"], 4)
    Bounds(steps=2, sent=Fraction(3, 2), received=Fraction(3, 2))
    """
    if n == 1:
        return Bounds(0, Fraction(0), Fraction(0))
    sent, received = _BYTES[kind.name](n)
    if roots > 1:
        # Whoever is no root sends the whole; together n - 1 buffers travel.
        whole, most = (Fraction(1) if roots < n else _most(n)), _most(n)
        sent, received = (whole, most) if kind.name == "reduce" else (most, whole)
    return Bounds((n - 1).bit_length(), sent, received)


def _most(n: int) -> Fraction:
    return Fraction(n - 1, n)


_BYTES: dict[str, Callable[[int], tuple[Fraction, Fraction]]] = {
    "all_reduce": lambda n: (2 * _most(n), 2 * _most(n)),
    "reduce_scatter": lambda n: (_most(n), _most(n)),
    "all_gather": lambda n: (_most(n), _most(n)),
    "all_to_all": lambda n: (_most(n), _most(n)),
    "reduce": lambda n: (Fraction(1), Fraction(1)),
    "broadcast": lambda n: (Fraction(1), Fraction(1)),
    "gather": lambda n: (Fraction(1, n), _most(n)),
    "scatter": lambda n: (_most(n), Fraction(1, n)),
}
