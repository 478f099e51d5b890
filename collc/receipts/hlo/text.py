"""HLO text, read into computations and instructions.

It reads what XLA prints of a module, ``jitted.lower(...).compile().as_text()`` or a file that
``--xla_dump_to`` left, of jax 0.10 and 0.12, for CPU and CUDA::

    module      ::= "HloModule" name {", " key=value} table* computation*
    table       ::= ("FileNames" | "FunctionNames" | "FileLocations" | "StackFrames") row*
    computation ::= ["ENTRY"] %name ["(parameters) -> type"] "{" instruction* "}" {", " key=value}
    instruction ::= ["ROOT"] %name = type opcode(operand, ...) {", " key=value}
    operand     ::= [type] %name ["#" index]
    type        ::= dtype[sizes] ["{" layout "}"] | "(" [type {", " type}] ")"

Every line is one of these or the text is refused, and so is a line that ends too early, names an
operand that no line above it defines, or calls a computation that is not there. What hangs on an
instruction (its type, its configuration) is read when somebody asks for it.
"""

import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

from collc.errors import HloError
from collc.receipts.hlo.foreign import refuse
from collc.receipts.hlo.instructions import REPORT, Computation, Instruction, Text, error

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_QUOTED = re.compile(r"'[^']*'")
_COMMENT = re.compile(r"/\*.*?\*/")
_MODULE = re.compile(r"HloModule ([^\s,]+)")
_SIZES = re.compile(r", (is_scheduled|replica_count|num_partitions)=(true|\d+)(?=,|$)")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_END = re.compile(r"\}(?:, [\w\-]+=.*)?$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\S.*?) ([a-z][\w\-]*)\((.*)$")
_NAME = re.compile(r"%([\w.\-]+(?:#\d+)*)")
_CALLED = re.compile(
    r", (?!control-predecessors=)([\w\-]+)=(?:\{(%[^{}]*)\}|(%[\w.\-]+))"
    r"|, (branch_computations|calls)=\{([\w.\-][^{}]*)\}"
    r"|, (condition|body|calls|to_apply|true_computation|false_computation)=([\w.\-]+)"
)
_LITERALS = ("constant", "parameter", "iota")  # in the place of operands they have something else


def read(text: str) -> Text:
    """Read a module.

    Raises:
      HloError: the text is not that of one HLO module, is cut short, or has a line that is not
        understood; where it is one line's fault, the message names it.
    """
    refuse(text)
    reader = _Reader()
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        reader.line(number, line.rstrip())
    return reader.done()


class _Reader:
    """Where one is in a text, line by line."""

    def __init__(self) -> None:
        self.header: dict[str, str] | None = None
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        self.inside: Computation | None = None
        self.started: dict[str, Instruction] = {}  # and not done yet, nor handed on
        self.in_table = False
        self.last = (0, "")

    def line(self, number: int, line: str) -> None:
        if not line or line.lstrip().startswith("//"):
            return
        self.last = number, line
        clean = _STRING.sub('""', line)
        if "/*" in clean:
            clean = _COMMENT.sub("", clean).rstrip()
        if self.inside is None:
            self._outside(number, line, clean)
        elif clean[0] == "}" and _END.match(clean):
            for start in self.started.values():
                raise start.error(
                    "nothing waits for it, so a line is missing. Pass the whole text."
                )
            self.inside = None
        else:
            made = _instruction(number, line, clean)
            for name in _defined(made, self.inside):
                self.started.pop(name, None)
            self.inside.instructions[made.name] = made
            if made.starts and not made.is_root:
                self.started[made.name] = made

    def _outside(self, number: int, line: str, clean: str) -> None:
        if found := _MODULE.match(clean):
            if self.header is not None:
                raise error(number, line, "a second module begins. Pass one module at a time.")
            self.header = dict(_SIZES.findall(clean)) | {"name": found[1]}
        elif self.header is None:
            raise error(number, line, "HLO text begins with HloModule. Pass all of the text.")
        elif found := _HEADER.match(clean):
            if found[2] in self.computations:
                raise error(number, line, f"a second computation named {found[2]}. Pass one module")
            self.inside = self.computations[found[2]] = Computation(found[2])
            self.in_table = False
            if found[1]:
                if self.entry:
                    raise error(number, line, "a second ENTRY. Pass one module at a time.")
                self.entry = found[2]
        elif clean in _TABLES:
            self.in_table = True
        elif not (self.in_table and clean[0].isdigit()):
            raise error(number, line, f"collc cannot read this line. {REPORT}")

    def done(self) -> Text:
        if self.inside is not None:
            raise error(
                *self.last, "the text ends inside a computation. Pass all of compiled.as_text()."
            )
        if self.header is None or not self.entry:
            raise HloError(
                "No ENTRY computation found in what should be HLO text: it is cut short, or no"
                " module. Pass all of jitted.lower(...).compile().as_text()."
            )
        _check_calls(self.computations)
        return Text(
            name=self.header["name"],
            scheduled=self.header.get("is_scheduled") == "true",
            replicas=int(self.header.get("replica_count", 1)),
            partitions=int(self.header.get("num_partitions", 1)),
            computations=self.computations,
            entry=self.entry,
        )


def _instruction(number: int, line: str, clean: str) -> Instruction:
    found = _INSTRUCTION.match(clean)
    if not found or not _balanced(clean):
        raise error(
            number,
            line,
            f"collc cannot read this as an instruction: is the text cut short? {REPORT}",
        )
    _, name, written, opcode, rest = found.groups()
    inside, rest = _operands(rest)
    if rest and not rest.startswith(", "):
        raise error(number, line, f"collc cannot read what follows the operands. {REPORT}")
    return Instruction(
        number=number,
        line=line,
        name=name,
        written=written,
        opcode=opcode,
        operands=() if opcode in _LITERALS else _names(inside),
        called=tuple(_calls(rest)),
        rest=rest,
    )


def _balanced(clean: str) -> bool:
    """Whether all that a line opens is closed: a line that is cut short has something open."""

    def even(text: str) -> bool:
        return not text.count('"') % 2 and all(text.count(a) == text.count(b) for a, b in brackets)

    brackets = ("()", "{}", "[]")
    return even(clean) or even(_QUOTED.sub("", clean))  # names of mesh axes may have any of these


def _operands(text: str) -> tuple[str, str]:
    """What stands before the parenthesis that closes the operands, and what after it."""
    end = text.find(")")
    if text.find("(", 0, end) < 0:
        return text[:end], text[end + 1 :]
    depth = 1
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return text[: found.start()], text[found.end() :]
    return text, "?"


def _names(text: str) -> tuple[str, ...]:
    """The names of operands, with or without their ``%`` and their types before them."""
    return tuple(_NAME.findall(text) if "%" in text else (t.strip() for t in text.split(",") if t))


def _calls(rest: str) -> Iterator[tuple[str, str]]:
    for found in _CALLED.finditer(rest):
        key, names = [g for g in found.groups() if g is not None]
        for name in names.split(","):
            yield key, name.strip().lstrip("%")


def _defined(made: Instruction, computation: Computation) -> list[str]:
    """The names that its operands are, or are parts of: lines above it."""
    if made.name in computation.instructions:
        raise made.error(f"a second instruction named {made.name}. Pass one module as it is.")
    names = [name.partition("#")[0] for name in made.operands]
    for name in names:
        if name not in computation.instructions:
            raise made.error(f"no line above it defines its operand {name}. Pass the whole text.")
    return names


def _check_calls(computations: dict[str, Computation]) -> None:
    """Each computation that is called is there, and none is a part of itself."""
    calls: dict[str, dict[str, Instruction]] = {}
    for computation in computations.values():
        called = calls[computation.name] = {}
        for instruction in computation:
            for _, name in instruction.called:
                if name not in computations:
                    raise instruction.error(
                        f"it calls {name}, which is not there. Pass the whole text."
                    )
                called[name] = instruction
    try:
        TopologicalSorter(calls).prepare()
    except CycleError as e:
        called, caller = e.args[1][:2]
        raise (
            calls[caller][called].error(f"it calls {called}, which it is itself a part of.")
        ) from None
