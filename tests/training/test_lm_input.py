"""Runs that cannot be: other people's folders, wrong configs, bad input."""

import dataclasses
import json
import os
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from collc.errors import CheckpointError, DataError, MeshError, PlanError
from collc.planning.meshes import mesh_of
from collc.planning.plan import plan as make_plan
from collc.training.lm import config, data, folder
from collc.training.lm import train as lm

from .lm_runs import STEPS, tiny, train


def test_foreign_folders_are_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(CheckpointError, match="not empty and holds no run"):
        train(tiny(tmp_path))
    with pytest.raises(CheckpointError, match="is a file"):
        train(tiny(tmp_path / "thesis.txt"))
    with pytest.raises(CheckpointError, match="holds no run to resume"):
        config.resumed(tmp_path)
    with pytest.raises(CheckpointError, match=r"its folder is needed"):
        train(dataclasses.replace(tiny(None), resume=True))
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_one_process_at_a_time(tmp_path):
    run = tiny(tmp_path / "run")
    with folder.open_run(run, "plan", "corpus"):
        for other in (run, dataclasses.replace(run, resume=True)):
            with (
                pytest.raises(CheckpointError, match=rf"another process \(pid {os.getpid()}\)"),
                folder.open_run(other, "plan", "corpus"),
            ):
                pass
    with folder.open_run(dataclasses.replace(run, resume=True), "plan", "corpus") as again:
        assert again.checkpoint is None


def test_a_folder_in_which_no_step_was_finished_can_be_used_again(tmp_path):
    with folder.open_run(tiny(tmp_path), "plan", "corpus"):
        pass
    (tmp_path / ".plan.txt.8763").write_text("ha")
    (tmp_path / "metrics.jsonl").write_text("")
    with folder.open_run(tiny(tmp_path, seed=4), "plan", "corpus"):
        assert config.resumed(tmp_path).seed == 4
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 5.5}\n')
    with (
        pytest.raises(CheckpointError, match="already holds a run"),
        folder.open_run(tiny(tmp_path), "plan", "corpus"),
    ):
        pass


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        {"config": []},
        {"config": {"mesh": 5}},
        {"config": {"mesh": "host"}},
        {"config": {"steps": "ten"}},
        {"config": {"batch": True}},
        {"config": {"lr": None}},
        {"config": {"schedules": ["ring"]}},
        {"config": {"schedules": {"gpu": 1}}},
        {"config": {"folder": 1}},
    ],
)
def test_a_config_with_wrong_types_is_refused(tmp_path, wrong):
    (tmp_path / "config.json").write_text(json.dumps(wrong))
    with pytest.raises(CheckpointError, match="is not the config of a run"):
        config.resumed(tmp_path)


def test_a_schedule_file_is_needed_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begun = tiny(Path("run"), schedules={"gpu": "mine.py:ring", "host": "tree"})
    assert begun.schedules == {"gpu": f"{tmp_path / 'mine.py'}:ring", "host": "tree"}
    with folder.open_run(begun, "plan", "corpus"):
        pass
    with pytest.raises(
        PlanError, match=r"no schedule file .*mine\.py\nThe run in run needs its schedules as"
    ):
        train(config.resumed("run"))


def test_a_platform_that_jax_lacks(monkeypatch):
    def devices():
        raise RuntimeError("Unable to initialize backend 'warp'")

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(MeshError, match=r"no devices for JAX_PLATFORMS=.*'warp'"):
        mesh_of("gpu=2")


def test_bad_input_is_refused_before_anything_is_written(tmp_path):
    path = tmp_path / "run"
    for given, error, message in (
        (
            {"mesh": "host=2,gpu=400"},
            MeshError,
            "needs 800 devices, but jax has .*host_platform_device_count=800",
        ),
        ({"mesh": "host=2 gpu"}, MeshError, "Write it as gpu=8, or host=4,gpu=8"),
        ({"mesh": "gpu=2,gpu=4"}, MeshError, "axis gpu is named twice"),
        ({"batch": 12}, DataError, "does not divide over 8 devices"),
        ({"schedules": {"gpu": "ring"}}, MeshError, "axis host, but no schedule was given"),
        ({"model": "smal"}, DataError, "Did you mean small"),
        ({"seq": 100_000_000}, DataError, "A window of 100000001 bytes"),
        ({"batch": 8 * 10**6}, DataError, "more than the whole text"),
    ):
        with pytest.raises(error, match=message):
            train(tiny(path, **given))
    for field, value in (
        *(("steps", 0), ("steps", 10**20), ("lr", float("nan")), ("batch", 0), ("seed", -1)),
        *(("seed", 10**20), ("weight_decay", float("inf")), ("side_by_side", -1)),
    ):
        with pytest.raises(DataError, match=field):
            tiny(path, **{field: value})
    assert not path.exists()


def test_one_batch_is_evaluated_at_a_time_and_more_of_them_at_the_end():
    """Many in flight deadlock virtual devices, rarely enough that only this test would notice."""

    class Loss:
        def __init__(self):
            flying.append(self)

        def __float__(self):
            flying.remove(self)
            done.append(self)
            return 3.0

    def evaluation(model, batch):
        assert not flying
        return Loss()

    flying: list[Loss] = []
    done: list[Loss] = []
    trainer = lm.Trainer.__new__(lm.Trainer)
    trainer.config = tiny(None, evaluation_batches=2)
    trainer.plan = make_plan(mesh_of("gpu=2"), {"gpu": "ring"})
    trainer.corpus = data.Corpus(*[np.zeros(5000, np.uint8)] * 2, 1, 1, "")
    trainer.evaluation = evaluation
    for step, batches in ((0, 2), (STEPS, 8)):
        done.clear()
        assert trainer.evaluate(None, types.SimpleNamespace(step=np.array(step))) == 3.0
        assert len(done) == batches
