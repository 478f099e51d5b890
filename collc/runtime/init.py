"""``collc.init``: JAX's distributed runtime, processes compared, a mesh in the order of hosts."""

import json
import math
import os
import platform
import socket
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Timer
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from collc.errors import PlanError
from collc.planning.agree import compare, meet
from collc.runtime import addresses
from collc.runtime.hosts import grid, kinds, named, shape
from collc.runtime.place import Place, place
from collc.runtime.watchdog import ending
from collc.runtime.xla_flags import read

# How long to wait for the other processes: JAX's own default, since the hosts of a cluster start apart.
START_S = 300.0
LONGEST_S = 1e6  # what JAX is told in ms fits

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


def init(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    axes: Mapping[str, int] | None = None,
    axis_types: AxisType | Sequence[AxisType] | None = None,
    timeout_s: float = START_S,
    **options: Any,
) -> Mesh:
    """Starts JAX's distributed runtime in this process, and returns the mesh of all devices.

    Without arguments it takes what ``collc launch`` set, or what ``jax.distributed.initialize`` finds
    on Slurm, Open MPI and Kubernetes; ``options`` are further arguments of that. Call it before
    anything else of JAX, but after settings such as ``jax_enable_x64``. ``init(num_processes=1)`` is a
    job of one process, which talks to nobody.

    axes        names and sizes, outermost first; {"host": hosts, "gpu": devices of each} unless given
    axis_types  one for all axes or one for each, as in jax.sharding.Mesh; Auto unless given
    timeout_s   seconds to wait for the other processes, as to start and to be compared

    The devices are in the order of hosts, then of processes, then of ids, also where there are
    several slices, the last axis fastest. A host is what has one host name. The coordinator, process
    0, listens at the number of the coordinator's address only, gloo on each process at the number of
    the interface that reaches it: all at loopback if that is loopback. ``coordinator_bind_address``
    says otherwise.

    A process of several that ends by an exception, from here on, does not wait for the others as JAX
    does at exit: it prints the exception, runs the exit handlers that were registered after this
    call, and leaves with code 1, process 0 after 2 s.

    Raises PlanError where jax was used before or the coordinator does not answer, and, on every
    process, where one has other versions of collc, jax or Python, other XLA flags, settings or axes;
    it names the odd one out. Plans that are made later are compared likewise. Where others do not
    come at all, JAX aborts the process, and names some. Raises MeshError for hosts with different
    numbers of devices, and for axes that the devices do not fill.
    """
    if jax.distributed.is_initialized():
        raise PlanError("collc.init was called before in this process. Call it once, at the start.")
    if "initialization_timeout" in options:
        raise PlanError(
            "give timeout_s instead of initialization_timeout: it is for all that waits."
        )
    timeout_s = _checked(timeout_s)
    own = place()
    if not _alone(own, coordinator_address, num_processes, process_id):
        if own is not None:
            coordinator_address = coordinator_address or own.coordinator
            num_processes = own.processes if num_processes is None else num_processes
            process_id = own.process if process_id is None else process_id
            # Also inside an allocation of Slurm, which would leave each process one GPU.
            options = {"cluster_detection_method": "deactivate", **options}
        found = _detected(coordinator_address, num_processes, process_id, timeout_s, options)
        mine = {**facts(), **shape(axes, axis_types)}  # raises before others wait for this process
        _start(*found, timeout_s, options)
        compare("versions, flags and axes", mine, timeout_s)
    elif options:
        raise PlanError(
            f"a job of one process starts no runtime, so {', '.join(options)} would have no effect. "
            "Leave them out."
        )
    said = meet("its host", json.dumps(_whereabouts(own)), timeout_s)
    hosts = named({process: tuple(json.loads(text)) for process, text in said.items()})
    devices, names = grid(jax.devices(), hosts, axes)
    return Mesh(devices, names, axis_types=kinds(axis_types, len(names)))


def facts() -> dict[str, str]:
    """What has to be the same in all processes."""
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


def _alone(own: Place | None, *given: Any) -> bool:
    """Whether the caller asked for one process, and for nobody to talk to."""
    address, processes, process = given
    elsewhere = own is not None or address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    return processes == 1 and not elsewhere and not process


def _detected(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    timeout_s: float,
    options: dict[str, Any],
) -> tuple[str, int, int]:
    """The coordinator's address, how many processes, and which is this: given or as jax finds them."""
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    method = options.get("cluster_detection_method")
    if None in (coordinator, processes, process) and method != "deactivate":
        # What jax.distributed.initialize does itself; but here the address is needed before.
        with _inside_jax("find what a scheduler says"):
            from jax._src.clusters import ClusterEnv

            detect = ClusterEnv.auto_detect_unset_distributed_params
        coordinator, processes, process, _ = detect(
            coordinator, processes, process, None, method, _seconds(timeout_s)
        )
    found = {
        "the coordinator's address": coordinator,
        "the number of processes": processes,
        "which process this is": process,
    }
    if missing := [what for what, value in found.items() if value is None]:
        raise PlanError(
            f"collc.init does not know {' nor '.join(missing)}: neither collc launch nor Slurm, Open "
            "MPI or Kubernetes (with the package kubernetes) set it. Start the processes by one of "
            "them, give the arguments, or call collc.init(num_processes=1) for a single process."
        )
    assert coordinator is not None and processes is not None and process is not None
    if not all(isinstance(number, int) for number in (process, processes)) or not (
        0 <= process < processes
    ):
        raise PlanError(
            f"process {process!r} of {processes!r} cannot be. Number the processes from 0 to one less "
            "than there are."
        )
    return coordinator, processes, process


def _start(
    coordinator: str, processes: int, process: int, timeout_s: float, options: dict[str, Any]
) -> None:
    """Starts JAX's runtime, which listens at one address."""
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
    with _roll_call(process, timeout_s):
        jax.distributed.initialize(
            coordinator_address=coordinator,
            num_processes=processes,
            process_id=process,
            initialization_timeout=_seconds(timeout_s) + 10,  # the service speaks first
            **options,
        )
    # Right after it, so that at exit this runs just before what jax does.
    ending.leave_where_failed(jax.distributed.is_initialized, ending.AFTER_S * (process == 0))
    _listen_at(here)


def _used() -> bool:
    from jax._src import xla_bridge

    # Where it is called otherwise, jax itself refuses, only later and in its own words.
    return getattr(xla_bridge, "backends_are_initialized", bool)()


@contextmanager
def _roll_call(process: int, timeout_s: float) -> Iterator[None]:
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
            return usual(*given, cluster_register_timeout=_seconds(timeout_s), **options)
        except TypeError:  # it has no such argument
            return usual(*given, **options)

    line = (
        f"waiting for the other processes for {addresses.PATIENCE_S:g} s; after {timeout_s:g} s JAX "
        "ends all, and names some that have not come: its task names are numbers of processes"
    )
    notice = Timer(addresses.PATIENCE_S, _tell, (process, line))
    notice.daemon = True
    notice.start()
    if inner is not None and usual is not None:
        inner.get_distributed_runtime_service = service
    try:
        yield
    finally:
        if inner is not None and usual is not None:
            inner.get_distributed_runtime_service = usual
        notice.cancel()


def _listen_at(address: str) -> None:
    """Has gloo listen at this address, not at what the host's name happens to resolve to."""
    if getattr(jax.config, "jax_cpu_collectives_implementation", None) != "gloo":
        return
    with _inside_jax("have gloo listen at one address"):
        from jax._src import distributed, xla_bridge
        from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

        state, made = distributed.global_state, xla_bridge.make_cpu_client
        gloo, register = _jax.make_gloo_tcp_collectives, xla_bridge.register_backend_factory

    def client() -> Any:
        if state.client is None:  # after jax.distributed.shutdown
            return made()
        return made(gloo(distributed_client=state.client, hostname=address))

    # As jax registers its own; before the first use of a backend, so this one is taken.
    register("cpu", client, priority=0, fail_quietly=False)


@contextmanager
def _inside_jax(purpose: str) -> Iterator[None]:
    """Names that jax promises to nobody."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise PlanError(
            f"collc.init does not know how to {purpose} with jax {_version('jax')}: {error}. Take the "
            "jax that this collc was made for, or a newer collc."
        ) from error


def _whereabouts(own: Place | None) -> tuple[str, str]:
    """This host's name, and its boot, which tells apart machines of one name."""
    if own is not None:
        return own.host, ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        boot = ""
    return socket.gethostname(), boot


def _tell(process: int, line: str) -> None:
    print(f"collc.init, process {process}: {line}", file=sys.stderr, flush=True)


def _checked(timeout_s: Any) -> float:
    number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not number or not 0 < timeout_s <= LONGEST_S:
        raise PlanError(
            f"timeout_s is {timeout_s!r}: a number of seconds above 0 is needed, {LONGEST_S:,.0f} at "
            "most."
        )
    return float(timeout_s)


def _seconds(timeout_s: float) -> int:
    return max(1, math.ceil(timeout_s))  # JAX takes whole ones


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
