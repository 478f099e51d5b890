"""Instructions of HLO and the names that JAX gave them, which hold the scopes.

A CPU's events name the instruction only, and a GPU's cut its name at a comma. So names come from the
program: from its HLO text, or from the HLO that the profiler stores in HOST.xplane.pb. That is a
protobuf, of which a few fields are read here:

    XSpace.planes = 1; XPlane.name = 2, .event_metadata = 4 {key, value = 2}
    XEventMetadata.stats = 5; XStat.bytes_value = 6: an HloProto
    HloProto.hlo_module = 1; HloModuleProto.name = 1, .computations = 3
    HloComputationProto.instructions = 2; HloInstructionProto.name = 1, .metadata = 7
    OpMetadata.op_name = 2
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from collc.errors import DataError
from collc.lowering.sends import title
from collc.lowering.sync import SCOPE
from collc.receipts.hlo.text import read
from collc.receipts.matching import joined
from collc.receipts.profile.trace import MOST_BYTES
from collc.receipts.receipt import scope

Program = tuple[str, Mapping[str, str]]  # a module's name, and op_name by instruction


@dataclass(frozen=True)
class Place:
    """Where in a program an operation stands: see `Span`."""

    title: str = ""
    round: str = ""
    plan: bool = False


class Names:
    """The places of the operations of some programs, of which several may have one name."""

    def __init__(self, programs: Iterable[Program]):
        self._programs: dict[str, list[Mapping[str, str]]] = {}
        for module, names in programs:
            self._programs.setdefault(module, []).append(names)
        self._places: dict[tuple[str, str], Place | None] = {}

    def place(self, module: str, operation: str) -> Place | None:
        """Where it stands, None where no program has it. Raises DataError where several differ."""
        key = module, operation
        if key not in self._places:
            found = {
                placed(names[operation])
                for names in self._programs.get(module, ())
                if operation in names
            }
            if len(found) > 1:
                titles = " or ".join(sorted(f"{p.title} {p.round}".strip() for p in found))
                raise DataError(
                    f"several programs are called {module}, and {operation} is {titles} in them. Pass "
                    "hlo=compiled.as_text() of the one that ran."
                )
            self._places[key] = found.pop() if found else None
        return self._places[key]


def placed(op_name: str) -> Place:
    """What JAX's name stack says.

    >>> placed("jit(f)/shard_map/while/body/collc/ring.all_gather/host,gpu/r0-6/ppermute")
    Place(title='ring.all_gather @ (host, gpu)', round='r0-6', plan=True)
    >>> placed("jit(f)/collc/ring.reduce_scatter/gpu/jit(remainder)/rem").title, placed("").title
    ('ring.reduce_scatter @ gpu', '')
    >>> placed("jit(f)/mlp/dot_general")
    Place(title='mlp/dot_general', round='', plan=False)
    """
    found = [_one(name) for name in joined(op_name)]
    titles = dict.fromkeys(p.title for p in found)
    rounds = {p.round for p in found}
    return Place(
        " + ".join(titles),
        rounds.pop() if len(rounds) == 1 else "",
        any(p.plan for p in found),
    )


# The last one, since the scope of a sync is around those of its schedules.
_OURS = re.compile(rf"(?:.*/)?(?!{SCOPE}/)(collc/[^/]+/[^/]+)(?:/(r\d+(?:-\d+)?))?(?:/.*)?")


def _one(op_name: str) -> Place:
    if ours := _OURS.fullmatch(op_name):
        return Place(title(ours[1]), ours[2] or "", True)
    return Place(scope(op_name))


def is_cut(op_name: str) -> bool:
    """Whether a name that a GPU's event has may end at a comma between the axes of a scope."""
    return re.search(r"(?:^|/)collc/[^/]+/[^/]+$", op_name) is not None


def of_text(text: str) -> Program:
    """The names in a module's text. Raises HloError."""
    module = read(text)
    return module.name, {i.name: i.op_name for c in module.computations.values() for i in c}


def of_xplane(file: Path) -> list[Program]:
    """The names in the programs that an .xplane.pb stores. Raises DataError."""
    try:
        if file.stat().st_size > MOST_BYTES:
            raise DataError(
                f"{file} has more than {MOST_BYTES >> 20} MiB. Pass hlo=compiled.as_text() instead."
            )
        return [_program(hlo) for hlo in _stored(memoryview(file.read_bytes()))]
    except OSError as e:
        raise DataError(f"{file} cannot be read: {e.strerror}.") from None
    except (ValueError, IndexError) as e:
        raise DataError(
            f"{file} is no XSpace, or only the beginning of one: {e}. Copy it again, or pass "
            "hlo=compiled.as_text()."
        ) from None


def _stored(space: memoryview) -> Iterator[memoryview]:
    """Each HloModuleProto."""
    for plane in _parts(space, 1):
        if _text(plane, 2) == "/host:metadata":
            for entry in _parts(plane, 4):
                for metadata in _parts(entry, 2):
                    for stat in _parts(metadata, 5):
                        for hlo in _parts(stat, 6):
                            yield from _parts(hlo, 1)


def _program(module: memoryview) -> Program:
    names: dict[str, str] = {}
    for computation in _parts(module, 3):
        for instruction in _parts(computation, 2):
            metadata = next(_parts(instruction, 7), memoryview(b""))
            names[_text(instruction, 1)] = _text(metadata, 2)
    return _text(module, 1), names


def _text(message: memoryview, field: int) -> str:
    return bytes(next(_parts(message, field), b"")).decode()


def _parts(message: memoryview, field: int) -> Iterator[memoryview]:
    """The strings, bytes or messages of one field; all others are stepped over. Raises ValueError."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        match key & 7:
            case 0:
                _, at = _varint(message, at)
            case 1:
                at += 8
            case 2:
                size, at = _varint(message, at)
                if at + size > len(message):
                    raise ValueError("a field ends beyond its message")
                if key >> 3 == field:
                    yield message[at : at + size]
                at += size
            case 5:
                at += 4
            case kind:
                raise ValueError(f"a field has the wire type {kind}")
    if at != len(message):
        raise ValueError("a field ends beyond its message")


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """The number that begins there, and where it ends. Raises IndexError at the end of the message."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number has more than 64 bits")
