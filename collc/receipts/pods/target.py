"""GPUs to compile for, as data: one TOML file each, in ``targets/`` or the user's own.

A target says what XLA has to know of a GPU that is not there, in XLA's own words (those of
``GpuDeviceInfoProto``), and how many of them a host and an NVLink domain have.
"""

import dataclasses
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from collc.errors import PodError, nearest

CATALOGUE = Path(__file__).with_name("targets")

# What all CUDA GPUs of compute capability 8.0 and newer have in common.
_COMMON = """
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536"""
_CAPABILITY = re.compile(r"(8|9|1[0-2])\.([0-9])(a?)", re.ASCII)
_OR_NONE = ("active_links",)  # may be 0
_MOST = 2**53  # of a number in a file: beyond that a float would not hold it


@dataclass(frozen=True)
class Target:
    """A GPU to compile for. Sizes are in bytes; raises PodError where a field cannot be right."""

    name: str  # in the catalogue, or the file's
    device: str  # as the driver names it
    compute_capability: str  # "9.0a"; a: with the features of this architecture only
    gpus_per_host: int
    gpus_per_domain: int  # of one NVLink domain: may be a host's, or those of several hosts
    core_count: int  # streaming multiprocessors
    fpus_per_core: int
    clock_rate_ghz: float
    device_memory_size: int
    memory_bandwidth: int  # bytes a second
    l2_cache_size: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    active_links: int  # of NVLink; 0: none

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            why = _fault(field.name, field.type, getattr(self, field.name))
            if why:
                raise PodError(f"target {self.name}: {field.name} {why}.")

    def config(self) -> str:
        """XLA's ``GpuTargetConfigProto`` as text, with the fields that jax 0.10.2 and 0.12 know."""
        capability = _CAPABILITY.fullmatch(self.compute_capability)
        assert capability
        major, minor, own = capability.groups()
        feature = "feature_extension: ACCELERATED_FEATURES" if own else ""
        numbers = " ".join(
            f"{name}: {getattr(self, name)}"
            for name in (
                *("core_count", "fpus_per_core", "clock_rate_ghz", "device_memory_size"),
                *("memory_bandwidth", "l2_cache_size", "shared_memory_per_core"),
                "shared_memory_per_block_optin",
            )
        )
        return (
            f"gpu_device_info {{{_COMMON}\n  {numbers}\n"
            f"  cuda_compute_capability {{ major: {major} minor: {minor} {feature} }}\n"
            f"  device_interconnect_info {{ active_links: {self.active_links} }}\n}}\n"
            'platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 }\n'
            f'device_description_str: "{self.device}"'
        )


_TYPES = {f.name: f.type for f in dataclasses.fields(Target) if f.name != "name"}


def _fault(name: str, kind: Any, value: Any) -> str:
    """What is wrong with a field's value; nothing: ""."""
    if kind is str:
        if not isinstance(value, str):
            return f"has to be a text, not {value!r}"
        if not re.fullmatch(r"[ -!#-\[\]-~]+", value):  # it is quoted in XLA's text
            return f"has to be printable ASCII without quotes and backslashes, not {value!r}"
        if name == "compute_capability" and not _CAPABILITY.fullmatch(value):
            return f"has to be one from 8.0 to 12.9, such as 9.0a, not {value!r}"
        return ""
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        return f"has to be {'a number' if kind is float else 'an integer'}, not {value!r}"
    if not (math.isfinite(value) and 0 <= value <= _MOST and (value or name in _OR_NONE)):
        sign = "0 or more" if name in _OR_NONE else "positive"
        return f"has to be {sign} and at most 2**53, not {value}"
    return ""


def catalogue() -> tuple[str, ...]:
    """The names of the targets that come with collc.

    >>> catalogue()
    ('a100', 'a100-40gb', 'b200', 'gb200-nvl72', 'h100', 'h200')
    """
    return tuple(sorted(path.stem for path in CATALOGUE.glob("*.toml")))


def find(target: str | os.PathLike[str]) -> Target:
    """The target of that name, or of that TOML file: a path, or a text with a / or a .toml in it.

    Raises PodError where there is none, and where a file is not a target: it names the field.
    """
    if isinstance(target, str) and "/" not in target and not target.endswith(".toml"):
        if target not in catalogue():
            raise PodError(
                f"there is no target {target!r}. {nearest(target, catalogue())} Or give a file, "
                "such as my_gpu.toml, with the fields of those in collc/receipts/pods/targets."
            )
        return _known(target)
    return read(Path(target))


@cache
def _known(name: str) -> Target:
    return read(CATALOGUE / f"{name}.toml")


def read(path: Path) -> Target:
    """The target in a TOML file. Raises PodError, with the file and the field."""
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise PodError(f"target file {path}: {e.strerror or e}.") from e
    except ValueError as e:  # not TOML, not UTF-8
        raise PodError(f"target file {path}: not TOML: {e}.") from e
    if not fields:
        raise PodError(f"target file {path}: empty. It needs the fields {', '.join(_TYPES)}.")
    _check(path, fields)
    return Target(path.stem, **fields)


def _check(path: Path, fields: Mapping[str, Any]) -> None:
    for name in fields:
        if name not in _TYPES:
            missing = [known for known in _TYPES if known not in fields] or list(_TYPES)
            raise PodError(
                f"target file {path}: no target has a field {name!r}. {nearest(name, missing)}"
            )
    missing = [name for name in _TYPES if name not in fields]
    if missing:
        raise PodError(f"target file {path}: {', '.join(missing)} missing. All fields are needed.")
    for name, kind in _TYPES.items():
        if why := _fault(name, kind, fields[name]):
            raise PodError(f"target file {path}: {name} {why}.")
