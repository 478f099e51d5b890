"""The collectives that HLO has, one class each."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from collc.receipts.hlo.types import Array
from collc.receipts.hlo.work import Work


@dataclass(frozen=True)
class Collective:
    """One collective instruction, and how often one device runs it in one call of the program.

    Attributes:
      name: the instruction's name in the text.
      dtypes: element types of the results as HLO writes them ("f32", "bf16", "pred").
      shapes: shapes of the results on one device, one per dtype. Operands and contexts, which a
        start form has in its type too, are left out.
      operands: dtype and shape of each operand, on one device.
      count: executions: the trip counts of all enclosing while loops, multiplied.
      asynchronous: whether it goes on beside other work: it is split into start and done, or inside
        an asynchronous wrapper, and XLA has not noted that it waits all the same (``is_sync``).
      kernel: what runs it on GPUs: "one-shot" or "two-shot" (XLA's own kernels, over NVLink) or
        "nccl" for XLA's default; "" where the text does not say, as on CPU.
      op_name: the ``op_name`` of its metadata (JAX's name stack), "" if it has none.
      beside: what is launched between its start and its done, in order, without collectives; () if
        it is not asynchronous or the module is not scheduled.
      kind: HLO's name for it, one of `KINDS`, whether or not it is split into start and done.
    """

    kind: ClassVar[str] = ""

    name: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    operands: tuple[tuple[str, tuple[int, ...]], ...]
    count: int
    asynchronous: bool
    kernel: str
    op_name: str
    beside: tuple[Work, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the results of one execution on one device; 4-bit types count as packed."""
        results = zip(self.dtypes, self.shapes, strict=True)
        return sum(Array(dtype, shape).bytes for dtype, shape in results)

    @property
    def wire(self) -> str:
        """The dtypes of the results, each once, joined by +."""
        return "+".join(dict.fromkeys(self.dtypes))

    @property
    def partners(self) -> tuple[tuple[int, ...], ...]:
        """Who takes part together: the groups, or a permute's (source, target) pairs."""
        raise NotImplementedError


@dataclass(frozen=True)
class Grouped(Collective):
    """``groups``: the devices that take part together, written out, by their position in the mesh.

    A position is one in ``mesh.devices.flat``.
    """

    groups: tuple[tuple[int, ...], ...]

    @property
    def partners(self) -> tuple[tuple[int, ...], ...]:
        return self.groups


@dataclass(frozen=True)
class Reducing(Grouped):
    """``reduction``: "add", "max", "min", "multiply", "and", "or", "xor" or "other"."""

    reduction: str


class AllReduce(Reducing):
    """Results like the operands, reduced over each group."""

    kind = "all-reduce"


class ReduceScatter(Reducing):
    """Each of a group has its share of what is reduced."""

    kind = "reduce-scatter"


class AllGather(Grouped):
    """Each of a group has what all of them had."""

    kind = "all-gather"


class AllToAll(Grouped):
    """Each of a group has a share of what each of them had."""

    kind = "all-to-all"


class RaggedAllToAll(Grouped):
    """An all-to-all of shares of unequal sizes, which are data: ``bytes`` are the most they are."""

    kind = "ragged-all-to-all"


class CollectiveBroadcast(Grouped):
    """All of a group have what its first device had."""

    kind = "collective-broadcast"


@dataclass(frozen=True)
class CollectivePermute(Collective):
    """``pairs``: (source, target) devices, by their position in the mesh, in one permute."""

    kind = "collective-permute"

    pairs: tuple[tuple[int, int], ...]

    @property
    def partners(self) -> tuple[tuple[int, ...], ...]:
        return self.pairs


CLASSES: tuple[type[Collective], ...] = (
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    CollectivePermute,
    CollectiveBroadcast,
    RaggedAllToAll,
)
KINDS = tuple(c.kind for c in CLASSES)


def count(collectives: Iterable[Collective]) -> dict[str, int]:
    """Executions by kind, with the trip counts of loops multiplied in; only kinds that occur."""
    total: Counter[str] = Counter()
    for c in collectives:
        total[c.kind] += c.count
    return dict(total)
