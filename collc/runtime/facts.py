"""What has to be the same in all processes of a job: versions, flags, settings."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import jax

from collc.runtime.xla_flags import read

# What differs between processes for good reasons: where a process writes, and which one it is.
OWN = ("--xla_dump", "--xla_gpu_dump", "--xla_gpu_per_fusion_autotune_cache_dir")
OWN_VARIABLES = (
    "JAX_PROCESS_ID",
    "JAX_COORDINATOR_ADDRESS",
    "JAX_COORDINATOR_BIND_ADDRESS",
    "JAX_LOCAL_DEVICE_IDS",
    "JAX_CUDA_VISIBLE_DEVICES",
    "JAX_ROCM_VISIBLE_DEVICES",
    "JAX_PARTITION_INDEX",
    "JAX_SLICE_INDEX",
    "JAX_MTLS_CERT_FILE",
    "JAX_MTLS_KEY_FILE",
)


def facts() -> dict[str, str]:
    """What has to be the same in all processes, by name.

    Raises LaunchError where XLA_FLAGS names a file that is not there.
    """
    found = {name: _version(name) for name in ("collc", "jax", "jaxlib", "flax")}
    found["python"] = ".".join(platform.python_version_tuple()[:2])
    for variable, words in (("XLA_FLAGS", read), ("LIBTPU_INIT_ARGS", str.split)):
        flags = words(os.environ.get(variable, ""))
        found[variable] = " ".join(sorted(flag for flag in flags if not flag.startswith(OWN)))
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
