"""JAX's runtime is started with names of its inside, which another jax may not have."""

import jax
import pytest

from collc.errors import PlanError
from collc.runtime.start import listen_at, roll_call, start


def test_a_jax_with_other_inner_parts(monkeypatch):
    """Names of those that have not come are left out, where gloo listens is not."""
    from jax._src import xla_bridge
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    name = "get_distributed_runtime_service"
    monkeypatch.setattr(_jax, name, lambda address, **options: (address, options))
    with roll_call(3):
        usual = getattr(_jax, name)
        assert usual("a", nodes=2) == ("a", {"nodes": 2, "cluster_register_timeout": 3})
    monkeypatch.setattr(_jax, name, lambda address: address)
    with roll_call(3):
        assert getattr(_jax, name)("a") == "a"
    monkeypatch.delattr(_jax, name)
    with roll_call(3):
        assert not hasattr(_jax, name)
    monkeypatch.delattr(xla_bridge, "register_backend_factory")
    with pytest.raises(PlanError, match=r"gloo listen at one address with jax \d.*newer collc"):
        listen_at("127.0.0.1")


def test_a_jax_that_was_used_before():
    jax.devices()
    with pytest.raises(PlanError, match=r"Call collc.init before jax.devices\(\)"):
        start("127.0.0.1:1", 2, 1, 300, {})
