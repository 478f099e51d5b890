"""XLA's flags: unknown ones abort the process, some are left over from looking at something else."""

import difflib
import importlib.util
import mmap
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from collc.runtime.doctor.devices import Probe
from collc.runtime.doctor.finding import Finding, error, listed, note, ok, short, warning
from collc.runtime.doctor.host import Host
from collc.runtime.xla_flags import DEVICES, named_file

CHECK = "XLA flags"
Test = Callable[[str], bool]


def _on(value: str) -> bool:
    return value.lower() in ("", "true", "1")


def _off(value: str) -> bool:
    return value.lower() in ("false", "0")


def _always(value: str) -> bool:
    return True


@dataclass(frozen=True)
class Unsafe:
    """A flag that should not be in a run, if ``when`` holds of its value."""

    flag: str
    when: Test
    what: str
    remedy: str = "Take it out of XLA_FLAGS."


UNSAFE = (
    Unsafe("xla_cpu_enable_fast_math", _on, "assumes that there is no NaN: a bad step goes unnoticed"),
    Unsafe(
        "xla_gpu_autotune_level",
        _off,
        "leaves kernels untuned",
        "Take it out of XLA_FLAGS: it is for compiling without a GPU.",
    ),
    Unsafe(
        "xla_backend_optimization_level", _off, "switches the compiler's optimisations off"
    ),
    Unsafe("xla_disable_hlo_passes", _always, "leaves passes of the compiler out"),
    Unsafe("xla_disable_all_hlo_passes", _on, "leaves all passes of the compiler out"),
    Unsafe(
        "xla_dump_to",
        _always,
        "writes every program that is compiled, on every process",
        "Take it out of XLA_FLAGS, or use collc compile for what the compiler made of a step.",
    ),
    Unsafe("xla_dump_hlo_as_text", _on, "writes every program that is compiled"),
    Unsafe(
        "xla_gpu_disable_async_collectives",
        _always,
        "makes collectives wait, so that nothing overlaps with them",
    ),
    Unsafe(
        "xla_gpu_enable_latency_hiding_scheduler",
        _off,
        "keeps collectives from overlapping with computation",
    ),
    Unsafe("xla_gpu_enable_highest_priority_async_stream", _off, "lets kernels delay collectives"),
    Unsafe("xla_gpu_force_compilation_parallelism", lambda v: v == "1", "compiles slowly"),
)  # fmt: skip
SLOWER = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")
VIRTUAL = DEVICES.removeprefix("--")


def flags(text: str) -> list[tuple[str, str]]:
    """(name, value) of each flag, in order; a flag without a value has "". XLA knows no others.

    >>> flags("--xla_a=1 --xla_b -xla_c")
    [('xla_a', '1'), ('xla_b', '')]
    """
    return [
        (name, value)
        for word in text.split()
        if word.startswith("--")
        for name, _, value in [word.removeprefix("--").partition("=")]
    ]


def given(host: Host) -> tuple[str, list[Finding]]:
    """The text of the flags. XLA_FLAGS may also name a file that holds them."""
    text = host.environment.get("XLA_FLAGS", "")
    if (file := named_file(text)) is None:
        return text, []
    content = host.text(os.path.abspath(file))
    if content is None:
        what = f"XLA_FLAGS={short(text)} is no flag, since it does not begin with -, and no file either"
        return "", [error(CHECK, what, "Write flags as --xla_name=value, with blanks between.")]
    return content, []


def xla(host: Host, probe: Probe, known: Iterable[str] = ()) -> list[Finding]:
    """Findings on XLA_FLAGS. ``known``: all of XLA's, to name the nearest of one it does not know."""
    text, found = given(host)
    values: dict[str, list[str]] = {}
    for name, value in flags(text):
        values.setdefault(name, []).append(value)
    last = {name: several[-1] for name, several in values.items()}
    found += [*_aborts(probe, tuple(known)), *_several(values), *_unsafe(last)]
    found += _of_no_use(last, probe.platform)
    if found:
        return found
    if not values:
        return [ok(CHECK, "none set")]
    if not probe.started:
        what = (
            f"{len(values)} set, none known to be unsafe; jax did not start, so they were not tried"
        )
        return [
            note(CHECK, what, "Repair what keeps jax from starting, then run collc doctor again.")
        ]
    return [ok(CHECK, f"{len(values)} set, all known and safe")]


def _aborts(probe: Probe, known: tuple[str, ...]) -> list[Finding]:
    """Those at which XLA has aborted."""
    found = []
    for word in probe.unknown:
        name = word.lstrip("-").partition("=")[0]
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        hint = f" Did you mean --{close[0]}?" if close else ""
        what = f"this jaxlib does not know {short(word)}, and aborts at start"
        found.append(error(CHECK, what, f"Take it out of XLA_FLAGS.{hint}"))
    for word in probe.malformed:
        what = f"--{short(word)} has a value that XLA cannot read, and it aborts at start"
        found.append(error(CHECK, what, "Write true or false, or the number that the flag takes."))
    return found


def _several(values: Mapping[str, list[str]]) -> list[Finding]:
    return [
        warning(
            CHECK,
            f"--{short(name)} is given with the values {listed(several)}; the last one counts",
            "Keep one of them in XLA_FLAGS.",
        )
        for name, several in values.items()
        if len(set(several)) > 1
    ]


def _unsafe(last: Mapping[str, str]) -> list[Finding]:
    found = []
    for unsafe in UNSAFE:
        if unsafe.flag in last and unsafe.when(last[unsafe.flag]):
            shown = f"--{unsafe.flag}={short(last[unsafe.flag])}".rstrip("=")
            found.append(warning(CHECK, f"{shown} {unsafe.what}", unsafe.remedy))
    return found


def _of_no_use(last: Mapping[str, str], platform: str) -> list[Finding]:
    found = []
    for name in SLOWER:
        if name in last and _on(last[name]):
            what = f"--{name} makes results repeat, and some kernels slower"
            found.append(note(CHECK, what, "Take it out of XLA_FLAGS if that is not on purpose."))
    if VIRTUAL in last and platform not in ("", "cpu"):
        what = f"--{VIRTUAL}={short(last[VIRTUAL])} has no effect on {platform}"
        found.append(note(CHECK, what, "It is for virtual devices: JAX_PLATFORMS=cpu."))
    return found


def library_flags() -> tuple[str, ...]:
    """All flags of the installed jaxlib, by the names in its library: XLA's own help is cut short."""
    spec = importlib.util.find_spec("jaxlib")
    found: set[bytes] = set()
    for folder in (spec and spec.submodule_search_locations) or ():
        for library in Path(folder).glob("libjax_common.so"):
            with (
                open(library, "rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            ):
                found |= set(re.findall(rb"\0(xla_[a-z0-9_]+)(?=\0)", content))
    return tuple(sorted(name.decode() for name in found))
