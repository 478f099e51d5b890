"""Python, jax, its CUDA plugin and NVIDIA's driver: whether they fit each other."""

import re
from collections.abc import Mapping

from collc.runtime.doctor.finding import Finding, error, note, ok, warning
from collc.runtime.doctor.host import Host

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
OLDEST_JAX, NEWEST_JAX = "0.10.2", "0.12"
# The oldest driver on Linux that CUDA of a major version runs on (jax's installation guide).
DRIVERS = {12: 525, 13: 580}
PACKAGES = ("collc", "jax", "jaxlib", "flax") + tuple(
    f"jax-cuda{major}-{part}" for major in DRIVERS for part in ("plugin", "pjrt")
)


def python(version: tuple[int, int]) -> list[Finding]:
    """Whether collc runs on this Python."""
    shown = ".".join(map(str, version))
    if version < OLDEST_PYTHON:
        return [
            error("python", f"Python {shown}", "collc needs Python 3.11 or newer: install one.")
        ]
    if version > NEWEST_PYTHON:
        newest = ".".join(map(str, NEWEST_PYTHON))
        what = f"Python {shown} is newer than collc was tested on ({newest})"
        return [note("python", what, f"Run collc's tests, or install Python {newest}.")]
    return [ok("python", f"Python {shown}")]


def packages(installed: Mapping[str, str]) -> list[Finding]:
    """jax, jaxlib and the CUDA plugin among each other, by the versions of the packages."""
    jax, jaxlib = installed.get("jax"), installed.get("jaxlib")
    if jax is None or jaxlib is None:
        missing = "jax" if jax is None else "jaxlib"
        return [error("versions", f"{missing} is not installed", "pip install collc")]
    if numbers(jax) < numbers(OLDEST_JAX):
        return [
            error("versions", f"jax {jax}; collc needs {OLDEST_JAX} or newer", "pip install -U jax")
        ]
    found = []
    if numbers(jaxlib) > numbers(jax):
        remedy = f'pip install "jaxlib=={jax}"'
        found.append(error("versions", f"jaxlib {jaxlib} is newer than jax {jax}", remedy))
    majors = [major for major in DRIVERS if f"jax-cuda{major}-plugin" in installed]
    for major in majors:
        for part in ("plugin", "pjrt"):
            name = f"jax-cuda{major}-{part}"
            other = installed.get(name, "none")
            if numbers(other) != numbers(jaxlib):
                what = (
                    f"{name} {other} beside jaxlib {jaxlib}: jax uses it only at the same version"
                )
                found.append(error("versions", what, f'pip install -U "jax[cuda{major}]=={jax}"'))
    if len(majors) > 1:
        what = "the plugins for CUDA 12 and 13 are both installed, and jax loads only one"
        remedy = "pip uninstall jax-cuda12-plugin jax-cuda12-pjrt"
        found.append(warning("versions", what, remedy))
    if numbers(jax)[:2] > numbers(NEWEST_JAX)[:2]:
        what = f"jax {jax} is newer than collc was tested with ({NEWEST_JAX})"
        found.append(note("versions", what, "Run collc's tests, or install jax " + NEWEST_JAX))
    plugins = "".join(f", CUDA {major} plugin" for major in majors)
    return found or [ok("versions", f"jax {jax}, jaxlib {jaxlib}{plugins}")]


def driver_version(host: Host) -> str | None:
    """NVIDIA's kernel driver: of both forms of the file, the proprietary and the open module's."""
    text = host.text("/proc/driver/nvidia/version") or ""
    found = re.search(r"Kernel Module\b.*?\s(\d+\.\d+(?:\.\d+)?)\s", f"{text}\n")
    return found[1] if found else None


def driver(version: str | None, installed: Mapping[str, str], gpus_found: bool) -> list[Finding]:
    """Whether the driver is new enough for the CUDA plugin. Nothing is said where one is missing.

    ``gpus_found``: jax has found GPUs all the same, by CUDA's forward compatibility packages.
    """
    majors = [major for major in DRIVERS if f"jax-cuda{major}-plugin" in installed]
    if version is None or not majors:
        return []
    major = max(majors)  # the one that jax tries first
    needed = DRIVERS[major]
    if numbers(version)[0] >= needed:
        return [ok("driver", f"NVIDIA driver {version}, CUDA {major} needs {needed} or newer")]
    what = f"NVIDIA driver {version} is older than CUDA {major} needs ({needed})"
    older = [m for m, least in DRIVERS.items() if numbers(version)[0] >= least]
    instead = f', or pip install "jax[cuda{older[-1]}]" in place of CUDA {major}' if older else ""
    remedy = f"Install driver {needed} or newer{instead}."
    if gpus_found:
        return [note("driver", f"{what}; it works by CUDA's forward compatibility", remedy)]
    return [error("driver", what, remedy)]


def numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with, for comparing.

    >>> numbers("0.12.0.1"), numbers("0.11.0.dev1"), numbers("none")
    ((0, 12, 0, 1), (0, 11, 0), ())
    """
    found = re.match(r"[0-9]{1,9}(?:\.[0-9]{1,9})*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
