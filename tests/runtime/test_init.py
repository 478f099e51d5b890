"""`collc.init`: two real processes over loopback, one on its own, and what schedulers say."""

import io
import re
import socket
import sys
import textwrap
import time

import pytest
from rich.console import Console

import collc
from collc.errors import MeshError, PlanError
from collc.runtime.init import detected
from collc.runtime.launch.job import Host, Job
from collc.runtime.launch.logs import Logs
from collc.runtime.place import Place

from ..processes import run

WORKER = textwrap.dedent(
    """
    import os, socket, sys
    try:  # a name of this host that means nothing: gloo would ask for it if nobody told it better
        os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWUTS)
        socket.sethostname("nowhere.invalid")
    except (AttributeError, OSError):
        pass  # not Linux, or not allowed
    import jax, jax.numpy as jnp, numpy as np
    import collc
    port, me, schedule = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    # As collc launch says it. Host h1 has process 0, so the order is not that of names.
    from collc.runtime.place import Place
    os.environ.update(Place(f"127.0.0.1:{port}", 2, me, f"h{1 - me}").environment())
    mesh = collc.init(timeout_s=60)
    print("MESH", dict(mesh.shape), [d.process_index for d in mesh.devices.flat], flush=True)
    if schedule == "auto":
        from collc.planning import tune
        tune.SIZES, tune.TURNS = (256, 4096), (1, 2)
        plan = collc.plan(mesh, "auto")
        if me == 1:
            os.remove(plan.tuned.where)  # process 0 still knows, and says so
        tune._sweep = None
        assert collc.plan(mesh, "auto") == plan
    else:
        plan = collc.plan(mesh, {"gpu": "ring", "host": schedule})

    @jax.jit
    @collc.schedule(plan, batch="x")
    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.25 * collc.pmean(grad), collc.pmean(loss)

    sharding = jax.sharding.NamedSharding(mesh, jax.P(("host", "gpu")))
    x = np.arange(24.0, dtype=np.float32).reshape(8, 3) % 5
    mine = jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
    w, loss = step(jnp.ones(3), mine)
    print("RESULT", np.asarray(w).tolist(), float(loss), flush=True)
    print("ADDRESSES", *addresses(), flush=True)
    """
)

# The local ends of this process's TCP sockets, and whether others can connect there.
ADDRESSES = textwrap.dedent(
    """
    import os, socket

    def addresses():
        mine = set()
        for fd in os.listdir("/proc/self/fd"):
            try:
                mine.add(os.readlink(f"/proc/self/fd/{fd}"))
            except OSError:  # that of the listing itself
                pass
        found = set()
        for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
            for line in open(f"/proc/self/net/{name}").readlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if f"socket:[{inode}]" in mine:
                    digits, port = local.split(":")
                    words = bytes.fromhex(digits)  # 32 bits each, in the order of the machine
                    number = b"".join(words[i:i + 4][::-1] for i in range(0, len(words), 4))
                    kind = "listens" if state == "0A" else "talks"
                    found.add(f"{kind}={socket.inet_ntop(family, number)}".replace("::ffff:", ""))
        return sorted(found)
    """
)
WORKER = ADDRESSES + WORKER


def train(tmp_path, schedules, flags=("", "")):
    both = "--xla_force_host_platform_device_count=2"
    environments = [
        {"COLLC_CACHE": str(tmp_path / f"cache{me}"), "XLA_FLAGS": f"{both} {flags[me]}"}
        for me in range(2)
    ]
    return run(WORKER, [[schedule] for schedule in schedules], environments)


@pytest.mark.newest_only
@pytest.mark.parametrize("schedule", ["tree", "auto"])
def test_two_processes_train_as_one(tmp_path, schedule):
    """With what a sweep chose too, which process 0 decides, now or from what it kept."""
    import numpy as np

    results = train(tmp_path, (schedule, schedule))
    assert [code for code, _, _ in results] == [0, 0], results
    said, meshes, ends = (
        {line for _, out, _ in results for line in out.splitlines() if line.startswith(word)}
        for word in ("RESULT", "MESH", "ADDRESSES")
    )
    assert meshes == {"MESH {'host': 2, 'gpu': 2} [0, 0, 1, 1]"}
    if sys.platform == "linux":
        # Neither JAX's service nor gloo listens anywhere else, whatever this host's name means.
        assert ends == {"ADDRESSES listens=127.0.0.1 talks=127.0.0.1"}
    x = np.arange(24.0).reshape(8, 3) % 5
    w = 1 - 0.25 * 2 * x.T @ (x @ np.ones(3)) / 8
    assert said == {f"RESULT {w.tolist()} {np.mean((x @ np.ones(3)) ** 2)}"}


@pytest.mark.newest_only
def test_a_process_with_another_plan_is_named(tmp_path):
    results = train(tmp_path, ("tree", "ring"))
    for code, _, err in results:
        assert code == 1
        assert "the processes differ in their plans" in err
        assert "process 1 (host" in err and '"host": "ring"' in err


@pytest.mark.newest_only
def test_a_process_with_other_flags_is_named(tmp_path):
    results = train(tmp_path, ("tree", "tree"), ("", "--xla_cpu_enable_fast_math=true"))
    for code, _, err in results:
        assert code == 1
        assert "process 1 (host" in err and "xla_cpu_enable_fast_math" in err


@pytest.mark.newest_only
def test_a_process_with_other_axes_is_named(tmp_path):
    script = textwrap.dedent(
        """
        import sys, collc
        port, me, axis = sys.argv[1], int(sys.argv[2]), sys.argv[3]
        collc.init(f"127.0.0.1:{port}", 2, me, axes={axis: 4}, timeout_s=60)
        """
    )
    for code, _, err in run(script, [["data"], ["model"]]):
        assert code == 1
        assert "process 1 (host" in err and "axes = 'model=4', the others 'data=4'" in err


FAILS = textwrap.dedent(
    """
    import atexit, os, sys
    import collc
    from collc.planning.agree import meet
    collc.init(timeout_s=60)
    atexit.register(print, "HANDLER")
    if os.environ["COLLC_HOST"] == sys.argv[1]:
        raise ValueError("bad data")
    meet("go on")
    """
)


@pytest.mark.newest_only
@pytest.mark.parametrize("host", ["h0", "h1"])
def test_a_process_that_fails_does_not_wait_for_the_others(host):
    """Without collc.fit, whose watchdog would end them; whether it is the coordinator or not."""
    out, err = (Console(file=io.StringIO(), width=200) for _ in range(2))
    job = Job((sys.executable, "-c", FAILS, host), (Host("h0"), Host("h1")), grace_s=0.5)
    began = time.monotonic()
    (failure,) = job.run(Logs(out, err)).failures
    assert time.monotonic() - began < 60, "not JAX's 300 s"
    assert failure.host == host and "ValueError: bad data" in failure.lines
    assert f"{host} | HANDLER" in out.file.getvalue()  # pyright: ignore


LOST = textwrap.dedent(
    """
    import sys
    import collc
    port, me, coordinator = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    collc.init(coordinator or f"127.0.0.1:{port}", 2, me, timeout_s=2)
    """
)


@pytest.mark.newest_only
def test_who_does_not_come_is_named():
    """Process 0 waits for process 1, which looks for it at a port where nobody is."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
        (code, _, err), (lost, _, said) = run(LOST, [[""], [nobody]])
    assert code not in (0, 1)  # JAX aborts
    assert re.search(r"reached the barrier: 1/2\b.*timed out task names:\s*1\s", err, re.S), err
    assert lost == 1
    assert f"PlanError: the coordinator {nobody} has not answered within 2 s" in said


def test_a_job_of_the_launcher_is_not_taken_for_one_of_slurm(monkeypatch):
    class Enough(Exception):
        pass

    def detected(*found):
        raise Enough(*found)

    monkeypatch.setattr("collc.runtime.init.detected", detected)
    for name, value in Place("127.0.0.1:1", 4, 3, "h3").environment().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Enough) as found:
        collc.init(timeout_s=7)
    options = {"cluster_detection_method": "deactivate"}
    assert found.value.args == ("127.0.0.1:1", 4, 3, 7, options)


def test_one_process_has_a_mesh_too(monkeypatch):
    import jax

    for name in ("KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID", "JAX_COORDINATOR_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    n = jax.device_count()
    mesh = collc.init(num_processes=1)
    assert mesh == jax.make_mesh(
        (1, n), ("host", "gpu"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    explicit = jax.sharding.AxisType.Explicit
    assert collc.init(num_processes=1, axes={"data": n}, axis_types=explicit) == jax.make_mesh(
        (n,), ("data",), axis_types=(explicit,)
    )
    with pytest.raises(MeshError, match="Give sizes whose product"):
        collc.init(num_processes=1, axes={"data": n + 1})
    with pytest.raises(MeshError, match="one for each of 2 axes"):
        collc.init(num_processes=1, axis_types=(explicit,))
    with pytest.raises(PlanError, match="heartbeat_timeout_seconds would have no effect"):
        collc.init(num_processes=1, heartbeat_timeout_seconds=9)
    with pytest.raises(PlanError, match=r"does not know the coordinator's address nor the number"):
        collc.init()
    with pytest.raises(PlanError, match="give timeout_s instead"):
        collc.init(initialization_timeout=9)
    with pytest.raises(PlanError, match="process 2 of 2 cannot be"):
        collc.init("127.0.0.1:1", 2, 2)


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf"), 1e300, True, None, "7"])
def test_a_time_that_cannot_be(wrong):
    with pytest.raises(PlanError, match=r"timeout_s is .*: a number of seconds above 0 is needed"):
        collc.init(num_processes=1, timeout_s=wrong)


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[003-006]",
    "SLURM_NTASKS": "32",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "5",
}
OPEN_MPI = {
    "OMPI_VERSION": "4.1.6",
    "OMPI_MCA_orte_hnp_uri": "4096.0;tcp://10.0.0.3:40000",
    "OMPI_COMM_WORLD_SIZE": "32",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "5",
}


@pytest.mark.parametrize(
    ("environment", "coordinator"), [(SLURM, "node003:61447"), (OPEN_MPI, "10.0.0.3:61441")]
)
def test_what_a_scheduler_says_is_taken(monkeypatch, environment, coordinator):
    """By jax's own detection; what is given goes before."""
    for name in {*SLURM, *OPEN_MPI, "KUBERNETES_SERVICE_HOST", "JAX_COORDINATOR_ADDRESS"}:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert detected(None, None, None, 1, {}) == (coordinator, 32, 5)
    assert detected("10.0.0.9:1", None, None, 1, {}) == ("10.0.0.9:1", 32, 5)
    with pytest.raises(PlanError, match="does not know"):
        detected(None, None, None, 1, {"cluster_detection_method": "deactivate"})
