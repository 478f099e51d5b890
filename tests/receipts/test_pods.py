"""Pods: shapes and targets without jax's CUDA plugin, XLA's choices with it."""

import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import collc
from collc.errors import MeshError, PodError
from collc.receipts.pods import describe, flags, parse_pod, target, toolchain
from collc.receipts.pods import mesh as home

H100 = (target.CATALOGUE / "h100.toml").read_text(encoding="utf-8")


class Device:
    """Stands for a compile-only device, where none is needed."""

    platform, process_index = "gpu", 0

    def __init__(self, number):
        self.id = number


@pytest.fixture
def shapes(monkeypatch):
    """What pod asks XLA for, (topology, GPUs of a host, GPUs of a domain), without asking it."""
    asked = []

    def devices(target, topology, gpus, domain):
        asked.append((topology, gpus, domain))
        return tuple(Device(number) for number in range(np.prod([*map(int, topology.split("x"))])))

    monkeypatch.setattr(home, "_devices", devices)
    return asked


@pytest.mark.parametrize(
    ("name", "axes", "numbers", "shape", "topology"),
    [
        ("h100", None, dict(hosts=64, gpus=8), {"host": 64, "gpu": 8}, "64x1x8"),
        ("h100", None, {}, {"host": 1, "gpu": 8}, "1x1x8"),
        ("h100", None, dict(hosts=4, gpus=2), {"host": 4, "gpu": 2}, "4x1x2"),
        ("h100", {"host": 64, "data": 2, "model": 4}, {}, None, "64x1x8"),
        ("h100", {"slice": 4, "host": 8, "data": 2, "model": 4}, dict(hosts=32), None, "32x1x8"),
        ("h100", None, dict(hosts=4, domain=16), {"host": 4, "gpu": 8}, "2x2x8"),
        ("h100", {"gpu": 8}, dict(domain=4), None, "2x1x4"),
        ("gb200-nvl72", {"rack": 2, "gpu": 72}, {}, None, "2x18x4"),
        ("gb200-nvl72", None, dict(hosts=2), {"host": 2, "gpu": 4}, "1x2x4"),
        ("gb200-nvl72", None, dict(hosts=8, domain=16), {"host": 8, "gpu": 4}, "2x4x4"),
    ],
)
def test_a_topology_is_domains_of_hosts_of_gpus(shapes, name, axes, numbers, shape, topology):
    mesh = collc.pod(name, axes, **numbers)
    assert dict(mesh.shape) == (shape or axes)
    assert shapes[-1][0] == topology
    assert [device.id for device in mesh.devices.flat] == list(range(mesh.size))
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_axis_types_are_those_asked_for(shapes):
    both = (AxisType.Explicit, AxisType.Auto)
    assert collc.pod("h100", axis_types=both).axis_types == both
    assert collc.pod("h100", axis_types=AxisType.Explicit).axis_types == (AxisType.Explicit,) * 2


def test_a_pod_is_named_by_a_text(shapes):
    assert dict(parse_pod("h100:64x8").shape) == {"host": 64, "gpu": 8}
    axes = {"host": 64, "data": 2, "model": 4}
    assert dict(parse_pod("h100:64x8(host=64, data=2, model=4)").shape) == axes
    assert dict(parse_pod("h100:64x8", "host=64,data=2,model=4").shape) == axes
    parse_pod("gb200-nvl72:36x4")
    assert shapes[-1] == ("2x18x4", 4, 72)


@pytest.mark.parametrize(
    ("arguments", "numbers", "said"),
    [
        (("h10",), {}, "there is no target 'h10'. Did you mean h100"),
        (("H100",), {}, "Did you mean h100"),
        (("h100", {"gpu": 8, "host": 3}), dict(hosts=2), "2 hosts with 8 GPUs each have 16"),
        (("h100", {"gpu": 12}), {}, "hold 12 GPUs, which do not fill hosts of 8"),
        (("h100",), dict(hosts=True), "hosts has to be a positive integer, not True"),
        (("h100",), dict(hosts=-1), "hosts has to be a positive integer, not -1"),
        (("h100",), dict(gpus=1.5), "gpus has to be a positive integer, not 1.5"),
        (("h100",), dict(hosts=10**9), "8,000,000,000 GPUs are more than the 65,536"),
        (("h100",), dict(hosts=3, domain=16), "do not divide into NVLink domains of 16 GPUs"),
        (("h100",), dict(hosts=8, gpus=64), "Are hosts and gpus the wrong way round?"),
        (("h100",), dict(domain=16), "domain=16 is more than the 8 GPUs of the pod"),
        (("h100",), dict(domain=0), "domain has to be a positive integer, not 0"),
        (("gb200-nvl72",), dict(hosts=19), "19 hosts with 4 GPUs each do not divide"),
        (("no/such.toml",), {}, "target file no/such.toml: No such file"),
    ],
)
def test_a_pod_that_cannot_be_is_refused(arguments, numbers, said):
    with pytest.raises(PodError, match=re.escape(said)):
        collc.pod(*arguments, **numbers)


@pytest.mark.parametrize(
    ("axes", "axis_types", "said"),
    [
        ({}, None, "axes maps names to sizes"),
        (["gpu"], None, "axes maps names to sizes"),
        ({"a b": 8}, None, "'a b' cannot name an axis"),
        ({"gpu": 0}, None, "the size of axis gpu has to be a positive integer, not 0"),
        (None, (AxisType.Auto,), "one for each of 2 axes"),
        (None, "Auto", "one for each of 2 axes"),
    ],
)
def test_axes_that_are_none_are_refused(axes, axis_types, said):
    with pytest.raises(MeshError, match=re.escape(said)):
        collc.pod("h100", axes, axis_types=axis_types)


@pytest.mark.parametrize(
    "text", ["", "h100", "h100:", "h100:8", "h100:8x", "h100:-1x8", "h100:1x8(", "h100:1x8()x"]
)
def test_a_text_that_names_no_pod_is_refused(text):
    with pytest.raises(PodError, match="not of the form TARGET:HOSTSxGPUS"):
        parse_pod(text)


def test_a_text_with_wrong_axes_is_refused():
    with pytest.raises(MeshError, match="not an axis with its size"):
        parse_pod("h100:1x8(gpu)")
    with pytest.raises(PodError, match="Drop one of them"):
        parse_pod("h100:1x8(gpu=8)", "gpu=8")
    with pytest.raises(PodError, match="hosts has to be a positive integer, not 0"):
        parse_pod("h100:0x8")


# ---- targets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", target.catalogue())
def test_the_catalogue_is_plausible(name):
    gpu = target.find(name)
    assert gpu.name == name
    assert 40e9 < gpu.device_memory_size < 200e9
    assert 1.5e12 <= gpu.memory_bandwidth <= 8e12
    assert gpu.gpus_per_domain % gpu.gpus_per_host == 0
    major = int(gpu.compute_capability.split(".")[0])
    assert major == {"a": 8, "h": 9, "b": 10, "g": 10}[name[0]]


def test_a_target_can_be_a_file(tmp_path, shapes):
    path = tmp_path / "mine.toml"
    path.write_text(H100.replace("gpus_per_host = 8", "gpus_per_host = 4"), encoding="utf-8")
    for given in (path, str(path)):
        assert asdict(target.find(given)) == asdict(target.find("h100")) | {
            "name": "mine",
            "gpus_per_host": 4,
        }
    assert dict(parse_pod(f"{path}:2x4").shape) == {"host": 2, "gpu": 4}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("core_count", "cores_count", "has a field 'cores_count'. Did you mean core_count"),
        ("core_count = 132", "", "core_count missing. All fields are needed"),
        ("132", '"many"', "core_count has to be an integer, not 'many'"),
        ("132", "132.5", "core_count has to be an integer, not 132.5"),
        ("132", "true", "core_count has to be an integer, not True"),
        ("132", "-132", "core_count has to be positive and at most 2**53, not -132"),
        ("132", "0", "core_count has to be positive and at most 2**53, not 0"),
        ("1.98", "nan", "clock_rate_ghz has to be positive and at most 2**53, not nan"),
        ("active_links = 18", "active_links = -1", "active_links has to be 0 or more"),
        ('"9.0a"', '"9a"', "compute_capability has to be one from 8.0 to 12.9, such as 9.0a"),
        ('"9.0a"', "9.0", "compute_capability has to be a text, not 9.0"),
        ("NVIDIA", r"\" }", "device has to be printable ASCII without quotes"),
        ("core_count = 132", "core_count: 132", "not TOML: "),
        ("132", "132\ncore_count = 1", "not TOML: "),
        (H100, "", "empty. It needs the fields device, compute_capability"),
        (H100, "\0", "not TOML: "),
    ],
)
def test_a_file_that_is_no_target_is_refused(tmp_path, old, new, said):
    path = tmp_path / "mine.toml"
    assert old in H100
    path.write_text(H100.replace(old, new), encoding="utf-8")
    with pytest.raises(PodError, match=re.escape(said)) as refused:
        collc.pod(path)
    assert str(refused.value).startswith(f"target file {path}: ")


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xff\xfe")
    for given in (path, tmp_path):
        with pytest.raises(PodError, match="target file"):
            collc.pod(given)


# ---- what has to be installed -------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """`installed({"jaxlib": "1"}, ptxas=False)`: as if these packages were all there are."""

    def pretend(packages, ptxas=True):
        monkeypatch.setattr(toolchain, "_version", lambda name: packages.get(name, ""))
        monkeypatch.setattr(toolchain, "version", lambda name: packages[name])
        monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr(
            toolchain.shutil, "which", lambda *a, **k: "/x/ptxas" if ptxas else None
        )

    return pretend


def test_what_is_missing_is_said_with_how_to_install_it(installed):
    jax_ = {"jax": "1", "jaxlib": "1"}
    both = {"jax-cuda13-pjrt": "1", "jax-cuda13-plugin": "1"}
    how = re.escape('pip install "collc[pods]"')
    installed(jax_)
    with pytest.raises(PodError, match=f"CUDA plugin, which is not installed: {how}"):
        toolchain.ready()
    installed(jax_ | both | {"jax-cuda13-pjrt": "2"})
    found = "jax 1, jaxlib 1, jax-cuda13-pjrt 2, jax-cuda13-plugin 1"
    with pytest.raises(PodError, match=f"{found}. {how} --upgrade"):
        toolchain.ready()
    installed(jax_ | {"jax-cuda12-pjrt": "1"})
    with pytest.raises(PodError, match=f"jax-cuda12-plugin missing. {how}"):
        toolchain.ready()
    installed(jax_ | both, ptxas=False)
    with pytest.raises(PodError, match=f"needs NVIDIA's assembler ptxas.*{how}"):
        toolchain.ready()
    installed(jax_ | both)
    toolchain.ready()


# ---- flags --------------------------------------------------------------------------------------


def test_options_are_read_from_texts():
    texts = ["xla_a=1", "--xla_b=True", "xla_c=x=y", "xla_d="]
    assert flags.parse_options(texts) == {
        **{"xla_a": "1", "xla_b": True, "xla_c": "x=y", "xla_d": ""},
    }
    for wrong in ("xla_a", "=1", "xla a=1", ""):
        with pytest.raises(PodError, match="not of the form NAME=VALUE"):
            flags.parse_options([wrong])
    with pytest.raises(PodError, match="xla_a is given twice"):
        flags.parse_options(["xla_a=1", "--xla_a=2"])


def test_flags_that_only_say_how_many_devices_need_no_process(monkeypatch):
    monkeypatch.setattr(flags, "_start", None)
    flags.probe_environment()  # those of this test run
    monkeypatch.setenv("XLA_FLAGS", "")
    flags.probe_environment()


@pytest.mark.parametrize(
    ("wrote", "said"),
    [
        (
            "E1 command_line_flags.cc:63] Couldn't interpret value zz for flag xla_dump_to.\nF1",
            "XLA_FLAGS: Couldn't interpret value zz for flag xla_dump_to.",
        ),
        (
            'F1 parse.cc:171] Could not open file "/no/such/file" to read flags',
            'XLA_FLAGS: Could not open file "/no/such/file" to read flags',
        ),
        ("Killed", "XLA_FLAGS: jax does not start with '--xla_x': it ends with -6. Killed"),
    ],
)
def test_what_xla_has_against_flags_is_said(monkeypatch, wrote, said):
    monkeypatch.setattr(flags, "_start", lambda flags: (-6, wrote))
    monkeypatch.setenv("XLA_FLAGS", "--xla_x")
    flags._probe.cache_clear()
    with pytest.raises(PodError) as refused:
        flags.probe_environment()
    assert str(refused.value) == said


@pytest.mark.newest_only
def test_flags_that_would_end_the_process_are_refused(pod, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_levl=1 --xla_gpu_autotune_level")
    with pytest.raises(PodError) as refused:
        flags.probe_environment()
    unknown, bare = str(refused.value).splitlines()
    assert "knows no flag xla_gpu_autotune_levl. Did you mean xla_gpu_autotune_level" in unknown
    assert bare == "xla_gpu_autotune_level needs a value"
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    flags.probe_environment()


@pytest.mark.newest_only
def test_options_that_xla_does_not_know_are_refused(pod):
    flags.check_options({"xla_gpu_autotune_level": "0", "xla_dump_to": "/x"})
    wrong = {
        "xla_gpu_autotune_levl": 0,
        "xla_gpu_enable_latency_hiding_scheduler": "maybe",
        "xla_dump_to": 1,
        "xla_gpu_autotune_level": None,
    }
    with pytest.raises(PodError) as refused:
        flags.check_options(wrong)
    unknown, *rest = str(refused.value).splitlines()
    assert "knows no flag xla_gpu_autotune_levl. Did you mean xla_gpu_autotune_level" in unknown
    assert rest == [
        "the XLA flag xla_gpu_enable_latency_hiding_scheduler: 'maybe' is not a valid bool value.",
        "xla_dump_to has to be a folder, not 1.",
        "xla_gpu_autotune_level has to be a text, a number or a bool, not None.",
    ]
    assert len(flags.known_flags()) > 200


# ---- compiled -----------------------------------------------------------------------------------


def compiled(mesh, axes, elements=256):
    """An all-reduce of so many float32 per device over the axes: its optimised HLO."""
    spread = P(mesh.axis_names)
    x = jax.ShapeDtypeStruct(
        (elements * mesh.size,), jnp.float32, sharding=NamedSharding(mesh, spread)
    )
    body = jax.shard_map(
        lambda x: jax.lax.psum(x, axes), mesh=mesh, in_specs=spread, out_specs=spread,
        check_vma=False,
    )  # fmt: skip
    return jax.jit(body).lower(x).compile().as_text()


def kernels(mesh, axes, elements=256):
    found = re.findall(r"KERNEL_STRATEGY_(?:TRITON_)?(\w+)", compiled(mesh, axes, elements))
    return set(found)


@pytest.mark.newest_only
@pytest.mark.parametrize("name", target.catalogue())
def test_every_target_compiles_beside_the_cpu(pod, name):
    before = jax.jit(lambda x: x + 1)(1.0)
    mesh = pod(name, hosts=2)
    assert "all-reduce" in compiled(mesh, mesh.axis_names)
    assert {device.device_kind for device in mesh.devices.flat} == {target.find(name).device}
    assert jax.jit(lambda x: x + 1)(1.0) == before
    assert {device.platform for device in jax.devices()} == {"cpu"}


@pytest.mark.newest_only
def test_xla_follows_the_domain(pod):
    """XLA has kernels of its own for small all-reduces over NVLink; between domains it takes NCCL."""
    mesh, racks = pod("h100", hosts=2), pod("gb200-nvl72", {"rack": 2, "a": 9, "gpu": 8})
    assert kernels(mesh, "gpu") == kernels(racks, "gpu") == {"ONE_SHOT"}
    assert kernels(mesh, "gpu", 2**18) == {"TWO_SHOT"}
    assert kernels(mesh, ("host", "gpu")) == {"DEFAULT"}
    assert kernels(pod("h100", hosts=2, domain=16), "host") == {"ONE_SHOT"}
    if jax.__version_info__ < (0, 12):
        return  # XLA looked at the size of the groups alone then
    assert kernels(mesh, "host") == kernels(racks, "rack") == {"DEFAULT"}
    assert kernels(pod("h100", domain=4), "gpu") == {"DEFAULT"}


@pytest.mark.newest_only
def test_a_mesh_says_what_it_stands_for(pod):
    mesh = pod("gb200-nvl72", {"rack": 2, "gpu": 72})
    found = describe(mesh)
    assert (found.name, found.gpus, found.domain) == ("gb200-nvl72", 4, 72)
    assert found.memory == target.find("gb200-nvl72").device_memory_size
    np.testing.assert_array_equal(found.domain_of, np.arange(144) // 72)
    np.testing.assert_array_equal(found.host_of, np.arange(144) // 4)
    turned = Mesh(mesh.devices.T[:4], ("gpu", "rack"))
    np.testing.assert_array_equal(describe(turned).domain_of, [0, 1] * 4)
    np.testing.assert_array_equal(describe(turned).host_of, [0, 18] * 4)


@pytest.mark.newest_only
def test_equal_pods_are_one(pod):
    mesh = pod("h100", hosts=2)
    assert pod("h100", {"host": 2, "gpu": 8}) == mesh
    assert pod("h100", hosts=2, domain=16) != mesh
    mixed = np.concatenate([mesh.devices[0], pod("h100", hosts=4).devices[0]])
    assert describe(Mesh(mixed, ("gpu",))) is None


def test_other_meshes_stand_for_themselves():
    assert describe(Mesh(np.array(jax.devices()[:4]), ("gpu",))) is None


@pytest.mark.newest_only
def test_no_gpu_and_no_platform_named_is_well(pod, tmp_path):
    """Without JAX_PLATFORMS jax looks for CUDA's libraries, unless the pod comes first."""
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a GPU")
    program = "import collc, jax; collc.pod('h100'); print(jax.numpy.ones(2).sum(), jax.devices())"
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, text=True,
        capture_output=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "2.0 [CpuDevice(id=0)]\n"), done.stderr


def test_a_plugin_that_jax_has_not_taken_up_is_said(monkeypatch):
    def refuse(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(toolchain, "ready", lambda: None)
    monkeypatch.setattr(home.topologies, "get_topology_desc", refuse)
    with pytest.raises(PodError, match="Set JAX_PLATFORMS=cpu, or make the pod before that"):
        collc.pod("h100", hosts=3, gpus=5)
