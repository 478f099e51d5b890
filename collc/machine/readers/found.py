"""What a file says of a node: its graph, as far as it goes, and what had to be assumed."""

from dataclasses import dataclass, field
from pathlib import Path

import networkx as nx

from collc.errors import MachineError

LARGEST = 16 * 2**20  # bytes
NVSWITCH = "nvswitch"


@dataclass
class Notes:
    """What is assumed of a file, each sentence once, with the first line that gave rise to it."""

    file: str
    found: dict[str, list[int]] = field(default_factory=dict)

    def add(self, line: int, sentence: str) -> None:
        self.found.setdefault(sentence, []).append(line)

    def sentences(self) -> tuple[str, ...]:
        """``topo.xml line 7 (and 3 more): ...``; a line 0 is the whole file."""
        made = []
        for sentence, lines in self.found.items():
            more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
            where = f"{self.file} line {lines[0]}{more}" if lines[0] else self.file
            made.append(f"{where}: {sentence}")
        return tuple(made)


@dataclass
class Nic:
    """A NIC: bytes a second of all its ports; its kind, a key of ``speeds.NET``; seconds to another.

    What a file does not say is None.
    """

    bandwidth: float | None
    kind: str = "infiniband"
    latency: float | None = None


@dataclass
class Found:
    """A node as a file describes it.

    ``graph`` has the PCIe links and those between sockets; a bandwidth of None is that of the GPU
    model's PCIe. ``gpus`` in the order of devices. ``nvlinks``: how many lead from one to another,
    or to a switch; whose rate is ``rate``, None if the model has to say. ``bare``: the file has the
    places of GPUs, not the GPUs.
    """

    file: str
    notes: Notes
    graph: "nx.DiGraph[str]" = field(default_factory=nx.DiGraph)
    gpus: list[str] = field(default_factory=list)
    nics: dict[str, Nic] = field(default_factory=dict)
    nvlinks: dict[tuple[str, str], int] = field(default_factory=dict)
    rate: float | None = None
    sm: int | None = None
    hosts: int = 1
    bare: bool = False


def load(path: str) -> bytes:
    """The bytes of a file. Raises MachineError where there is none, it is empty, or it is too large."""
    try:
        if not Path(path).is_file():
            raise MachineError(f"{path}: there is no such file. Give the path of one that is.")
        with open(path, "rb") as f:
            data = f.read(LARGEST + 1)
    except (OSError, ValueError) as e:  # a NUL in the name
        raise MachineError(f"{path}: {getattr(e, 'strerror', None) or e}.") from e
    if len(data) > LARGEST:
        raise MachineError(
            f"{path}: more than {LARGEST >> 20} MiB. That is no topology of one node."
        )
    if not data.strip():
        raise MachineError(f"{path} is empty. NCCL_TOPO_DUMP_FILE={path} has NCCL write one.")
    return data


def shown(value: str) -> str:
    """A value from a file, for a message: quoted, and not too long."""
    return repr(value if len(value) <= 40 else f"{value[:40]}...")
