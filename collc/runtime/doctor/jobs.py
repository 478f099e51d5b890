"""The job that this process is one of: who started it, and the traps of schedulers."""

from collections.abc import Mapping
from dataclasses import dataclass

from collc.errors import PlanError
from collc.runtime.addresses import endpoint, is_loopback, is_number
from collc.runtime.doctor.finding import (
    Finding,
    count,
    error,
    listed,
    message,
    note,
    ok,
    short,
    warning,
)
from collc.runtime.doctor.host import integer
from collc.runtime.place import place


@dataclass(frozen=True)
class Job:
    """Several processes. ``across``: on several machines, as far as the environment tells.

    ``here`` is the number of this host's processes, ``local`` this one's number among them, and
    None where the starter does not say it (then jax gives a process all GPUs). ``leads``: this is the
    coordinator, and the others look for it by this host's name.
    """

    by: str
    processes: int | None
    across: bool
    here: int | None = None
    local: int | None = None
    leads: bool = False


def job(environment: Mapping[str, str]) -> Job | None:
    """The job that variables of the environment tell of; None for a process on its own."""
    own = place(environment)
    if own is not None:
        name = endpoint(own.coordinator).host
        here = is_loopback(name)
        leads = own.process == 0 and not here and not is_number(name)
        found = Job("collc launch", own.processes, not here, leads=leads)
        return found if own.processes > 1 else None
    if "SLURM_STEP_NODELIST" in environment and "SLURM_PROCID" in environment:
        tasks = integer(environment.get("SLURM_NTASKS")) or 1
        nodes = integer(environment.get("SLURM_STEP_NUM_NODES")) or 1
        here = integer(environment.get("SLURM_STEP_TASKS_PER_NODE")) or max(tasks // nodes, 1)
        local = integer(environment.get("SLURM_LOCALID"))
        leads = nodes > 1 and environment["SLURM_PROCID"] == "0"  # jax takes the first node's name
        return Job("Slurm", tasks, nodes > 1, here, local, leads) if tasks > 1 else None
    if "OMPI_COMM_WORLD_SIZE" in environment:
        size = integer(environment["OMPI_COMM_WORLD_SIZE"]) or 1
        here = integer(environment.get("OMPI_COMM_WORLD_LOCAL_SIZE"))
        local = integer(environment.get("OMPI_COMM_WORLD_LOCAL_RANK"))
        return Job("Open MPI", size, here != size, here, local) if size > 1 else None
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        return Job("Kubernetes", None, True)
    return None


def called(environment: Mapping[str, str], name: str) -> str:
    """What the job calls this host: as ``collc launch`` says, else by its own name."""
    try:
        own = place(environment)
    except PlanError:  # a finding of ``read_job``
        return name
    return own.host if own else name


def read_job(environment: Mapping[str, str]) -> tuple[Job | None, list[Finding]]:
    """The job, or what is wrong with the variables that tell of it."""
    try:
        return job(environment), []
    except PlanError as problem:
        remedy = "Start the processes by collc launch, or unset what begins with COLLC_ there."
        return None, [error("job", message(problem), remedy)]


def scheduler(
    environment: Mapping[str, str], own: Job | None, gpus: int, kubernetes: bool
) -> list[Finding]:
    """The traps between a scheduler and jax.

    ``gpus``: visible to this process. ``kubernetes``: that Python package is installed.
    """
    if own is None:
        return _not_in_a_step(environment)
    found = []
    if own.by == "Kubernetes" and not kubernetes:
        what = "a Kubernetes pod without the Python package that jax asks for its job's processes"
        remedy = (
            'Add pip install "jax[k8s]" to the image, or pass collc.init(coordinator_address=...)'
        )
        found.append(warning("scheduler", what, remedy))
    found += _gpus(environment, own, gpus)
    proxies = sorted(name for name in environment if "_proxy" in name.lower() and environment[name])
    if own.across and any(name.lower() != "no_proxy" for name in proxies):
        what = f"{listed(proxies)} in a job: gRPC may send the coordinator's traffic to the proxy"
        remedy = f"unset {' '.join(proxies)}, or put the hosts' names into no_proxy."
        found.append(warning("scheduler", what, remedy))
    started = "processes" if own.processes is None else count(own.processes, "process")
    return found or [ok("scheduler", f"{started} started by {own.by}")]


def _not_in_a_step(environment: Mapping[str, str]) -> list[Finding]:
    nodes = integer(environment.get("SLURM_JOB_NUM_NODES")) or 1
    tasks = integer(environment.get("SLURM_NTASKS")) or 1
    if "SLURM_JOB_ID" not in environment or max(nodes, tasks) == 1:
        return [ok("scheduler", "a process on its own")]
    if "SLURM_STEP_NODELIST" in environment:
        return [ok("scheduler", "one task of Slurm")]
    what = (
        f"Slurm's job has {count(nodes, 'node')} and {count(tasks, 'task')}, but this process was not "
        "started by srun"
    )
    remedy = "In the sbatch script write srun before the command: without it jax sees one process."
    return [warning("scheduler", what, remedy)]


def _gpus(environment: Mapping[str, str], own: Job, gpus: int) -> list[Finding]:
    """jax gives each process the one GPU of its local number, where the starter says a number."""
    check, here, local = "one gpu per process", own.here, own.local
    if local is None or here is None or not gpus:
        return []
    chosen = environment.get("JAX_LOCAL_DEVICE_IDS")
    if chosen:
        return [
            note(
                check,
                f"JAX_LOCAL_DEVICE_IDS={short(chosen)} of {count(gpus, 'GPU')}, "
                f"{count(here, 'process')} here",
                "Unset JAX_LOCAL_DEVICE_IDS if that is not on purpose.",
            )
        ]
    each = ",".join(map(str, range(gpus)))
    told = f"under {own.by} jax gives each process one GPU, that of its local number"
    if gpus == 1 and local > 0:
        what = f"{told}, {local}; but this one sees a single GPU, number 0"
        remedy = (
            "export JAX_LOCAL_DEVICE_IDS=0, or let each task see all GPUs (no --gpus-per-task)."
        )
        return [error(check, what, remedy)]
    if gpus == 1:
        return []
    if here > gpus:
        what = f"{told}; there are {here} processes and {gpus} GPUs on this host"
        return [
            error(check, what, f"Start {gpus} processes on each host (--ntasks-per-node={gpus}).")
        ]
    if here < gpus:
        what = f"{told}; with {here} here, nothing uses {gpus - here} of {gpus} GPUs"
        one = (
            f"export JAX_LOCAL_DEVICE_IDS={each}"
            if here == 1
            else "set JAX_LOCAL_DEVICE_IDS in each"
        )
        remedy = f"srun --ntasks-per-node={gpus}, or {one}, or collc.init(local_device_ids=...)."
        return [warning(check, what, remedy)]
    return [ok(check, f"{here} processes on {gpus} GPUs")]
