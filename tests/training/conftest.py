"""The mesh and the plan that tests of steps share: 2 hosts × 4 gpus."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
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


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    """What takes long to compile is kept in a folder, for the module's later runs of the same step."""
    options = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.2,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for values in (options, before):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # jax looks up the folder once
        if values is options:
            yield


@pytest.fixture(scope="session")
def permutes():
    """`permutes(compiled)`: how many collective-permutes one call runs."""

    def count(compiled):
        return hlo.count(hlo.parse_hlo(compiled.as_text())).get("collective-permute", 0)

    return count
