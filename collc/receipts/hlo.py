"""A small parser of the collectives in optimised HLO text.

It reads as much of what ``jitted.lower(...).compile().as_text()`` prints as it takes to say which
collectives run, how often, among whom, and with how many bytes::

    module      ::= header computation*
    computation ::= ["ENTRY"] "%name (parameters) -> type {" instruction* "}"
    instruction ::= ["ROOT"] "%name = type opcode(operands), key=value, ..."

Fail closed: what is not understood is refused with `HloError`, never skipped, so that a count can
be trusted. XLA splits and merges collectives and changes their dtypes; this says what it did.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from collc.errors import HloError
from collc.receipts.groups import listed, replica_groups

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)

_BITS = {
    **{f"{sign}{bits}": bits for sign in "su" for bits in (1, 2, 4, 8, 16, 32, 64)},
    **{"pred": 8, "f4e2m1fn": 4, "f16": 16, "bf16": 16, "f32": 32, "f64": 64},
    **{"c64": 64, "c128": 128},
}

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_COMMENT = re.compile(r"/\*.*?\*/")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\S.*?) ([a-z][\w\-]*)\((.*)$")
# a bare word, thus neither an instruction's name (%all-reduce.3) nor an axis name ('all-reduce')
_MENTION = re.compile(
    r"(?<![\w%.\-'])(?:all-reduce|all-gather|all-to-all|reduce-scatter|collective-|ragged-)[\w.\-]*"
)
_CALLED = re.compile(r"([\w\-]+)=(?:(%[\w.\-]+)|\{(%[^{}]*)\})")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{[^{}]*\})?")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')

# Attributes by which an instruction runs computations, each once (a loop's: per iteration). An
# instruction without them is refused: a call that is not seen would be a collective not counted.
_RUNS = {
    "while": ("condition", "body"),
    "fusion": ("calls",),
    "call": ("to_apply",),
    "async": ("calls",),
}
_BRANCHES = ("branch_computations", "true_computation", "false_computation")

_REPORT = "If this is what XLA printed, collc has to learn it: please report the line."


@dataclass(frozen=True)
class Collective:
    """One collective instruction, and how often one device runs it in one call of the program.

    Attributes:
      name: the instruction's name in the text.
      kind: one of `KINDS`, whether or not it is split into start and done.
      dtypes: element types of the results as HLO writes them ("f32", "bf16", "pred").
      shapes: shapes of the results on one device, one per dtype. Operands and contexts, which a
        start form has in its type too, are left out.
      groups: the devices that take part together, written out; None for a collective-permute.
      pairs: (source, target) pairs of a collective-permute, else None.
      count: executions: the trip counts of all enclosing while loops, multiplied.
      asynchronous: whether it is a start and done pair, or inside an asynchronous wrapper.
      op_name: the ``op_name`` of its metadata (JAX's name stack), "" if it has none.
    """

    name: str
    kind: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[int, ...], ...] | None
    pairs: tuple[tuple[int, int], ...] | None
    count: int
    asynchronous: bool
    op_name: str

    @property
    def bytes(self) -> int:
        """Bytes of the results of one execution on one device; 4-bit types count as packed."""
        sizes = (_bits(d) * math.prod(s) for d, s in zip(self.dtypes, self.shapes, strict=True))
        return sum(-(-bits // 8) for bits in sizes)


def count(collectives: Iterable[Collective]) -> dict[str, int]:
    """Executions by kind, with the trip counts of loops multiplied in; only kinds that occur."""
    total: Counter[str] = Counter()
    for c in collectives:
        total[c.kind] += c.count
    return dict(total)


def parse_hlo(text: str) -> tuple[Collective, ...]:
    """The collectives that one call of an optimised HLO module runs, in program order.

    Starting from ENTRY it follows fusions, calls, asynchronous wrappers (once, at their start),
    while loops (times the trip count, which XLA notes as ``known_trip_count`` wherever the bounds
    are constant) and conditionals. A computation that is called twice gives its collectives twice,
    one that is not reachable gives none. Of a conditional the first branch is taken, which is right
    only because all branches must hold the same collectives, in any order: others are refused.

    Args:
      text: what ``jitted.lower(...).compile().as_text()`` returns.

    Raises:
      HloError: names the line. The text is cut short; a line or a collective is not understood; a
        called computation is missing; a collective runs in a loop of unknown trip count, in
        branches that differ, or where nothing says how often it runs; XLA has turned a collective
        into send and recv.
    """
    return _Module(text).collectives()


@dataclass(frozen=True)
class _Line:
    """A line and the instruction on it; ``body`` is what follows its opcode, without strings."""

    number: int
    text: str
    name: str = ""
    type: str = ""
    opcode: str = ""
    body: str = ""

    def error(self, why: str) -> HloError:
        text = self.text.strip()
        text = text if len(text) < 400 else text[:400] + " ..."
        return HloError(f"HLO line {self.number}: {why}\n  {text}")


class _Module:
    """The computations of a module, by name, and the collectives that each of them runs."""

    def __init__(self, text: str):
        self.computations: dict[str, list[_Line]] = {}
        self.sizes = {"replica_count": 1, "num_partitions": 1}  # XLA prints them if they are not 1
        self.entry = ""
        self._known: dict[str, tuple[Collective, ...]] = {}
        self._open: list[str] = []
        current: list[_Line] | None = None
        line = _Line(0, "")
        for number, raw in enumerate(text.splitlines(), start=1):
            line = _Line(number, raw)
            clean = _COMMENT.sub("", _STRING.sub('""', raw)).rstrip()
            if current is None and (header := _HEADER.match(clean)):
                if header[2] in self.computations:
                    raise line.error(f"a second computation named {header[2]}. Pass one module.")
                current = self.computations[header[2]] = []
                self.entry = header[2] if header[1] else self.entry
                continue  # the names of its parameters may look like collectives
            if clean.startswith("}"):
                current = None
            elif clean.startswith("HloModule "):
                for key, size in re.findall(r"\b(replica_count|num_partitions)=(\d+)", clean):
                    self.sizes[key] = int(size)
            elif current is not None and clean:
                if not (found := _INSTRUCTION.match(clean)):
                    raise line.error(f"collc cannot read this as an instruction. {_REPORT}")
                line = _Line(number, raw, *found.groups())
                current.append(line)
            for word in _MENTION.findall(clean):
                if word != line.opcode:
                    raise line.error(f"{word} is not where an opcode belongs. {_REPORT}")
        if current is not None:
            raise line.error("the text ends inside a computation. Pass all of compiled.as_text().")
        if not self.entry:
            raise HloError(
                "No ENTRY computation found in what should be HLO text. Pass"
                " jitted.lower(...).compile().as_text()."
            )

    def collectives(self) -> tuple[Collective, ...]:
        return self._reached(self.entry, _Line(0, f"ENTRY %{self.entry}"))

    def _reached(self, name: str, caller: _Line) -> tuple[Collective, ...]:
        if name not in self.computations:
            raise caller.error(f"it calls {name}, which is not there. Pass the whole text.")
        if name in self._open:
            raise caller.error(f"it calls {name}, which it is itself a part of.")
        if name not in self._known:
            self._open.append(name)
            found = [c for line in self.computations[name] for c in self._run_by(line)]
            self._open.pop()
            self._known[name] = tuple(found)
        return self._known[name]

    def _run_by(self, line: _Line) -> list[Collective]:
        """What one instruction runs: itself, if it is a collective, or what it calls."""
        opcode = line.opcode
        if opcode.endswith(("-done", "-update")):
            return []  # the start of the pair has been counted
        if opcode in ("send", "recv") and "is_host_transfer=true" not in line.body:
            raise line.error("XLA has turned a collective into send and recv: no way to count it.")
        called: dict[str, list[tuple[Collective, ...]]] = {}
        for key, one, several in _CALLED.findall(line.body):
            if key != "control-predecessors":
                names = [one] if one else several.split(",")
                reached = [self._reached(n.strip().lstrip("%"), line) for n in names]
                called.setdefault(key, []).extend(reached)
        caller = opcode.removesuffix("-start")
        for key in _RUNS.get(caller, ()):
            if len(called.get(key, ())) != 1:
                raise line.error(f"{opcode} has to have one {key}=%computation. {_REPORT}")
        if caller == "conditional" and not called.keys() & set(_BRANCHES):
            raise line.error(f"a conditional has to name its branches. {_REPORT}")
        inner = [c for branches in called.values() for branch in branches for c in branch]
        if _MENTION.match(opcode):
            if inner:
                raise line.error(f"the reduction of a collective holds another one. {_REPORT}")
            return [self._collective(line)]
        if not inner:
            return []
        if opcode == "while":
            return _looped(line, called["condition"][0], called["body"][0])
        if opcode == "conditional":
            return _chosen(line, [branch for branches in called.values() for branch in branches])
        if caller in _RUNS:
            started = opcode.endswith("-start")
            return [replace(c, asynchronous=c.asynchronous or started) for c in inner]
        raise line.error(f"{opcode} calls collectives, and nobody knows how often. {_REPORT}")

    def _collective(self, line: _Line) -> Collective:
        kind = line.opcode.removesuffix("-start")
        started = kind != line.opcode
        if kind not in KINDS:
            raise line.error(f"not one of the collectives that collc knows, {', '.join(KINDS)}.")
        if "slice_sizes=" in line.body:
            raise line.error("a permute of slices in place: its type does not tell its bytes.")
        result = _type(line)
        # A start's type is (operands, results, contexts ...); that of older all-reduces is results.
        if started and (kind != "all-reduce" or _nested(result)):
            if not isinstance(result, list) or len(result) < 2:
                raise line.error("a start has to have the type (operands, results, ...).")
            result = result[1]
        arrays = list(_flat(result))
        if not arrays or not all(_bits(dtype) for dtype, _ in arrays):
            raise line.error(f"the type {line.type} has no known size. {_REPORT}")
        groups = pairs = None
        if kind == "collective-permute":
            found = listed(_attribute(line, "source_target_pairs"))
            if found is None or any(len(pair) != 2 for pair in found):
                raise line.error(f"source_target_pairs is not a list of pairs. {_REPORT}")
            pairs = tuple((source, target) for source, target in found)
        else:
            try:
                groups = replica_groups(_attribute(line, "replica_groups"), **self.sizes)
            except ValueError as e:
                raise line.error(f"replica_groups cannot be read: {e}. {_REPORT}") from None
        op_name = _OP_NAME.search(line.text)
        return Collective(
            name=line.name,
            kind=kind,
            dtypes=tuple(dtype for dtype, _ in arrays),
            shapes=tuple(shape for _, shape in arrays),
            groups=groups,
            pairs=pairs,
            count=1,
            asynchronous=started,
            op_name=op_name[1] if op_name else "",
        )


def _looped(
    line: _Line, condition: tuple[Collective, ...], body: tuple[Collective, ...]
) -> list[Collective]:
    trips = _TRIPS.search(line.text)
    if not trips:
        held = ", ".join(sorted({c.kind for c in condition + body}))
        raise line.error(
            f"a while loop runs {held}, and XLA does not know how often. Only loops with constant"
            " bounds can be counted."
        )
    n = int(trips[1])
    asked = n + 1  # the condition is asked once more, to leave
    return [
        *(replace(c, count=c.count * asked) for c in condition),
        *(replace(c, count=c.count * n) for c in body),
    ]


def _chosen(line: _Line, branches: list[tuple[Collective, ...]]) -> list[Collective]:
    sums: list[Counter[Collective]] = []
    for branch in branches:
        total: Counter[Collective] = Counter()
        for c in branch:
            total[replace(c, name="", op_name="", count=1)] += c.count
        sums.append(total)
    if any(s != sums[0] for s in sums):
        held = "; ".join(str(count(b)) if b else "none" for b in branches)
        raise line.error(
            f"the branches of a conditional hold different collectives ({held}), so how many run"
            " depends on the data. Let all branches run the same ones."
        )
    return list(branches[0])


def _attribute(line: _Line, key: str) -> str:
    _, found, value = line.body.partition(f", {key}=")
    if not found:
        raise line.error(f"{line.opcode} has to have {key}, and here it has none. {_REPORT}")
    return value


def _type(line: _Line) -> Any:
    """The type of an instruction: (dtype, shape) of an array, a list of types for a tuple."""
    stack: list[list[Any]] = [[]]
    text, at = line.type, 0
    while at < len(text):
        if array := _ARRAY.match(text, at):
            stack[-1].append((array[1], tuple(int(d) for d in array[2].split(",") if d)))
            at = array.end()
            continue
        if text[at] == "(":
            stack.append([])
        elif text[at] == ")" and len(stack) > 1:
            top = stack.pop()
            stack[-1].append(top)
        elif text[at] not in ", ":
            raise line.error(f"the type {text!r} cannot be read. {_REPORT}")
        at += 1
    if len(stack) != 1 or len(stack[0]) != 1:
        raise line.error(f"the type {text!r} cannot be read. {_REPORT}")
    return stack[0][0]


def _nested(tree: Any) -> bool:
    return isinstance(tree, list) and any(isinstance(t, list) for t in tree)


def _flat(tree: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    if isinstance(tree, list):
        for t in tree:
            yield from _flat(t)
    else:
        yield tree


def _bits(dtype: str) -> int:
    """Bits of an element, 0 if it is not known or no data (a token)."""
    return 8 if re.fullmatch(r"f8e\w+", dtype) else _BITS.get(dtype, 0)
