"""The matrix that nvidia-smi topo -m prints: who is how near to whom."""

import re
from dataclasses import dataclass

from collc.errors import MachineError, nearest
from collc.machine.readers.found import Notes, shown

NEARNESS = {"PIX": 1, "PXB": 2, "PHB": 3, "NODE": 4, "SYS": 5, "SOC": 5}  # SOC: SYS of old
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NVLINK = re.compile(r"NV([1-9][0-9]{0,2})", re.ASCII)
_GPU = re.compile(r"GPU[0-9]{1,4}", re.ASCII)
_NIC = re.compile(
    r"(NIC[0-9]{1,4}|[a-z][a-z0-9]{1,20}_[a-z0-9_]{1,20})", re.ASCII
)  # old: mlx5_0 itself
_LEGEND = re.compile(r"\s*(NIC[0-9]{1,4})\s*:\s*(\S+)", re.ASCII)
_COLUMNS = {"CPU", "NUMA", "GPU"}  # how the columns begin that are no devices
MOST = 64  # devices
LARGEST = 2**20  # bytes


@dataclass(frozen=True)
class Matrix:
    """``cells`` of rows and columns in the order of ``devices``: "X", "NV12", "PIX", ...

    ``lines``: of each row; ``numa``: NUMA nodes of GPUs, "" where they are not said; ``names``:
    those of NICs.
    """

    file: str
    devices: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    lines: tuple[int, ...]
    numa: tuple[str, ...]
    names: dict[str, str]
    notes: Notes

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(device for device in self.devices if _GPU.fullmatch(device))

    @property
    def nics(self) -> tuple[str, ...]:
        return tuple(device for device in self.devices if not _GPU.fullmatch(device))


def parse(file: str, data: bytes) -> Matrix:
    """The matrix in a file. Raises MachineError, with line and column."""
    if len(data) > LARGEST:
        raise MachineError(f"{file}: more than {LARGEST >> 20} MiB. That is no matrix of one host.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise MachineError(
            f"{file}: byte {e.start} is not UTF-8. It needs to be NCCL's XML, or what "
            "nvidia-smi topo -m prints."
        ) from e
    lines = [_ANSI.sub("", line) for line in re.split(r"\r\n|\r|\n", text)]
    for at, line in enumerate(lines):
        if devices := _header(line):
            return _Rows(file, lines, at, devices).matrix()
    raise MachineError(
        f"{file}: no line has the header GPU0 GPU1 ... It needs to be NCCL's XML, or what "
        "nvidia-smi topo -m prints."
    )


def _header(line: str) -> tuple[str, ...]:
    """The devices that a header names; () if it is none."""
    devices: list[str] = []
    words = line.split()
    for word in words:
        if not (_GPU.fullmatch(word) or _NIC.fullmatch(word)):
            break
        devices.append(word)
    after = words[len(devices) : len(devices) + 1]
    is_header = devices and devices[0].startswith("GPU") and set(after) <= _COLUMNS
    return tuple(devices) if is_header else ()


class _Rows:
    def __init__(self, file: str, lines: list[str], at: int, devices: tuple[str, ...]) -> None:
        self.file, self.lines, self.at, self.devices = file, lines, at, devices
        self.columns = " ".join(lines[at].split()[len(devices) :])
        if len(set(devices)) < len(devices):
            twice = next(device for device in devices if devices.count(device) > 1)
            raise self._fault(at, 0, f"{twice} is twice in the header", "Each may be there once.")
        if len(devices) > MOST:
            raise self._fault(at, 0, f"{len(devices)} devices", f"At most {MOST} are read.")

    def _fault(self, at: int, column: int, found: str, needed: str) -> MachineError:
        where = f", column {column}" if column else ""
        return MachineError(f"{self.file} line {at + 1}{where}: {found}. {needed}")

    def matrix(self) -> Matrix:
        n, rows = len(self.devices), {}
        numa = [""] * n
        end = self.at
        for end in range(self.at + 1, len(self.lines)):
            words = [(m.start() + 1, m[0]) for m in re.finditer(r"\S+", self.lines[end])]
            if not words:
                if rows:
                    break
                continue
            label = words[0][1]
            if label not in self.devices:
                break
            i = self.devices.index(label)
            if i in rows:
                again = f"a second row of {label}"
                raise self._fault(end, words[0][0], again, "Each may be there once.")
            if len(words) <= n:
                few = f"{label} has {len(words) - 1} of {n} entries"
                raise self._fault(end, words[-1][0], few, "It may be truncated: print it again.")
            rows[i] = (end, words[1 : n + 1])
            for j, (column, cell) in enumerate(rows[i][1]):
                self._check(end, column, cell, i, j)
            numa[i] = self._numa(words[n + 1 :])
        missing = [device for i, device in enumerate(self.devices) if i not in rows]
        if missing:
            lacks = f"no row of {', '.join(missing[:8])}"
            raise self._fault(end, 0, lacks, "It may be truncated: print it again.")
        self._symmetric(rows)
        return Matrix(
            self.file,
            self.devices,
            tuple(tuple(cell for _, cell in rows[i][1]) for i in range(n)),
            tuple(rows[i][0] + 1 for i in range(n)),
            tuple(numa),
            self._legend(end),
            Notes(self.file),
        )

    def _check(self, line: int, column: int, cell: str, i: int, j: int) -> None:
        a, b = self.devices[i], self.devices[j]
        if (cell == "X") != (i == j):
            raise self._fault(
                line, column, f"{a} to {b} is {shown(cell)}", "X stands for a device and itself."
            )
        nvlinks = _NVLINK.fullmatch(cell)
        if nvlinks and not (_GPU.fullmatch(a) and _GPU.fullmatch(b)):
            raise self._fault(line, column, f"{a} to {b} is {cell}", "Only GPUs have NVLinks.")
        if cell != "X" and not nvlinks and cell not in NEARNESS:
            known = nearest(cell, [*NEARNESS, "NV18"])
            raise self._fault(line, column, f"{a} to {b} is {shown(cell)}", known)

    def _numa(self, words: list[tuple[int, str]]) -> str:
        """The NUMA node of a row's device; "" where it is not said."""
        if "NUMA Affinity" not in self.columns or len(words) < 2 or "N/A" in words[1][1]:
            return ""
        return words[1][1]

    def _symmetric(self, rows: dict[int, tuple[int, list[tuple[int, str]]]]) -> None:
        for i, (line, cells) in rows.items():
            for j in range(i):
                column, cell = cells[j]
                other_line, others = rows[j]
                if others[i][1] != cell:
                    a, b = self.devices[i], self.devices[j]
                    raise self._fault(
                        line,
                        column,
                        f"{a} to {b} is {cell}, but {b} to {a} is {others[i][1]} in line "
                        f"{other_line + 1}, column {others[i][0]}",
                        "The two have to be equal.",
                    )

    def _legend(self, end: int) -> dict[str, str]:
        names = {}
        for line in self.lines[end:]:
            found = _LEGEND.fullmatch(line.rstrip())
            if found and found[1] in self.devices:
                names[found[1]] = found[2]
        return names
