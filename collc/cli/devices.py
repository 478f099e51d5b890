"""Where the devices come from: set before jax, which reads its environment when it is first used."""

import math
import os
import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

import typer

from collc.runtime.xla_flags import virtual


class Platform(StrEnum):
    """Where the devices come from."""

    CPU = "cpu"
    DEFAULT = "default"


Where = Annotated[
    Platform | None,
    typer.Option(
        "--platform",
        help="cpu: as many virtual devices as the mesh has; default: the devices that jax "
        "finds. Without it: cpu, unless JAX_PLATFORMS is set.",
        show_default=False,
        show_choices=True,
    ),
]


def choose_platform(platform: Platform | None) -> None:
    """Tells jax by its environment which platform to take."""
    if platform is Platform.CPU:
        os.environ["JAX_PLATFORMS"] = "cpu"
    elif platform is None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if "jax" in sys.modules and platform is not Platform.DEFAULT:
        # Only when run inside another program: jax has read its environment by now.
        import jax

        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def devices_for(mesh: Mapping[str, int]) -> None:
    """Asks for as many virtual devices as the mesh has, where the platform is the CPU.

    Unless XLA_FLAGS says how many already; its other flags are kept. Raises LaunchError where it
    names a file that cannot be read.
    """
    if os.environ.get("JAX_PLATFORMS", "").split(",")[0] != "cpu":
        return
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = virtual(flags, math.prod(mesh.values()), keep=True)
