"""``collc.init``: JAX's distributed runtime, processes compared, a mesh in the order of hosts."""

import os
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from collc.analysis.mesh import checked_axes
from collc.errors import PlanError
from collc.lowering import meshes
from collc.planning.agree import compare
from collc.runtime.facts import facts
from collc.runtime.hosts import asked, grid, host_of_each
from collc.runtime.patience import seconds
from collc.runtime.place import Place, place
from collc.runtime.start import inside_jax, start, whole_seconds

# How long to wait for the other processes: JAX's own default, since the hosts of a cluster start apart.
START_S = 300.0


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

    The devices are in the order of slices, then of hosts, processes and ids, the last axis fastest. A
    host is what has one host name. The coordinator, process
    0, listens at the number of the coordinator's address only, gloo on each process at the number of
    the interface that reaches it: all at loopback if that is loopback. ``coordinator_bind_address``
    says otherwise.

    A process of several that ends by an exception, from here on, does not wait for the others as JAX
    does at exit: it prints the exception, runs the exit handlers that were registered after this
    call, and leaves with code 1, process 0 after 2 s.

    Raises PlanError where jax was used before or the coordinator does not answer, and, on every
    process, where one has other versions of collc, jax or Python, other XLA flags, settings or axes;
    it names the odd one out. Plans that are made later are compared likewise. Where others do not
    come at all, JAX aborts the process, and names some. Raises MeshError for axes and types that are
    none, for axes that the devices do not fill, for hosts with different numbers of devices, and for
    one whose devices are in several slices; LaunchError where XLA_FLAGS names a file that is not there.
    """
    if jax.distributed.is_initialized():
        raise PlanError("collc.init was called before in this process. Call it once, at the start.")
    if "initialization_timeout" in options:
        raise PlanError(
            "give timeout_s instead of initialization_timeout: it is for all that waits."
        )
    timeout_s = seconds("timeout_s", timeout_s, PlanError)
    axes = None if axes is None else checked_axes(axes)
    types = meshes.axis_types(axis_types, 2 if axes is None else len(axes))
    own = place()
    if not _alone(own, coordinator_address, num_processes, process_id):
        if own is not None:
            coordinator_address = coordinator_address or own.coordinator
            num_processes = own.processes if num_processes is None else num_processes
            process_id = own.process if process_id is None else process_id
            # Also inside an allocation of Slurm, which would leave each process one GPU.
            options = {"cluster_detection_method": "deactivate", **options}
        found = detected(coordinator_address, num_processes, process_id, timeout_s, options)
        mine = {**facts(), **asked(axes, types)}  # raises before others wait for this process
        start(*found, timeout_s, options)
        compare("versions, flags and axes", mine, timeout_s)
    elif options:
        raise PlanError(
            f"a job of one process starts no runtime, so {', '.join(options)} would have no effect. "
            "Leave them out."
        )
    devices, names = grid(jax.devices(), host_of_each(timeout_s), axes)
    return Mesh(devices, names, axis_types=types)


def _alone(
    own: Place | None, address: str | None, processes: int | None, process: int | None
) -> bool:
    """Whether the caller asked for one process, and for nobody to talk to."""
    elsewhere = own is not None or address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    return processes == 1 and not elsewhere and not process


def detected(
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
        with inside_jax("find what a scheduler says"):
            from jax._src.clusters import ClusterEnv

            detect = ClusterEnv.auto_detect_unset_distributed_params
        coordinator, processes, process, _ = detect(
            coordinator, processes, process, None, method, whole_seconds(timeout_s)
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
    if not all(isinstance(number, Integral) for number in (process, processes)) or not (
        0 <= process < processes
    ):
        raise PlanError(
            f"process {process!r} of {processes!r} cannot be. Number the processes from 0 to one less "
            "than there are."
        )
    return coordinator, int(processes), int(process)
