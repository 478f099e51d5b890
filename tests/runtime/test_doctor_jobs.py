"""What `collc doctor` finds in schedulers, names, clocks and limits: all planted."""

import sys
from pathlib import Path

import pytest

from collc.runtime.doctor import names
from collc.runtime.doctor.host import Host
from collc.runtime.doctor.jobs import Job, job, scheduler
from collc.runtime.doctor.limits import SHARED, Limits, allowed, limits

from .planted import host, only, well

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
        (
            SLURM | {"JAX_LOCAL_DEVICE_IDS": "0,1"},
            2,
            "note",
            ["JAX_LOCAL_DEVICE_IDS=0,1 of 2 GPUs, 1 process here"],
        ),
        (EIGHT, 1, "error", ["number, 3", "JAX_LOCAL_DEVICE_IDS=0", "--gpus-per-task"]),
        (EIGHT, 4, "error", ["8 processes and 4 GPUs", "--ntasks-per-node=4"]),
        (EIGHT, 8, "ok", ["8 processes on 8 GPUs"]),
        (MPI, 8, "warning", ["under Open MPI", "with 2 here, nothing uses 6 of 8 GPUs"]),
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
    only(scheduler(batch, None, 8, False), "warning", "4 nodes and 4 tasks,", "srun")
    one = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    only(scheduler(one, None, 8, False), "warning", "2 nodes and 1 task, but")


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
    only(files, "warning", "1,024 files", "ulimit -n")
    only(allowed(Limits(SHARED, -1, 4095), False, True), "warning", "4,095 files")
    well(allowed(Limits(SHARED, -1, 4096), rdma=False, several=True))
    only(
        allowed(Limits(SHARED, None, None), True, True),
        "ok",
        "enough shared memory; not checked: locked memory, open files",
    )
    assert limits(Host({}, Path("/nowhere"))).shared is None
