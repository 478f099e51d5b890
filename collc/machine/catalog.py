"""Machines by name, and models of GPUs, as data: TOML files in ``machines/`` and ``gpus.toml``."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from collc.errors import MachineError, nearest
from collc.machine import speeds
from collc.machine.shape import Shape, Tree, parse_wire
from collc.machine.units import parse_bandwidth, parse_time

CATALOGUE = Path(__file__).with_name("machines")
MODELS = Path(__file__).with_name("gpus.toml")
ACCESSES = 3  # of memory for a byte added: two are read, one is written


@dataclass(frozen=True)
class Model:
    """A model of GPU. ``nvlink``: bytes a second of one NVLink, each way; ``pcie``: of 16 lanes.

    ``sm``: compute capability x 10; ``memory``: bytes a second; ``peak``: FLOP/s of dense products in
    bfloat16; ``constants``: the model whose constants NCCL has for it.
    """

    name: str
    sm: int
    nvlinks: int
    nvlink: float
    pcie: float
    memory: float
    peak: float
    constants: str

    @property
    def gamma(self) -> float:
        """Seconds per byte added."""
        return ACCESSES / self.memory


@dataclass(frozen=True)
class Entry:
    """A named machine: its node, ``rails`` (seconds more from rail to rail; None: no rails).

    ``gamma``: seconds per byte added; ``gpu``: the model whose constants NCCL has; "" if unknown.
    """

    name: str
    gpu: str
    shape: Shape
    rails: float | None
    gamma: float
    assumed: tuple[str, ...]


_TEXTS = ("gpu", "link", "net", "rails")
_NUMBERS = ("gpus", "domain", "nics")
_TREE = ("sockets", "switches", "socket")
_OPTIONAL = (*_TREE, "memory")
_MODEL = {"sm": int, "nvlinks": int, "nvlink": str, "pcie": int, "memory": str, "peak": float}
_MODEL |= {"constants": str}


def catalogue() -> tuple[str, ...]:
    """The names of the machines that come with collc.

    >>> catalogue()[:4]
    ('dgx-a100', 'dgx-h100', 'ethernet', 'gb200-nvl72')
    """
    return tuple(sorted(path.stem for path in CATALOGUE.glob("*.toml")))


def models() -> tuple[str, ...]:
    """The names of the GPU models.

    >>> models()
    ('a100', 'b200', 'gb200', 'h100', 'h200')
    """
    return tuple(sorted(_models()))


def find(name: str | os.PathLike[str]) -> Entry:
    """The machine of that name, or of a TOML file: a path, or a text that ends in .toml.

    Raises MachineError where there is none, and where a file is not a machine: it names the field.
    """
    if not isinstance(name, str) or name.endswith(".toml"):
        return _read(Path(name))
    if name not in catalogue():
        raise MachineError(f"there is no machine {name!r}. {_instead(name)}")
    return _known(name)


def _instead(name: str) -> str:
    if name in models():
        of = [known for known in catalogue() if _known(known).gpu == model(name).constants]
        first = [known for known in of if known.startswith(("dgx", "hgx", "gb"))]
        return (
            f"{name} is a GPU: {', '.join(first or of)} has it, and a file can be read with it, "
            f"as in topo.xml+{name}."
        )
    return (
        f"{nearest(name, catalogue())} Or give a file, as in ./topo.xml, or words, as in gpus=8 "
        "link=450GB/s,1us."
    )


def model(name: str) -> Model:
    """The GPU model of that name. Raises MachineError where there is none."""
    if name not in _models():
        raise MachineError(f"there is no GPU model {name!r}. {nearest(name, models())}")
    return _models()[name]


def by_sm(sm: int) -> Model | None:
    """The model that a GPU of compute capability sm / 10 is taken to be; None where there is none.

    >>> by_sm(90).name, by_sm(75)
    ('h100', None)
    """
    return next((found for found in _models().values() if found.sm == sm), None)


@cache
def _known(name: str) -> Entry:
    return _read(CATALOGUE / f"{name}.toml")


@cache
def _models() -> dict[str, Model]:
    found = {}
    for name, fields in _load(MODELS).items():
        where = f"{MODELS.name}, [{name}]"
        _check(where, fields, _MODEL, ())
        rates = {rate: parse_bandwidth(fields[rate]) for rate in ("nvlink", "memory")}
        pcie = speeds.pcie_generation(fields["pcie"])
        found[name] = Model(name=name, **{**fields, **rates, "pcie": pcie})
    return found


def _read(path: Path) -> Entry:
    fields = _load(path)
    where = f"machine file {path}"
    types = dict.fromkeys(_TEXTS, str) | dict.fromkeys(_NUMBERS, int) | {"assumed": list}
    types |= {"sockets": int, "switches": int, "socket": str, "memory": str}
    _check(where, fields, types, _OPTIONAL)
    try:
        return _entry(path.stem, fields)
    except MachineError as e:
        raise MachineError(f"{where}: {e}") from e


def _entry(name: str, fields: Mapping[str, Any]) -> Entry:
    wires = {}
    for field in ("link", "net", *(["socket"] if "socket" in fields else [])):
        wires[field] = parse_wire(fields[field], "450GB/s,1us")
        if wires[field].latency is None:
            raise MachineError(f"{field} says no latency. Write {fields[field]},1us.")
    if any(field in fields for field in _TREE) and not all(field in fields for field in _TREE):
        raise MachineError(f"{', '.join(_TREE)} come together. Say all of them, or none.")
    tree = (
        Tree(fields["sockets"], fields["switches"], wires["socket"]) if "socket" in wires else None
    )
    if tree and fields["domain"] > 1:
        raise MachineError("sockets are of one host, a domain of several. Say domain = 1.")
    if tree and fields["gpus"] % (tree.sockets * tree.switches):
        raise MachineError(
            f"{fields['gpus']} gpus cannot be shared evenly by {tree.sockets} sockets x "
            f"{tree.switches} switches. Say a multiple of {tree.sockets * tree.switches}."
        )
    if bool(fields["gpu"]) == ("memory" in fields):
        raise MachineError('a model tells its memory: say gpu = "h100", or gpu = "" and memory.')
    gpu = model(fields["gpu"]) if fields["gpu"] else None
    memory = gpu.memory if gpu else parse_bandwidth(fields["memory"])
    shape = Shape(
        gpus=fields["gpus"],
        link=wires["link"],
        kind="pcie" if tree else "nvlink",
        nics=fields["nics"],
        net=wires["net"],
        domain=fields["domain"],
        tree=tree,
    )
    rails = parse_time(fields["rails"]) if fields["rails"] else None
    assumed = tuple(str(sentence) for sentence in fields["assumed"])
    constants = gpu.constants if gpu else ""
    return Entry(name, constants, shape, rails, ACCESSES / memory, assumed)


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise MachineError(f"machine file {path}: {e.strerror or e}.") from e
    except (ValueError, RecursionError) as e:  # not TOML, not UTF-8
        raise MachineError(f"machine file {path}: not TOML: {e}.") from e


def _check(
    where: str, fields: Mapping[str, Any], types: Mapping[str, type], optional: tuple[str, ...]
) -> None:
    for name, value in fields.items():
        if name not in types:
            raise MachineError(f"{where}: there is no field {name!r}. {nearest(name, types)}")
        if type(value) is not types[name]:
            raise MachineError(f"{where}: {name} has to be {types[name].__name__}, not {value!r}.")
        if isinstance(value, int) and not 1 <= value <= 1024:
            raise MachineError(f"{where}: {name} has to be from 1 to 1024, not {value}.")
    missing = [name for name in types if name not in fields and name not in optional]
    if missing:
        raise MachineError(
            f"{where}: {', '.join(missing)} missing. Add what dgx-h100.toml of collc says for it."
        )
