"""What `collc doctor` finds in flags of XLA, and in settings of jax and NCCL: all planted."""

from pathlib import Path

import pytest
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options

from collc.runtime.doctor import flags
from collc.runtime.doctor.devices import Probe
from collc.runtime.doctor.host import Host
from collc.runtime.doctor.nccl import nccl, variables
from collc.runtime.doctor.settings import (
    ABORT,
    ALLOCATOR,
    ALLOCATORS,
    COLLECTIVE,
    OLD_SHARE,
    SETTINGS,
    SHARE,
    settings,
)

from .planted import ON_CPU, ON_GPU, host, only, well


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
    only(flags.xla(nowhere, ON_GPU), "error", "does not begin with -,", "--xla_name=value")


def test_every_flag_that_is_spoken_of_is_one_of_xla():
    known = flags.library_flags()
    assert len(known) > 100
    spoken = {unsafe.flag for unsafe in flags.UNSAFE} | {*flags.SLOWER, flags.VIRTUAL}
    assert spoken <= set(known)


PREALLOCATE, UNCHECKED = "XLA_PYTHON_CLIENT_PREALLOCATE", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
# What jax's own code makes of each value: amiss, and well.
VALUES = {
    "JAX_DEFAULT_MATMUL_PRECISION": (["highest", "float32"], ["bfloat16", "tensorfloat32"]),
    PREALLOCATE: (["false", "False", "0"], ["", "true", "FALSE", "no", "off", " 0"]),
    UNCHECKED: (["1", "0", "false"], [""]),
    ALLOCATOR: (["platform", "PLATFORM"], [*(set(ALLOCATORS) - {"platform"}), "BFC"]),
    COLLECTIVE: (["many", "1.5", "1 GB"], ["", "1024", "0"]),
    ABORT: (["", "true"], ["0", "1"]),
    "CUDA_LAUNCH_BLOCKING": (["1"], ["0"]),
}
# jax does not start at what is neither true nor false: the check of devices says so.
TRUTH = (
    ["1", "true", "True", "YES", "y", "t", "on"],
    ["0", "false", "no", "f", "n", "off", "maybe"],
)


@pytest.mark.parametrize(
    "name",
    [name for name in dict.fromkeys(s.name for s in SETTINGS) if name not in (SHARE, OLD_SHARE)],
)
def test_settings(name):
    setting = next(s for s in SETTINGS if s.name == name)
    amiss, calm = VALUES.get(name, TRUTH)
    for value in amiss:
        only(settings({name: value}), setting.level, f"{name}={value} ", setting.remedy)
    for value in calm:
        well(settings({name: value}))


@pytest.mark.parametrize("value", ["", "arena", " bfc", "platform "])
def test_an_allocator_that_there_is_not(value):
    """jax takes an empty value for a name too."""
    only(settings({ALLOCATOR: value}), "error", f"{ALLOCATOR}={value} is none of default,", "unset")


def test_options_are_those_of_jaxlib(monkeypatch):
    """What is an error here, jaxlib refuses, and takes what is not."""
    options = generate_pjrt_gpu_plugin_options
    for name in (ALLOCATOR, COLLECTIVE, ABORT, SHARE, OLD_SHARE, PREALLOCATE):
        monkeypatch.delenv(name, raising=False)
    for name, refused in (
        (ALLOCATOR, ["", "arena", " bfc"]),
        (COLLECTIVE, VALUES[COLLECTIVE][0]),
        (ABORT, VALUES[ABORT][0]),
        (SHARE, ["much"]),
    ):
        for value in refused:
            monkeypatch.setenv(name, value)
            with pytest.raises(ValueError):
                options()
        monkeypatch.delenv(name)
    for name in (COLLECTIVE, ABORT):
        for value in VALUES[name][1]:
            monkeypatch.setenv(name, value)
            options()
        monkeypatch.delenv(name)
    for value, on in [(v, False) for v in VALUES[PREALLOCATE][0]] + [("FALSE", True), ("no", True)]:
        monkeypatch.setenv(PREALLOCATE, value)
        assert options()["preallocate"] is on
    for name in ("default", "platform", "bfc", "cuda_async", "vmm"):
        monkeypatch.setenv(ALLOCATOR, name)
        assert options()["allocator"] in ALLOCATORS


def test_long_values_are_cut():
    found = [
        *settings({ALLOCATOR: "a" * 5000}),
        *nccl(Host({"NCCL_P2P_DISABLE": "b" * 5000}, Path("/nowhere"))),
        *flags.xla(Host({"XLA_FLAGS": f"--xla_dump_to={'c' * 5000}"}, Path("/nowhere")), ON_GPU),
    ]
    assert len(found) == 3
    for finding, letter in zip(found, "abc", strict=True):
        assert f"={letter * 200}... (5,000 characters) " in finding.found


def test_the_share_of_memory_under_both_of_its_names():
    for name in (SHARE, OLD_SHARE):
        only(settings({name: "0.96"}), "warning", f"{name}=0.96 leaves NCCL", "0.9 or less")
        only(settings({name: "much"}), "error", f"{name}=much is no number", f"unset {name}")
        for value in ("0", "0.0", "-0.5", "nan"):
            only(settings({name: value}), "error", f"{name}={value} is no share of memory")
        well(settings({name: "0.1"}))
        well(settings({name: "0.95"}))
        well(settings({name: ""}))
    only(settings({SHARE: "0.8", OLD_SHARE: "0.8"}), "error", f"beside {SHARE}", "the old name")


def test_levels_of_settings():
    """An error stops a run that would be wrong, a warning is what costs time, a note may be meant."""
    levels = {
        "error": {"JAX_DISABLE_JIT", SHARE, OLD_SHARE, ALLOCATOR, COLLECTIVE, ABORT},
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
