"""What XLA runs of a schedule: rounds of equal arrays, and collectives of its own."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from collc.language.ir import Ints
from collc.machine import nccl
from collc.machine.flow import Messages, Moment, Part
from collc.machine.placement import Placement
from collc.machine.topology import Paths

ELEMENT = 4  # bytes of an element where nothing else is said: float32


@dataclass(frozen=True, eq=False)
class Round:
    """One ppermute: its messages, between which devices, and their ways."""

    sent: Messages
    src: Ints
    dst: Ints
    paths: Paths
    far: bool  # whether any leaves its node

    @property
    def latency(self) -> float:
        """Seconds of the slowest way, beside its bytes."""
        return float(self.paths.latency.max())

    @property
    def chunks(self) -> int:
        """A ppermute moves equal arrays: as many chunks as any pair has."""
        return int(self.sent.chunks.max())

    @property
    def adds(self) -> bool:
        return bool(self.sent.added.any())


def rounds(moment: Moment, placement: Placement) -> Iterator[Round]:
    """The rounds of a moment, in order."""
    machine, order = placement.machine, placement.order
    for sent in moment.messages().by_round():
        src, dst = order[sent.src], order[sent.dst]
        far = bool((machine.node_of(src) != machine.node_of(dst)).any())
        yield Round(sent, src, dst, machine.paths(src, dst), far)


def whole(chunk: Fraction, element: int = ELEMENT) -> int:
    """Bytes of a chunk of so many, in whole elements."""
    return math.ceil(chunk / element) * element


def native(part: Part, placement: Placement, size: float) -> nccl.Native:
    """What XLA's own does for a part, of ``size`` bytes on each rank of the mesh."""
    groups = placement.order[part.table.T]
    own = float(Fraction(size) * part.strand.share)
    return nccl.native(placement.machine, groups, part.leaf.facing.name, own)
