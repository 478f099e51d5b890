"""What `collc doctor` finds in versions, devices, settings, schedulers, names, limits: all planted."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from collc.runtime.doctor import flags, names, versions
from collc.runtime.doctor.devices import (
    MARK,
    Placed,
    Probe,
    devices,
    order,
    probe,
    read,
    visible_gpus,
)
from collc.runtime.doctor.finding import Finding, Level
from collc.runtime.doctor.host import Host
from collc.runtime.doctor.jobs import Job, job, scheduler
from collc.runtime.doctor.limits import SHARED, Limits, allowed, limits
from collc.runtime.doctor.nccl import nccl, variables
from collc.runtime.doctor.settings import SETTINGS, settings

from .planted import host

INSTALLED = {"collc": "0.1.0", "jax": "0.12.0.1", "jaxlib": "0.12.0.1"}
CUDA = {**INSTALLED, "jax-cuda13-plugin": "0.12.0.1", "jax-cuda13-pjrt": "0.12.0.1"}
PROPRIETARY = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024"
)
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@b)"


def gpus(n: int) -> dict[str, object]:
    return {f"/proc/driver/nvidia/gpus/0000:{i:02x}:00.0/information": "" for i in range(n)}


def only(findings: list[Finding], level: str, *words: str) -> None:
    """One finding of that level, with these words in what it says or in its remedy."""
    assert [f.level for f in findings] == [level], findings
    text = f"{findings[0].found} {findings[0].remedy}"
    assert all(word in text for word in words), text


def well(findings: list[Finding]) -> None:
    assert {f.level for f in findings} <= {Level.OK}, findings


@pytest.mark.parametrize("level", [Level.NOTE, Level.WARNING, Level.ERROR])
def test_a_finding_that_is_not_ok_needs_a_remedy(level):
    with pytest.raises(ValueError, match="needs a remedy"):
        Finding("x", level, "broken")


# ---- versions -----------------------------------------------------------------------------------


def test_python():
    well(versions.python((3, 11)))
    only(versions.python((3, 10)), "error", "3.10", "3.11 or newer")
    only(versions.python((3, 99)), "note", "newer")


@pytest.mark.parametrize(
    "changed, level, words",
    [
        ({"jax": "0.9.0"}, "error", ["0.10.2", "pip install -U jax"]),
        ({"jax-cuda13-plugin": "0.11.0"}, "error", ["plugin 0.11.0", "jax[cuda13]==0.12.0.1"]),
        ({"jax-cuda13-pjrt": "none"}, "error", ["pjrt none", "jax[cuda13]"]),
        (
            {"jax-cuda12-plugin": "0.12.0.1", "jax-cuda12-pjrt": "0.12.0.1"},
            "warning",
            ["12 and 13", "pip uninstall jax-cuda12-plugin"],
        ),
    ],
)
def test_packages_that_do_not_fit(changed, level, words):
    only(versions.packages({**CUDA, **changed}), level, *words)


def test_packages():
    well(versions.packages(CUDA))
    ahead = {**INSTALLED, "jaxlib": "0.13.0"}
    only(versions.packages(ahead), "error", "newer than jax", "jaxlib==0.12.0.1")
    only(versions.packages({"jax": "0.12"}), "error", "jaxlib is not installed")
    later = {"jax": "0.14.0", "jaxlib": "0.14.0"}
    only(versions.packages(later), "note", "newer than collc was tested with")


def test_the_oldest_versions_are_those_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert f">={'.'.join(map(str, versions.OLDEST_PYTHON))}" == project["requires-python"]
    assert f"jax>={versions.OLDEST_JAX}" in project["dependencies"]


def test_driver(tmp_path):
    old = versions.driver_version(host(tmp_path, {"/proc/driver/nvidia/version": PROPRIETARY}))
    new = versions.driver_version(host(tmp_path, {"/proc/driver/nvidia/version": OPEN}))
    assert (old, new) == ("550.54.14", "580.65.06")
    assert versions.driver_version(host(tmp_path / "none")) is None
    well(versions.driver(new, CUDA, True))
    only(versions.driver(old, CUDA, False), "error", "550.54.14", "580 or newer", "jax[cuda12]")
    only(versions.driver(old, CUDA, True), "note", "forward compatibility")
    only(versions.driver("470.1", CUDA, False), "error", "Install driver 580 or newer.")
    assert versions.driver(None, CUDA, False) == versions.driver(old, INSTALLED, False) == []


# ---- devices ------------------------------------------------------------------------------------


def test_what_another_process_says_of_its_devices():
    found = read(0, f'noise\n{MARK}[["gpu", "NVIDIA H100"], ["gpu", "NVIDIA H100"]]\n', "")
    assert found == Probe((("gpu", "NVIDIA H100"),) * 2)
    aborted = "F1130 12:16:13.08 27 parse.cc:234] Unknown flags in XLA_FLAGS: --xla_foo=1 --xla_b\n"
    assert read(-6, "", aborted).unknown == ("--xla_foo=1", "--xla_b")
    assert not read(-6, "", aborted).started
    unreadable = "E1130 x.cc:63] Couldn't interpret value x for flag xla_gpu_autotune_level.\n"
    assert read(-6, "", unreadable).malformed == ("xla_gpu_autotune_level=x",)
    failed = read(1, "", "Traceback\n  File\nRuntimeError: no jaxlib\nhint\n")
    assert failed == Probe((), "RuntimeError: no jaxlib", started=False)
    cpu = f'{MARK}[["cpu", "cpu"]]\n'
    assert "cuSPARSE" in read(0, cpu, "RuntimeError: Unable to load cuSPARSE\n").complaint


def test_a_process_that_does_not_answer_in_time():
    found = probe({"PATH": ""}, 0.01)
    assert not found.started
    assert "within 0.01 s" in found.complaint


def test_the_process_that_asks_leaves_memory_to_the_run(monkeypatch):
    asked = {}

    def answer(command, env, **_):
        asked.update(env)
        return subprocess.CompletedProcess(command, 0, f'{MARK}[["cpu", "cpu"]]', "")

    monkeypatch.setattr(subprocess, "run", answer)
    assert probe({"A": "b"}, 1).devices == (CPU,)
    assert asked == {"A": "b", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

    def refuse(*_, **__):
        raise OSError(2, "No such file")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert "No such file" in probe({}, 1).complaint


CPU, GPU = ("cpu", "cpu"), ("gpu", "NVIDIA H100")
ON_CPU, ON_GPU = Probe((CPU,)), Probe((GPU,))


@pytest.mark.parametrize(
    "there, found, installed, environment, level, words",
    [
        (0, Probe((CPU,)), INSTALLED, {}, "ok", ["1 × cpu"]),
        (0, Probe((CPU,)), CUDA, {"JAX_PLATFORMS": "cpu"}, "ok", ["1 × cpu"]),
        (8, Probe((GPU,) * 8), CUDA, {}, "ok", ["8 × NVIDIA H100"]),
        (8, Probe((CPU,)), CUDA, {"JAX_PLATFORMS": "cpu"}, "note", ["8 GPUs idle", "Unset"]),
        (8, Probe((CPU,)), INSTALLED, {}, "warning", ["no CUDA plugin", "jax[cuda13]"]),
        (8, Probe((CPU,), "cuInit"), CUDA, {}, "error", ["cuInit", "JAX_PLATFORMS=cuda"]),
        (0, Probe((CPU,)), CUDA, {}, "warning", ["no NVIDIA GPU is here", "nvidia-smi"]),
        (8, Probe((GPU,) * 4), CUDA, {}, "note", ["4 of the host's 8", "CUDA_VISIBLE_DEVICES"]),
        (2, Probe((GPU, ("gpu", "A100"))), CUDA, {}, "warning", ["several kinds", "equal"]),
        (0, Probe((), "no jaxlib", started=False), {}, {}, "error", ["no jaxlib", "import jax"]),
    ],
)
def test_devices(tmp_path, there, found, installed, environment, level, words):
    only(devices(host(tmp_path, gpus(there), **environment), found, installed), level, *words)


def test_a_flag_that_aborts_is_said_once():
    assert (
        devices(Host({}, Path("/nowhere")), Probe((), "F", ("--xla_x",), started=False), {}) == []
    )


def test_visible_gpus(tmp_path):
    planted = gpus(4)
    assert visible_gpus(host(tmp_path, planted)) == 4
    assert visible_gpus(host(tmp_path, CUDA_VISIBLE_DEVICES="1,2")) == 2
    assert visible_gpus(host(tmp_path, CUDA_VISIBLE_DEVICES="-1")) == 0
    assert visible_gpus(Host({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path / "none")) == 0


def test_mesh_order():
    def placed(text: str, slices: str = "") -> list[Placed]:
        return [Placed(h, int(s)) for h, s in zip(text, slices or "0" * len(text), strict=True)]

    well(order(placed("aabb"), "gpu"))
    only(order(placed("abab"), "gpu"), "warning", "keep hosts together", "collc.init()")
    only(order(placed("aabb", "0011"), "gpu"), "note", "2 slices", "collc.init()")
    well(order(placed("aabb", "0011"), "tpu"))


# ---- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, words",
    [
        ("--xla_cpu_enable_fast_math=true", ["no NaN", "Take it out of XLA_FLAGS"]),
        ("--xla_gpu_autotune_level=0", ["untuned", "without a GPU"]),
        ("--xla_dump_to=/tmp/x", ["every program", "collc compile"]),
        ("--xla_gpu_disable_async_collectives=allreduce", ["nothing overlaps"]),
        ("--xla_gpu_enable_latency_hiding_scheduler=false", ["overlapping"]),
        ("--xla_disable_hlo_passes=dce", ["leaves passes"]),
        (
            "--xla_gpu_autotune_level=1 --xla_gpu_autotune_level=4",
            ["1, 4", "the last one", "Keep one"],
        ),
    ],
)
def test_unsafe_xla_flags(tmp_path, text, words):
    only(flags.xla(host(tmp_path, XLA_FLAGS=text), ON_GPU), "warning", *words)


def test_xla_flags(tmp_path):
    safe = "--xla_gpu_autotune_level=4 --xla_cpu_enable_fast_math=false"
    well(flags.xla(host(tmp_path, XLA_FLAGS=safe), ON_GPU))
    well(flags.xla(host(tmp_path), ON_CPU))
    virtual = host(tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    only(flags.xla(virtual, ON_GPU), "note", "no effect on gpu", "JAX_PLATFORMS=cpu")
    well(flags.xla(virtual, ON_CPU))
    repeat = host(tmp_path, XLA_FLAGS="--xla_gpu_deterministic_ops=true")
    only(flags.xla(repeat, ON_GPU), "note", "slower")


def test_flags_that_abort(tmp_path):
    typo = host(tmp_path, XLA_FLAGS="--xla_gpu_autotune_levl=4")
    aborted = Probe(unknown=("--xla_gpu_autotune_levl=4",), started=False)
    found = flags.xla(typo, aborted, ["xla_gpu_autotune_level", "xla_b"])
    only(found, "error", "aborts at start", "Did you mean --xla_gpu_autotune_level?")
    unreadable = host(tmp_path, XLA_FLAGS="--xla_gpu_autotune_level=x")
    found = flags.xla(unreadable, Probe(malformed=("xla_gpu_autotune_level=x",), started=False))
    only(found, "error", "cannot read", "true or false")


def test_flags_that_were_not_tried_are_not_called_known(tmp_path):
    """jax did not start for another reason, so nobody knows what XLA says of them."""
    planted = host(tmp_path, XLA_FLAGS="--xla_nonsense=1")
    late = Probe((), "not within 1 s", started=False)
    only(flags.xla(planted, late), "note", "not tried", "Repair")
    only(flags.xla(host(tmp_path), late), "ok", "none set")


def test_flags_in_a_file(tmp_path):
    planted = host(tmp_path, {"/etc/flags": "--xla_dump_to=/tmp/x"}, XLA_FLAGS="/etc/flags")
    only(flags.xla(planted, ON_GPU), "warning", "--xla_dump_to=/tmp/x")
    nowhere = host(tmp_path, XLA_FLAGS="xla_dump_to=/tmp/x")
    only(flags.xla(nowhere, ON_GPU), "error", "does not begin with --", "--xla_name=value")


def test_every_flag_that_is_spoken_of_is_one_of_xla():
    known = flags.known_flags()
    assert len(known) > 100
    spoken = {unsafe.flag for unsafe in flags.UNSAFE} | {*flags.SLOWER, flags.VIRTUAL}
    assert spoken <= set(known)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_settings(setting):
    planted = {
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.99",
    }.get(setting.name, "1")
    only(settings({setting.name: planted}), setting.level, setting.name, planted, setting.remedy)
    calm = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.8", "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
    well(settings({setting.name: calm.get(setting.name, "0")}))


def test_levels_of_settings():
    """An error stops a run that would be wrong, a warning is what costs time, a note may be meant."""
    levels = {
        "error": {"JAX_DISABLE_JIT"},
        "note": {
            "JAX_ENABLE_X64",
            "JAX_DEFAULT_MATMUL_PRECISION",
            "JAX_LOG_COMPILES",
            "XLA_PYTHON_CLIENT_PREALLOCATE",
        },
    }
    found = {level: {s.name for s in SETTINGS if s.level == level} for level in levels}
    assert found == levels
    assert {s.level for s in SETTINGS} == {"error", "note", "warning"}


NET = {"/sys/class/net/eth0/mtu": 1500, "/sys/class/net/lo/mtu": 65536}
MLX = {"/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE"}


@pytest.mark.parametrize(
    "environment, level, words",
    [
        ({"NCCL_P2P_DISABLE": "1"}, "warning", ["not NVLink", "unset NCCL_P2P_DISABLE"]),
        ({"NCCL_SHM_DISABLE": "1"}, "warning", ["through the network", "unset"]),
        ({"NCCL_IB_DISABLE": "1"}, "warning", ["not RDMA", "unset"]),
        ({"NCCL_DEBUG": "INFO"}, "warning", ["logs", "NCCL_DEBUG=WARN"]),
        ({"NCCL_ALGO": "Ring"}, "note", ["overrule", "unset NCCL_ALGO"]),
        (
            {"NCCL_SOCKET_IFNAM": "eth0"},
            "warning",
            ["no effect", "Did you mean NCCL_SOCKET_IFNAME?"],
        ),
        ({"NCCL_ZZZ": "1"}, "note", ["documented", "unset NCCL_ZZZ"]),
        ({"NCCL_SOCKET_IFNAME": "bond0"}, "error", ["no interface", "eth0, lo", "unset"]),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "error", ["no interface"]),
        ({"NCCL_IB_HCA": "=mlx5_9:1"}, "error", ["no RDMA device", "mlx5_0"]),
    ],
)
def test_nccl(tmp_path, environment, level, words):
    only(nccl(host(tmp_path, NET | MLX, **environment)), level, *words)


def test_nccl_that_is_well(tmp_path):
    well(nccl(host(tmp_path, NET | MLX)))
    fine = {"NCCL_P2P_DISABLE": "0", "NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "^lo"}
    well(nccl(host(tmp_path, NET | MLX, NCCL_IB_HCA="mlx5", NCCL_FASTRAK_IFNAME="a", **fine)))


def test_nccl_reads_its_files_and_the_environment_overrules_them(tmp_path):
    files = {"/etc/nccl.conf": "# all\nNCCL_IB_DISABLE=1\nNCCL_DEBUG=INFO", "/root/.nccl.conf": "x"}
    planted = host(tmp_path, files, NCCL_DEBUG="WARN", HOME="/root")
    assert variables(planted) == {"NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "WARN"}
    only(nccl(planted), "warning", "NCCL_IB_DISABLE", "nccl.conf")


# ---- schedulers ---------------------------------------------------------------------------------

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "n[0-1]",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
EIGHT = {**SLURM, "SLURM_NTASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_LOCALID": "3"}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
LAUNCHED = {
    "COLLC_COORDINATOR": "127.0.0.1:1234",
    "COLLC_PROCESSES": "4",
    "COLLC_PROCESS": "1",
    "COLLC_HOST": "h1",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}


def test_jobs():
    assert job({}) is None
    assert job({**LAUNCHED, "COLLC_PROCESSES": "1"}) is None
    assert job(LAUNCHED) == Job("collc launch", 4, False)
    assert job({**LAUNCHED, "COLLC_COORDINATOR": "10.0.0.1:12"}) == Job("collc launch", 4, True)
    named = {**LAUNCHED, "COLLC_COORDINATOR": "n0:12", "COLLC_PROCESS": "0"}
    assert job(named) == Job("collc launch", 4, True, leads=True)
    assert job({**SLURM, "SLURM_PROCID": "0"}) == Job("Slurm", 2, True, 1, 0, leads=True)
    assert job(SLURM) == Job("Slurm", 2, True, 1, 0)
    assert job(EIGHT) == Job("Slurm", 16, True, 8, 3)
    assert job(MPI) == Job("Open MPI", 4, True, 2, 1)
    assert job(POD) == Job("Kubernetes", None, True)


@pytest.mark.parametrize(
    "environment, visible, level, words",
    [
        (
            SLURM,
            8,
            "warning",
            ["one GPU", "7 of 8", "--ntasks-per-node=8", "JAX_LOCAL_DEVICE_IDS=0,1"],
        ),
        (SLURM | {"JAX_LOCAL_DEVICE_IDS": "0,1"}, 2, "note", ["JAX_LOCAL_DEVICE_IDS=0,1"]),
        (EIGHT, 1, "error", ["number, 3", "JAX_LOCAL_DEVICE_IDS=0", "--gpus-per-task"]),
        (EIGHT, 4, "error", ["8 processes and 4 GPUs", "--ntasks-per-node=4"]),
        (EIGHT, 8, "ok", ["8 processes on 8 GPUs"]),
        (MPI, 8, "warning", ["under Open MPI", "6 of 8 GPUs stay idle"]),
        (EIGHT | {"http_proxy": "p"}, 0, "warning", ["http_proxy", "unset", "no_proxy"]),
        (POD, 8, "warning", ["Kubernetes", "jax[k8s]"]),
        (LAUNCHED, 0, "ok", ["4 processes started by collc launch"]),
        ({}, 8, "ok", ["on its own"]),
    ],
)
def test_schedulers(environment, visible, level, words):
    only(scheduler(environment, job(environment), visible, kubernetes=False), level, *words)


def test_a_script_of_slurm_without_srun():
    batch = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "0",
    }
    assert job(batch) is None
    only(scheduler(batch, None, 8, False), "warning", "4 nodes", "srun")


# ---- names, clocks, limits ----------------------------------------------------------------------


def test_a_name_that_resolves_to_loopback():
    well(names.own_name("n1", ["10.0.0.5"], across=True))
    well(names.own_name("n1", ["127.0.1.1"], across=False))
    leads = names.own_name("n1", ["127.0.1.1"], across=True, leads=True)
    only(leads, "error", "the coordinator listens there", "/etc/hosts", "10.0.0.5 n1")
    only(names.own_name("n1", ["127.0.1.1"], True), "warning", "127.0.1.1", "gloo", "/etc/hosts")
    only(names.own_name("n1", ["10.0.0.5", "::1"], True), "warning", "::1", "/etc/hosts")
    only(names.own_name("n1", [], True), "error", "does not resolve", "/etc/hosts")
    only(names.own_name("n1", [], False), "note", "does not resolve")
    assert names.addresses("127.0.0.1") == ("127.0.0.1",)
    assert names.addresses("no such name") == ()


def test_clocks(tmp_path):
    well(names.clock(host(tmp_path), True, True))
    only(names.clock(host(tmp_path), False, True), "warning", "NTP", "chrony")
    only(names.clock(host(tmp_path), False, False), "note", "chrony")
    only(names.clock(host(tmp_path), None, True), "note", "does not say")
    well(names.clock(host(tmp_path, {names.SYNCHRONIZED: ""}), False, True))
    well(names.apart({"a": 100.0, "b": 100.2, "c": 99.9}))
    only(names.apart({"a": 100.0, "b": 100.2, "c": 131.1}), "warning", "c by +30.9 s", "chronyc")
    assert names.apart({"a": 1.0}) == []
    two = names.apart({"a": 100.0, "b": 101.5})  # nobody knows which of them is right
    only(two, "warning", "clocks are 1.5 s apart: a, b")
    only(names.apart({"a": 0.0, "b": 0.95, "c": 1.9}), "warning", "1.9 s apart: a, b, c")
    well(names.apart({"a": 0.0, "b": 0.99}))


@pytest.mark.parametrize("state, kept", [(0, True), (1, True), (5, False), (-1, None)])
def test_what_the_kernel_says_of_its_clock(monkeypatch, state, kept):
    class Library:
        def adjtimex(self, buffer):
            return state

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(names.ctypes, "CDLL", lambda *_, **__: Library())
    assert names.kernel_clock() is kept


def test_limits():
    well(allowed(Limits(SHARED, -1, 1 << 20), rdma=True, several=True))
    well(allowed(Limits(SHARED, 1 << 16, 1024), rdma=False, several=False))
    only(
        allowed(Limits(64 << 20, -1, -1), False, False),
        "warning",
        "64 MiB",
        "--shm-size",
        "emptyDir",
    )
    only(allowed(Limits(None, -1, -1), False, False), "note", "not there", "tmpfs")
    locked = allowed(Limits(SHARED, 8 << 20, -1), rdma=True, several=False)
    only(locked, "warning", "8 MiB", "ulimit -l unlimited")
    plenty = Limits(SHARED, 500 << 30, -1, memory=512 << 30)
    well(allowed(plenty, rdma=True, several=False))
    files = allowed(Limits(SHARED, -1, 1024), rdma=False, several=True)
    only(files, "warning", "1024 files", "ulimit -n")
    only(allowed(Limits(SHARED, -1, 4095), False, True), "warning", "4095 files")
    well(allowed(Limits(SHARED, -1, 4096), rdma=False, several=True))
    only(
        allowed(Limits(SHARED, None, None), True, True),
        "ok",
        "enough shared memory; not checked: locked memory, open files",
    )
    assert limits(Host({}, Path("/nowhere"))).shared is None
