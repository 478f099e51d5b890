"""Meshes of devices, from texts."""

import math

import jax

from collc.analysis.mesh import parse_mesh
from collc.errors import MeshError


def mesh_of(text: str) -> jax.sharding.Mesh:
    """The mesh of ``host=2,gpu=4``, over jax's first devices. Raises MeshError for other texts, and if
    there are too few devices or none.
    """
    shape = parse_mesh(text)
    try:
        needed, devices = math.prod(shape.values()), jax.devices()
    except (RuntimeError, AssertionError) as error:  # jax asserts where it lacks the plug-in
        why = str(error) or "its plug-in is not installed"
        platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
        raise MeshError(
            f"jax has no devices for JAX_PLATFORMS={platforms} ({why}). Set it to a platform that "
            "this machine has, such as cpu, or unset it."
        ) from error
    if needed > len(devices):
        raise MeshError(
            f"The mesh {text} needs {needed} devices, but jax has {len(devices)} "
            f"({devices[0].platform}). Virtual CPU devices are made by setting JAX_PLATFORMS=cpu "
            f"and XLA_FLAGS=--xla_force_host_platform_device_count={needed} before jax is "
            "imported; or choose a smaller mesh."
        )
    auto = (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.make_mesh(
        tuple(shape.values()), tuple(shape), axis_types=auto, devices=devices[:needed]
    )
