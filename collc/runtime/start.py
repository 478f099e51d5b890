"""JAX's distributed runtime, started so that it listens at one address and names who does not come."""

import math
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from collc.errors import PlanError
from collc.planning.agree import state
from collc.runtime import addresses, ending
from collc.runtime.patience import notice, patience


def start(
    coordinator: str, processes: int, process: int, timeout_s: float, options: dict[str, Any]
) -> None:
    """Starts JAX's runtime, which listens at one address.

    Raises PlanError where jax was used before, and where the coordinator's address cannot be, is in
    use or does not answer.
    """
    if _used():
        raise PlanError(
            "jax was used before collc.init: it has asked for its devices, and would never see those of "
            "other processes. Call collc.init before jax.devices(), arrays and anything else of jax."
        )
    given = options.get("coordinator_bind_address", os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"))
    if process == 0:
        if given is None:
            bound = addresses.bind_address(coordinator)
            if warning := addresses.only_here(coordinator, bound):
                warnings.warn(warning, stacklevel=3)
            options = {**options, "coordinator_bind_address": str(bound)}
        here = addresses.towards(coordinator)
    else:
        # First by a plain socket: JAX's client ends the process where it cannot connect.
        here = addresses.reach(coordinator, timeout_s, lambda line: _tell(process, line))
    line = (
        f"waiting for the other processes for {patience(timeout_s):g} s; after {timeout_s:g} s JAX "
        "ends all, and names some that have not come: its task names are numbers of processes"
    )
    with notice(timeout_s, lambda: _tell(process, line)), roll_call(timeout_s):
        jax.distributed.initialize(
            coordinator_address=coordinator,
            num_processes=processes,
            process_id=process,
            initialization_timeout=whole_seconds(timeout_s) + 10,  # the service speaks first
            **options,
        )
    # Right after it, so that at exit this runs just before what jax does.
    ending.leave_where_failed(jax.distributed.is_initialized, ending.AFTER_S * (process == 0))
    listen_at(here)


def _used() -> bool:
    from jax._src import xla_bridge

    # Where it is called otherwise, jax itself refuses, only later and in its own words.
    return getattr(xla_bridge, "backends_are_initialized", bool)()


@contextmanager
def roll_call(timeout_s: float) -> Iterator[None]:
    """Has JAX's service, which ends all processes where some do not come, name those.

    Without a time of its own it waits for longer than its clients do, which know no names. A jax that
    starts its service in another way is left to it: only the names are then missing.
    """
    from jax._src import lib

    inner = getattr(lib, "_jax", None)
    usual = getattr(inner, "get_distributed_runtime_service", None)

    def service(*given: Any, **options: Any) -> Any:
        assert usual is not None
        try:
            return usual(*given, cluster_register_timeout=whole_seconds(timeout_s), **options)
        except TypeError:  # it has no such argument
            return usual(*given, **options)

    if inner is not None and usual is not None:
        inner.get_distributed_runtime_service = service
    try:
        yield
    finally:
        if inner is not None and usual is not None:
            inner.get_distributed_runtime_service = usual


def listen_at(address: str) -> None:
    """Has gloo listen at this address, not at what the host's name happens to resolve to."""
    if getattr(jax.config, "jax_cpu_collectives_implementation", None) != "gloo":
        return
    with inside_jax("have gloo listen at one address"):
        from jax._src import xla_bridge
        from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

        made = xla_bridge.make_cpu_client
        gloo, register = _jax.make_gloo_tcp_collectives, xla_bridge.register_backend_factory

    def client() -> Any:
        if state().client is None:  # after jax.distributed.shutdown
            return made()
        return made(gloo(distributed_client=state().client, hostname=address))

    # As jax registers its own; before the first use of a backend, so this one is taken.
    register("cpu", client, priority=0, fail_quietly=False)


@contextmanager
def inside_jax(purpose: str) -> Iterator[None]:
    """Raises PlanError where this jax lacks a name of its inside that the block uses."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise PlanError(
            f"collc.init does not know how to {purpose} with jax {jax.__version__}: {error}. Take the "
            "jax that this collc was made for, or a newer collc."
        ) from error


def _tell(process: int, line: str) -> None:
    sys.stderr.write(f"collc.init, process {process}: {line}\n")  # at once: others write there too
    sys.stderr.flush()


def whole_seconds(timeout_s: float) -> int:
    """As JAX takes them."""
    return max(1, math.ceil(timeout_s))
