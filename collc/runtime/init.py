"""``collc.init``: JAX's distributed runtime, with the processes compared before anything compiles."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

from collc.planning.agree import TIMEOUT_S, compare

# What differs between processes for good reasons: where a process writes, and which one it is.
OWN = ("--xla_dump", "--xla_gpu_dump", "--xla_gpu_per_fusion_autotune_cache_dir")
OWN_VARIABLES = ("JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS", "JAX_LOCAL_DEVICE_IDS")


def init(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    **options: Any,
) -> None:
    """Starts JAX's distributed runtime in this process, and compares it with all others.

    Arguments and ``options`` are those of ``jax.distributed.initialize``, which finds them by itself
    on Slurm, Open MPI and Kubernetes. Call it before anything else of JAX. On CPU the processes talk
    through gloo. Raises PlanError, on every process, where one of them has other versions of collc,
    jax or Python, other XLA flags or other settings; it names the odd one out. Plans that are made
    later are compared likewise.
    """
    if getattr(jax.config, "jax_platforms", None) == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address=coordinator_address,
        num_processes=num_processes,
        process_id=process_id,
        **options,
    )
    compare("versions and flags", facts(), timeout_s)


def facts() -> dict[str, str]:
    """What has to be the same in all processes."""
    found = {name: _version(name) for name in ("collc", "jax", "jaxlib", "flax")}
    found["python"] = ".".join(platform.python_version_tuple()[:2])
    for variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        flags = sorted(f for f in os.environ.get(variable, "").split() if not f.startswith(OWN))
        found[variable] = " ".join(flags)
    for variable in sorted(os.environ):
        if variable.startswith("JAX_") and variable not in OWN_VARIABLES:
            found[variable] = os.environ[variable]
    for setting in ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl"):
        found[setting] = str(getattr(jax.config, setting))
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
