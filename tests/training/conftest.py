"""The mesh and the plan that tests of steps share: 2 hosts × 4 gpus."""

import jax
import pytest
from jax.sharding import AxisType

import collc
from collc.receipts import hlo


@pytest.fixture(scope="session", params=["Auto", "Explicit"])
def either_mesh(request):
    """A mesh of each type of axes."""
    kinds = (getattr(AxisType, request.param),) * 2
    return jax.make_mesh((2, 4), ("host", "gpu"), axis_types=kinds, devices=jax.devices()[:8])


@pytest.fixture(scope="session")
def mesh():
    kinds = (AxisType.Auto,) * 2
    return jax.make_mesh((2, 4), ("host", "gpu"), axis_types=kinds, devices=jax.devices()[:8])


@pytest.fixture(scope="session")
def plan(mesh):
    return collc.plan(mesh, {"gpu": "ring", "host": "tree"})


@pytest.fixture(scope="session")
def permutes():
    """`permutes(jitted, *args)`: how many collective-permutes one call runs."""

    def count(jitted, *args):
        text = jitted.lower(*args).compile().as_text()
        return hlo.count(hlo.parse_hlo(text)).get("collective-permute", 0)

    return count
