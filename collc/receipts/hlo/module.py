"""The collectives of optimised HLO, and what runs beside them.

`collc.receipts.hlo.text` has the grammar, `collc.receipts.hlo.collectives` the classes. Here a module's
computations are followed from ENTRY, to say which collectives run, how often, among whom, with how
many bytes, and beside which work.

Fail closed: what is not understood is refused with `HloError`, never skipped, so that a count can
be trusted. XLA splits and merges collectives and changes their dtypes; this says what it did. What
it cannot see is communication inside a kernel that somebody wrote by hand.
"""

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from collc.receipts.hlo import collectives
from collc.receipts.hlo.collectives import CLASSES, KINDS, Collective, count
from collc.receipts.hlo.flight import Flight, asynchronous, beside
from collc.receipts.hlo.flow import applied, runs
from collc.receipts.hlo.groups import listed, replica_groups
from collc.receipts.hlo.instructions import REPORT, Computation, Instruction, Text
from collc.receipts.hlo.text import read
from collc.receipts.hlo.types import arrays
from collc.receipts.hlo.work import Buffer, Workload

_CLASS = {c.kind: c for c in CLASSES}
_LIKE_A_COLLECTIVE = re.compile(r"all-(?:reduce|gather|to-all)|reduce-scatter|collective-|ragged-a")
_AMONG = re.compile(r", (replica_groups|source_target_pairs)=")
# Their groups are of replicas unless they say otherwise; those of others are of partitions.
_OF_REPLICAS = ("all-reduce", "all-gather", "reduce-scatter")
_GLOBAL = ", use_global_device_ids=true"
_REDUCTIONS = {"maximum": "max", "minimum": "min"} | {
    opcode: opcode for opcode in ("add", "multiply", "and", "or", "xor")
}


@dataclass(frozen=True)
class Module:
    """A compiled module, as far as a receipt needs it.

    Attributes:
      name: of the module.
      scheduled: whether its text is in the order in which things are launched.
      devices: how many it runs on: partitions times replicas.
      cuda: whether XLA compiled it for GPUs.
      collectives: those that one call of the program runs, in program order. See `parse_hlo`.
    """

    name: str
    scheduled: bool
    devices: int
    cuda: bool
    collectives: tuple[Collective, ...]
    text: Text = field(repr=False, compare=False)
    workload: Workload = field(repr=False, compare=False)

    @cached_property
    def in_flight(self) -> int:
        """The most collectives between start and done at once; one that waits counts 1."""
        return Flight(self.text, KINDS).most

    @property
    def flops(self) -> int:
        """Of the matrix products and convolutions of one call on one device. See `flops_exact`."""
        return self.workload.total.number

    @property
    def flops_exact(self) -> bool:
        """False if more may run: in a loop of unknown trip count, or another branch."""
        return self.workload.total.exact

    @cached_property
    def constants(self) -> int:
        """Bytes of the arrays that are part of the program itself, on each device."""
        each = (i for c in self.text.computations.values() for i in c if i.opcode == "constant")
        return sum(i.bytes for i in each if i.results[0].shape)

    def buffers(self, k: int) -> tuple[Buffer, ...]:
        """The k largest arrays that the program makes or is given, largest first."""
        return self.workload.buffers(k)


def parse(text: str) -> Module:
    """Read the text of an optimised HLO module.

    Raises:
      HloError: see `parse_hlo`. `Module.flops` raises it too, for a product that it cannot read.
    """
    parsed = read(text)
    _check_partitioned(parsed)
    workload = Workload(parsed)
    cuda = any(marked in text for marked in _CUDA)
    return Module(
        name=parsed.name,
        scheduled=parsed.scheduled,
        devices=parsed.devices,
        cuda=cuda,
        collectives=_Reader(parsed, workload, cuda).reached(parsed.entry),
        text=parsed,
        workload=workload,
    )


def _check_partitioned(text: Text) -> None:
    """Refuses what XLA's partitioner has yet to put collectives into."""
    if text.scheduled:
        return
    for computation in text.computations.values():
        for i in computation:
            target = _TARGET.search(i.line) if i.opcode == "custom-call" else None
            asks = bool(target) or (i.opcode != "parameter" and ", sharding=" in i.rest)
            if asks:
                raise i.error(
                    "this is HLO from before partitioning: its collectives are not in it yet. Pass"
                    " compiled.as_text(), or the after_optimizations.txt of --xla_dump_to."
                )


_TARGET = re.compile(r'custom_call_target="(?:Sharding|SPMD\w+|xla\.sdy[\w.]*)"')

# What XLA:GPU leaves in a text: the first in its header, the others in configurations.
_CUDA = ("fingerprint_before_lhs=", '"operation_queue_id":', '"collective_backend_config":')


def parse_hlo(text: str) -> tuple[Collective, ...]:
    """The collectives that one call of an optimised HLO module runs, in program order.

    Starting from ENTRY it follows fusions, calls, asynchronous wrappers (once, at their start),
    while loops (times the trip count, which XLA notes as ``known_trip_count`` wherever the bounds
    are constant) and conditionals. A computation that is called twice gives its collectives twice,
    one that is not reachable gives none. Of a conditional the first branch is taken, which is right
    only because all branches must hold the same collectives, in any order: others are refused.

    Args:
      text: what ``jitted.lower(...).compile().as_text()`` returns, or a dump of ``--xla_dump_to``.

    Raises:
      HloError: names the line. The text is cut short, or of something else; a line or a collective
        is not understood; a called computation is missing; a collective runs in a loop of unknown
        trip count, in branches that differ, or where nothing says how often it runs; XLA has turned
        a collective into send and recv.
    """
    return parse(text).collectives


class _Reader:
    """The collectives that each computation runs, read once."""

    def __init__(self, text: Text, workload: Workload, cuda: bool):
        self.text = text
        self.workload = workload
        self.cuda = cuda
        self._known: dict[str, tuple[Collective, ...]] = {}

    def reached(self, name: str) -> tuple[Collective, ...]:
        if name not in self._known:
            computation = self.text.computations[name]
            self._known[name] = tuple(c for i in computation for c in self._run_by(computation, i))
        return self._known[name]

    def _run_by(self, computation: Computation, instruction: Instruction) -> list[Collective]:
        """What one instruction runs: itself, if it is a collective, or what it calls."""
        if instruction.ends:
            return []  # the start of the pair has been counted
        base = instruction.base
        if base in ("send", "recv") and "is_host_transfer=true" not in instruction.rest:
            raise instruction.error(
                "XLA has turned a collective into send and recv: no way to count it."
            )
        found = [(run.times, self.reached(run.computation)) for run in runs(instruction)]
        if any(self.reached(name) for name in applied(instruction)):
            raise instruction.error(
                f"the reduction of a collective holds another one. {REPORT}"
                if base in KINDS
                else f"{base} calls collectives, and nobody knows how often. {REPORT}"
            )
        if base in KINDS:
            return [self._collective(computation, instruction)]
        if _LIKE_A_COLLECTIVE.match(base) or _AMONG.search(instruction.rest):
            raise instruction.error(
                f"not one of the collectives that collc knows, {', '.join(KINDS)}."
            )
        if base == "conditional":
            return _chosen(instruction, [branch for _, branch in found])
        inner = [c for times, run in found for c in _repeated(instruction, run, times)]
        if not inner or not instruction.starts:
            return inner
        # XLA:GPU configures the wrapper, not what is in it.
        kernel = self._kernel(instruction)
        inner = [replace(c, kernel=c.kernel or kernel) for c in inner]
        if asynchronous(instruction):
            work = self._beside(computation, instruction)
            return [replace(c, asynchronous=True, beside=work) for c in inner]
        return inner

    def _collective(self, computation: Computation, instruction: Instruction) -> Collective:
        if "slice_sizes=" in instruction.rest:
            raise instruction.error("a permute of slices: its type does not tell its bytes.")
        results = instruction.results
        operands = [
            a
            for k in range(len(instruction.operands))
            for a in arrays(computation.operand(instruction, k))
        ]
        if not results or any(a.dtype in ("token", "opaque") for a in results):
            raise instruction.error(f"the type {instruction.written} has no known size. {REPORT}")
        free = asynchronous(instruction)
        return _CLASS[instruction.base](
            name=instruction.name,
            dtypes=tuple(a.dtype for a in results),
            shapes=tuple(a.shape for a in results),
            operands=tuple((a.dtype, a.shape) for a in operands),
            count=1,
            asynchronous=free,
            kernel=self._kernel(instruction),
            op_name=instruction.op_name,
            beside=self._beside(computation, instruction) if free else (),
            **self._among(instruction),
        )

    def _among(self, instruction: Instruction) -> dict[str, Any]:
        """The fields that only some collectives have."""
        kind = instruction.base
        if kind == "collective-permute":
            pairs = listed(instruction.attribute("source_target_pairs"))
            if pairs is None or any(len(pair) != 2 for pair in pairs):
                raise instruction.error(f"source_target_pairs is not a list of pairs. {REPORT}")
            self._check_devices(instruction, pairs)
            return {"pairs": pairs}
        try:
            groups = replica_groups(
                instruction.attribute("replica_groups"), self.text.replicas, self.text.partitions
            )
        except ValueError as e:
            raise instruction.error(f"replica_groups cannot be read: {e}. {REPORT}") from None
        self._check_devices(instruction, groups)
        if issubclass(_CLASS[kind], collectives.Reducing):
            return {"groups": groups, "reduction": self._reduction(instruction)}
        return {"groups": groups}

    def _check_devices(
        self, instruction: Instruction, partners: tuple[tuple[int, ...], ...]
    ) -> None:
        """That the numbers are devices, and not replicas of which each has many partitions."""
        n = self.text.devices
        if wrong := [d for group in partners for d in group if d >= n]:
            raise instruction.error(f"it names device {wrong[0]}, and the module has {n}.")
        if self.text.partitions == 1:
            return
        if ", channel_id=" not in instruction.rest:
            raise instruction.error(f"without channel_id it is among replicas alone. {REPORT}")
        if instruction.base in _OF_REPLICAS and _GLOBAL not in instruction.rest:
            raise instruction.error(f"without{_GLOBAL[1:]} its groups are of replicas. {REPORT}")

    def _reduction(self, instruction: Instruction) -> str:
        names = [name for key, name in instruction.called if key == "to_apply"]
        if len(names) != 1:
            raise instruction.error(
                f"{instruction.base} has to have one to_apply=%computation. {REPORT}"
            )
        computation = self.text.computations[names[0]]
        root = computation.root
        while root is not None and root.opcode == "convert":  # of a type that it promotes
            root = computation.instructions.get(root.operands[0])
        return _REDUCTIONS.get(root.opcode, "other") if root else "other"

    def _kernel(self, instruction: Instruction) -> str:
        config = instruction.config.get("collective_backend_config", {})
        strategy = config.get("kernel_strategy", "").removeprefix("KERNEL_STRATEGY_")
        if strategy == "DEFAULT":
            backend = config.get("backend", "DEFAULT").lower()
            return ("nccl" if backend == "default" else backend) if self.cuda else ""
        return strategy.removeprefix("TRITON_").lower().replace("_", "-")

    def _beside(self, computation: Computation, start: Instruction) -> tuple[Any, ...]:
        if not self.text.scheduled:
            return ()
        return tuple(
            self.workload.work(computation, i)
            for i in beside(computation, start)
            if i.base not in KINDS and not self._wraps(i)
        )

    def _wraps(self, instruction: Instruction) -> bool:
        """Whether it is an asynchronous form of collectives."""
        return instruction.base == "async" and any(
            self.reached(r.computation) for r in runs(instruction)
        )


def _repeated(
    line: Instruction, run: tuple[Collective, ...], times: int | None
) -> tuple[Collective, ...]:
    if times is None and run:
        held = ", ".join(sorted({c.kind for c in run}))
        raise line.error(
            f"a while loop runs {held}, and XLA does not know how often. Only loops with constant"
            " bounds can be counted."
        )
    return run if times in (1, None) else tuple(replace(c, count=c.count * times) for c in run)


def _chosen(line: Instruction, branches: list[tuple[Collective, ...]]) -> list[Collective]:
    sums: list[Counter[Collective]] = []
    for branch in branches:
        total: Counter[Collective] = Counter()
        for c in branch:  # what they do counts, not when they do it
            bare = replace(c, name="", op_name="", count=1, asynchronous=False, beside=())
            total[bare] += c.count
        sums.append(total)
    if any(s != sums[0] for s in sums):
        held = "; ".join(str(count(b)) if b else "none" for b in branches)
        raise line.error(
            f"the branches of a conditional hold different collectives ({held}), so how many run"
            " depends on the data. Let all branches run the same ones."
        )
    return list(branches[0])
