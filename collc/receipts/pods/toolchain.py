"""What compiling for CUDA takes: jax's CUDA plugin, of jaxlib's version, and ptxas. No GPU."""

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from collc.errors import PodError

EXTRA = 'pip install "collc[pods]"'
CUDA = (13, 12)  # the majors of CUDA that jax has plugins for


def ready() -> None:
    """Raises PodError, with what to install, unless jax's CUDA plugin and ptxas are there.

    The plugin comes in two packages, which have to be of jaxlib's version.
    """
    jaxlib = version("jaxlib")
    for major in CUDA:
        names = (f"jax-cuda{major}-pjrt", f"jax-cuda{major}-plugin")
        found = {name: _version(name) for name in names}
        if not any(found.values()):
            continue
        if set(found.values()) != {jaxlib}:
            have = ", ".join(f"{name} {v or 'missing'}" for name, v in found.items())
            raise PodError(
                f"a pod needs jax's CUDA plugin of jaxlib's version: jax {version('jax')}, jaxlib "
                f"{jaxlib}, {have}. {EXTRA} --upgrade"
            )
        if ptxas() is None:
            raise PodError(
                "a pod needs NVIDIA's assembler ptxas, which is neither in the package "
                f"nvidia-cuda-nvcc nor on the PATH nor in CUDA_HOME: {EXTRA}"
            )
        return
    raise PodError(f"a pod needs jax's CUDA plugin, which is not installed: {EXTRA} (on Linux)")


def ptxas() -> Path | None:
    """NVIDIA's assembler where jax and XLA find it too; None where there is none.

    That is in the package nvidia-cuda-nvcc, on the PATH, or in a CUDA that is installed.
    """
    spec = importlib.util.find_spec("nvidia")
    homes = (spec.submodule_search_locations if spec else None) or ()
    folders = [folder for home in homes for folder in sorted(Path(home).glob("*/bin"))]
    folders += [Path(p) for p in os.environ.get("PATH", "").split(os.pathsep) if p]
    if home := os.environ.get("CUDA_HOME"):
        folders.append(Path(home, "bin"))
    for folder in (*folders, Path("/usr/local/cuda/bin"), Path("/opt/cuda/bin")):
        if found := shutil.which("ptxas", path=str(folder)):
            return Path(found)
    return None


@contextlib.contextmanager
def without_gpu() -> Iterator[None]:
    """Where no GPU is, keeps jax from looking for the libraries of one, such as cuDNN.

    It does so when it takes up the plugin while JAX_PLATFORMS is not set, and then drops it.
    """
    check = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    if check in os.environ or any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/dxg")):
        yield
        return
    os.environ[check] = "1"
    try:
        yield
    finally:
        del os.environ[check]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
