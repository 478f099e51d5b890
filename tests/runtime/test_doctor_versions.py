"""What `collc doctor` finds in versions and devices: all planted."""

import subprocess
import tomllib
from pathlib import Path

import pytest

from collc.runtime.doctor import versions
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

from .planted import CPU, GPU, gpus, host, only, well

INSTALLED = {"collc": "0.1.0", "jax": "0.12.0.1", "jaxlib": "0.12.0.1"}
CUDA = {**INSTALLED, "jax-cuda13-plugin": "0.12.0.1", "jax-cuda13-pjrt": "0.12.0.1"}
PROPRIETARY = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024"
)
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@b)"


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
