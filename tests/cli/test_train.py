"""collc train: how options become a config and an environment. The training itself is faked."""

import importlib
import json
import os
import shlex
import signal
import sys
import types
from pathlib import Path

import pytest

from collc.errors import CheckpointError

FLAG = "--xla_force_host_platform_device_count"
PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=300"


@pytest.fixture
def trained(cli, monkeypatch):
    """`trained("--demo")` is the config that the training gets; `.status` is what it returns."""

    def train(config, console=None, interrupt=None):
        assert interrupt.starting and signal.getsignal(signal.SIGTERM) == interrupt._remember
        found.append(config)
        return types.SimpleNamespace(exit_status=run.status)

    found: list = []
    fake = types.ModuleType("collc.training.lm.train")
    fake.train = train  # pyright: ignore[reportAttributeAccessIssue]
    package = importlib.import_module("collc.training.lm")
    monkeypatch.setitem(sys.modules, "collc.training.lm.train", fake)
    monkeypatch.setattr(package, "train", fake, raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")

    def run(*args: str):
        found.clear()
        result = cli("train", *args)
        assert result.exit_code == run.status, result.output
        assert "Traceback" not in result.stderr
        return found[0]

    run.status = 0
    return run


def test_defaults_are_those_of_the_config(trained):
    configs = importlib.import_module("collc.training.lm.config")
    assert trained() == configs.TrainConfig()
    assert trained("--demo") == configs.demo()


def test_options(trained):
    config = trained(
        *("--mesh", " gpu=2, host=3", "--schedule", "gpu=tree", "--model", "tiny", "--steps", "7"),
        *("--batch", "12", "--seq", "9", "--lr", "0.5", "--seed", "4", "--run", "somewhere"),
    )
    assert config.mesh == "gpu=2,host=3"
    assert config.schedules == {"gpu": "tree", "host": "ring"}
    assert (config.model, config.steps, config.batch, config.seq) == ("tiny", 7, 12, 9)
    assert (config.lr, config.seed, config.folder) == (0.5, 4, Path("somewhere"))
    assert not config.resume and not config.demo


def test_schedules_follow_the_mesh(trained):
    assert trained("--mesh", "gpu=8").schedules == {"gpu": "ring"}
    assert trained("--mesh", "a=2,b=2,c=2").schedules == {"a": "tree", "b": "tree", "c": "ring"}
    both = trained("--schedule", "gpu=ring.all_reduce | ring.all_reduce", "--schedule", "host=ring")
    assert both.schedules == {"gpu": "ring.all_reduce | ring.all_reduce", "host": "ring"}


def flags():
    return set(os.environ["XLA_FLAGS"].split())


def test_devices_are_asked_for_and_other_flags_kept(trained, monkeypatch):
    trained("--mesh", "host=3,gpu=2")
    assert flags() == {"--xla_cpu_enable_fast_math=false", PATIENT, f"{FLAG}=6"}
    monkeypatch.setenv("XLA_FLAGS", f"{FLAG}=16")
    trained()
    assert flags() == {f"{FLAG}=16", PATIENT}, "the user's own number stays"


def test_platforms(trained, monkeypatch):
    monkeypatch.delitem(sys.modules, "jax", raising=False)  # as if it had not been loaded
    monkeypatch.delenv("JAX_PLATFORMS")
    trained()
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("XLA_FLAGS", "")
    trained()
    assert (os.environ["JAX_PLATFORMS"], os.environ["XLA_FLAGS"]) == ("cuda", "")
    trained("--platform", "cpu")
    assert (os.environ["JAX_PLATFORMS"], flags()) == ("cpu", {PATIENT, f"{FLAG}=8"})
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("XLA_FLAGS", "")
    trained("--platform", "default")
    assert ("JAX_PLATFORMS" in os.environ, os.environ["XLA_FLAGS"]) == (False, "")


@pytest.fixture
def begun(tmp_path):
    """The folder of a run on 2 × 2 devices."""
    config = importlib.import_module("collc.training.lm.config").TrainConfig(
        mesh="host=2,gpu=2", model="tiny", steps=9, folder=tmp_path
    )
    (tmp_path / "config.json").write_text(json.dumps({"config": config.to_json(), "corpus": ""}))
    return tmp_path


def test_resume(trained, begun):
    config = trained("--resume", str(begun))
    assert config.resume and config.folder == begun
    assert (config.mesh, config.model, config.steps) == ("host=2,gpu=2", "tiny", 9)
    assert f"{FLAG}=4" in flags()
    # What is given as well is passed on: training refuses it where it differs.
    assert trained("--resume", str(begun), "--seed", "3").seed == 3
    changed = trained("--resume", str(begun), "--schedule", "gpu=tree")
    assert changed.schedules == {"gpu": "tree", "host": "tree"}


def test_the_command_that_training_prints_resumes(trained, begun):
    folder = importlib.import_module("collc.training.lm.folder")
    python, *command = shlex.split(folder.resume_command(begun))
    assert python == sys.executable and command[:3] == ["-m", "collc", "train"]
    config = trained(*command[3:])
    assert config.resume and config.folder == begun


def test_the_status_of_an_interrupted_run(trained):
    trained.status = 143
    trained("--demo")


@pytest.mark.parametrize(
    "args, needed",
    [
        (("--mesh", "gpu=0"), "positive integer"),
        (("--schedule", "gpu"), "gpu=ring"),
        (("--schedule", "=ring"), "gpu=ring"),
        (("--schedule", "gpu=ring", "--schedule", "gpu=tree"), "twice"),
        (("--schedule", "gpuu=ring"), "Did you mean gpu?"),
        (("--mesh", "gpu=4", "--schedule", "host=tree"), "does not have"),
        (("--lr", "0"), "lr must be a positive number"),
        (("--lr", "nan"), "lr must be a positive number"),
        (("--seed", "99999999999999999999"), "seed must be from 0"),
        (("--resume", __file__), "is a file, not the folder of a run"),
        (("--resume", "a", "--run", "b"), "Drop --run"),
        (("--resume", "a", "--demo"), "Drop --demo"),
        (("--resume", "no-such-folder"), "no-such-folder"),
    ],
)
def test_bad_options(trained, refused, args, needed):
    assert needed in refused("train", *args)


@pytest.mark.parametrize("option", ["--run", "--resume"])
def test_a_folder_without_a_name(trained, cli, option):
    result = cli("train", option, "")
    assert result.exit_code == 2 and "it is empty" in result.stderr


def test_a_second_signal_is_the_first_ones_status(trained, cli, monkeypatch):
    def train(config, console=None, interrupt=None):
        interrupt.signal = signal.SIGTERM
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["collc.training.lm.train"], "train", train)
    assert cli("train").exit_code == 143


def test_errors_of_the_training_are_messages(trained, refused, monkeypatch):
    def train(config, console=None, interrupt=None):
        raise CheckpointError("the folder is foreign.\nSee above.")

    monkeypatch.setattr(sys.modules["collc.training.lm.train"], "train", train)
    assert refused("train") == "error: the folder is foreign.\nSee above.\n"
