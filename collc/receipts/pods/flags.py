"""XLA flags, tried before they are used: an unknown one in XLA_FLAGS ends a process without a word.

Compile options (``compiler_options=`` of jax) and the flags in ``XLA_FLAGS`` have the same names.
"""

import difflib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from collc.errors import PodError
from collc.receipts.pods import pod

# What both supported versions of jax know, and collc and its tests set themselves.
_SAFE = re.compile(
    r"--xla_force_host_platform_device_count=[0-9]{1,3}"
    r"|--xla_cpu_collective_call_(terminate|warn_stuck)_timeout_seconds=[0-9]{1,6}",
    re.ASCII,
)
_SECONDS = 120.0  # for a process that only starts jax


def untuned() -> dict[str, str]:
    """The compile options without which XLA would compile candidates for seconds, and time none.

    None where ``XLA_FLAGS`` say themselves how to tune.
    """
    name = "xla_gpu_autotune_level"
    return {} if name in os.environ.get("XLA_FLAGS", "") else {name: "0"}


def parse_options(texts: Iterable[str]) -> dict[str, str | bool]:
    """Compile options written as NAME=VALUE, also as --NAME=VALUE; a true or false becomes a bool.

    Raises PodError for another form and for a name given twice.

    >>> parse_options(["xla_gpu_autotune_level=0", "--xla_gpu_enable_latency_hiding_scheduler=true"])
    {'xla_gpu_autotune_level': '0', 'xla_gpu_enable_latency_hiding_scheduler': True}
    """
    options: dict[str, str | bool] = {}
    for text in texts:
        name, equals, value = text.removeprefix("--").partition("=")
        if not re.fullmatch(r"\w+", name, re.ASCII) or not equals:
            raise PodError(f"the XLA flag {text!r}: not of the form NAME=VALUE.")
        if name in options:
            raise PodError(f"the XLA flag {name} is given twice. Drop one of them.")
        options[name] = {"true": True, "false": False}.get(value.lower(), value)
    return options


def check_options(options: Mapping[str, Any]) -> None:
    """Asks XLA for CUDA whether it knows these compile options and can read their values.

    A function that does nothing is compiled with them, for a GPU that is not there. Raises PodError
    with all names that XLA does not know, and the nearest that it does, and with all values that
    it cannot read.
    """
    faults = []
    for name, value in options.items():
        if not isinstance(value, str | bool | int | float):
            faults.append(f"{name} has to be a text, a number or a bool, not {value!r}.")
        elif fault := _fault(name, value):
            faults.append(fault)
    if faults:
        raise PodError("\n".join(faults))


def _fault(name: str, value: str | bool | int | float) -> str:
    if name == "xla_dump_to":  # known, and nobody wants to read what this compiles
        return "" if isinstance(value, str) else f"xla_dump_to has to be a folder, not {value!r}."
    try:
        _nothing().compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError as e:
        said = str(e)
        if "No such compile option" in said:
            return _unknown(name, known_flags())
        if "While setting option" in said:
            return f"the XLA flag {name}: {said.rpartition(', ')[2]}"
        return f"the XLA flag {name}={value}: {said}"
    return ""


def _unknown(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    return f"the XLA of jax {version('jax')} knows no flag {name}.{hint}"


@cache
def known_flags() -> frozenset[str]:
    """The names of the flags that this jax's XLA for CUDA has a value for: nearly all it knows."""
    with tempfile.TemporaryDirectory() as folder:
        _nothing().compile(compiler_options={"xla_dump_to": folder})
        dumped = [path.read_text(encoding="utf-8") for path in Path(folder).glob("*.config.pbtxt")]
    return frozenset(re.findall(r"^\s+(xla_\w+):", "\n".join(dumped), re.MULTILINE))


@cache
def _nothing() -> Any:
    mesh = pod("h100", {"gpu": 1}, gpus=1)
    x = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    return jax.jit(lambda x: x).lower(x)


def probe_environment() -> None:
    """Tries ``XLA_FLAGS`` in another process, if it says more than how many devices there are.

    To be called before jax is first used: XLA ends the process if it does not know a flag or cannot
    read a value. Raises PodError, naming them, instead. Takes a second or two, once for each value.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if all(_SAFE.fullmatch(flag) for flag in flags.split()):
        return
    if why := _probe(flags):
        raise PodError(f"XLA_FLAGS: {why}")


@cache
def _probe(flags: str) -> str:
    """What XLA has against these flags; nothing: ""."""
    code, said = _start(flags)
    if not code:
        return ""
    if unknown := re.search(r"Unknown flags? in XLA_FLAGS: (.*)", said):
        known = _start("", f"from {__name__} import known_flags as f; print(*f())").said.split()
        faults = []
        for flag in unknown[1].split():
            name, equals, _ = flag.removeprefix("--").partition("=")
            bare = name in known and not equals
            faults.append(f"{name} needs a value" if bare else _unknown(name, known))
        return "\n".join(faults)
    for form in (r"Couldn't interpret value .* for flag .*", r"Could not open file .*"):
        if found := re.search(form, said):
            return found[0]
    return f"jax does not start with {flags!r}: it ends with {code}. {' '.join(said.split()[-40:])}"


class _Started(NamedTuple):
    code: int  # 0: it ran
    said: str  # on stdout, or what went wrong


def _start(flags: str, program: str = "import jax; jax.devices()") -> _Started:
    """Runs a program in another process, with these XLA_FLAGS and no GPU."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ
            | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return _Started(1, f"nothing within {_SECONDS:.0f} s.")
    said = done.stderr if done.returncode else done.stdout
    return _Started(done.returncode, said.decode(errors="replace"))
