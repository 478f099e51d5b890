"""The whole run, small: it resumes bit for bit, refuses to resume what is another run, and equals
plain lax but for rounding.
"""

import dataclasses
import io
import json
import os
import shlex
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from collc.errors import CheckpointError, DataError, PlanError, StepError
from collc.training.checkpoints import checkpoint
from collc.training.checkpoints.manifest import digest_of as digest
from collc.training.fitting.progress import clock
from collc.training.lm import compare, config, folder, report
from collc.training.lm import train as lm

from .lm_runs import STEPS, stop_at, tiny, train


def edit_notes(run, **notes):
    manifest = run / "checkpoints" / "step_00000005" / "manifest.json"
    fields = json.loads(manifest.read_text())
    fields["notes"] |= notes
    del fields["sha256"]
    manifest.write_text(json.dumps({**fields, "sha256": digest(fields)}))


def arrays(path):
    """Every file of Orbax differs by its time; so compare what they hold."""
    found = checkpoint.latest(path / "checkpoints")
    with checkpoint.ocp.StandardCheckpointer() as reader:
        state = reader.restore((found.folder / "state").absolute())
    return found.step, {
        jax.tree_util.keystr(k): np.asarray(v) for k, v in jax.tree.leaves_with_path(state)
    }


@pytest.fixture(scope="module")
def straight(tmp_path_factory, compiled_once):
    path = tmp_path_factory.mktemp("runs") / "straight"
    return path, *train(tiny(path, side_by_side=4))


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory, compiled_once):
    path = tmp_path_factory.mktemp("runs") / "stopped"
    return path, *train(tiny(path), stop_at(5))


@pytest.fixture
def stopped(stopped_once, tmp_path):
    """A copy of the run that SIGTERM stopped after 5 steps, to do with as a test likes."""
    return Path(shutil.copytree(stopped_once[0], tmp_path / "stopped"))


def test_a_run_leaves_all_it_should(straight):
    path, summary, shown = straight
    assert sorted(p.name for p in path.iterdir()) == [
        ".lock", "checkpoints", "config.json", "metrics.jsonl", "plan.txt", "summary.json",
    ]  # fmt: skip
    assert summary.exit_status == 0 and summary.step == STEPS
    assert json.loads((path / "summary.json").read_text()) == json.loads(
        json.dumps(summary.to_json())
    )
    assert config.TrainConfig.from_json(
        json.loads((path / "config.json").read_text())["config"]
    ) == tiny(path, side_by_side=4)
    for text in ("unigram entropy", "bigram entropy", "validation loss", "Side by side", "plan"):
        assert text in shown
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "validation_loss" in r] == [4, 8, STEPS]
    assert all(r["tokens_per_s"] > 0 for r in records if "loss" in r)
    *_, last, ended = records
    assert (
        f"step    10  loss {last['loss']:.3f}  validation: loss {summary.validation:.3f}  "
        f"{clock(ended['seconds'])}\n"
    ) in shown
    assert "is not yet below the unigram entropy of the same text: 10 steps are few." in shown
    assert f"{clock(summary.seconds)}, with compiling and validation. Everything" in shown


def test_what_the_closing_says(straight):
    def said(**changed):
        console = Console(file=io.StringIO(), width=120)
        report.closing(console, dataclasses.replace(straight[1], **changed))
        return console.file.getvalue()

    both = compare.SideBySide(4, 1e-8, "w", 1e-3, 0.91, 0.79, 1.01, 5.0, 5.5)
    assert "collc/lax 0.91 (quartiles 0.79 to 1.01): no measurable difference\n" in said(
        side_by_side=both
    )
    assert "(quartiles 0.79 to 0.95): collc is faster here\n" in said(
        side_by_side=dataclasses.replace(both, ratio_high=0.95)
    )
    entropies = {"unigram": 3.0, "bigram": 2.0, "step": 400}
    for validation, text in (
        (3.5, "NOT below the unigram entropy of the same text."),
        (2.5, "below the unigram entropy of the same text."),
        (1.5, "below the unigram and the bigram entropy of the same text."),
    ):
        line = f"The loss on unseen files is {text}\n"
        assert line in said(validation=validation, **entropies)


def test_side_by_side_differs_by_rounding_only(straight):
    both = straight[1].side_by_side
    assert both.steps == 4 and both.largest_change > 1e-4
    assert both.largest_difference < 1e-5 < both.largest_change
    assert both.ratio_low <= both.ratio <= both.ratio_high and both.plan_ms > 0 and both.lax_ms > 0


def test_five_steps_and_five_resumed_are_ten_bit_for_bit(straight, stopped_once):
    path, summary, shown = stopped_once
    assert (summary.step, summary.interrupted, summary.exit_status) == (5, signal.SIGTERM, 143)
    assert summary.validation is None and summary.resume_command in shown
    command = shlex.split(summary.resume_command)
    assert command[1:] == ["-m", "collc", "train", "--resume", str(path)]
    path = Path(shutil.copytree(path, path.parent / "resumed"))
    again, shown = train(config.resumed(path))
    assert "going on from step 5" in shown and again.step == STEPS and again.exit_status == 0

    (step, ours), (_, theirs) = arrays(path), arrays(straight[0])
    assert step == STEPS and ours.keys() == theirs.keys() and len(ours) > 10
    for name in ours:
        assert ours[name].tobytes() == theirs[name].tobytes(), name
    assert again.validation == straight[1].validation
    losses = [
        [
            (r["step"], r.get("loss"), r.get("validation_loss"))
            for r in map(json.loads, (p / "metrics.jsonl").open())
        ]
        for p in (path, straight[0])
    ]
    assert losses[0] == losses[1]


def test_ctrl_c_is_130(straight):
    assert dataclasses.replace(straight[1], interrupted=signal.SIGINT).exit_status == 130


def test_a_run_is_never_written_over(straight):
    path = straight[0]
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    with pytest.raises(
        CheckpointError, match=r"already holds a run \(10 steps.*--resume .*; or choose"
    ):
        train(tiny(path))
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0.5),
        ("seed", 3),
        ("steps", 20),
        ("mesh", "host=4,gpu=2"),
        ("schedules", {"gpu": "ring"}),
    ],
)
def test_another_config_is_refused(straight, field, value):
    run = config.resumed(straight[0], **{field: value})
    # same_run alone: what a plan says of such schedules is tested elsewhere
    with pytest.raises(CheckpointError, match=f"has {field}=.*but {field}=.*was asked for"):
        folder.same_run(run)


def test_another_plan_is_refused_with_the_difference(stopped):
    plan = stopped / "plan.txt"
    plan.write_text(plan.read_text() + "one line more\n")
    with pytest.raises(PlanError, match=r"(?m)^-one line more$"):
        train(config.resumed(stopped))


def test_a_checkpoint_of_another_plan_is_refused_with_the_difference(stopped):
    edit_notes(stopped, plan="another\n")
    with pytest.raises(PlanError, match=r"(?m)^-another$"):
        train(config.resumed(stopped))


def test_another_text_is_refused(stopped):
    saved = json.loads((stopped / "config.json").read_text())
    (stopped / "config.json").write_text(json.dumps({**saved, "corpus": "0" * 64}))
    with pytest.raises(DataError, match="trained on another text"):
        train(config.resumed(stopped))


def test_a_checkpoint_of_another_run_is_refused(stopped):
    edit_notes(stopped, identity={**config.resumed(stopped).identity(), "seed": 9})
    with pytest.raises(CheckpointError, match="is of another run"):
        train(config.resumed(stopped))


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_taken(stopped):
    saved = stopped / "checkpoints"
    shutil.copytree(saved / "step_00000005", saved / "step_00000006")
    plan = (stopped / "plan.txt").read_text()
    corpus = json.loads((stopped / "config.json").read_text())["corpus"]
    told = []
    with folder.open_run(config.resumed(stopped), plan, corpus, told.append) as run:
        assert run.checkpoint is not None and run.checkpoint.step == 5
    (line,) = told
    assert "is that of step 5. It is damaged_step_00000006 now, and step 5 is taken." in line
    assert sorted(path.name for path in saved.iterdir()) == [
        "damaged_step_00000006",
        "step_00000005",
    ]


@pytest.mark.newest_only
def test_a_run_without_a_checkpoint_says_that_it_starts_over_and_keeps_its_metrics(stopped):
    os.rename(stopped / "checkpoints", stopped.parent / "lost")
    before = (stopped / "metrics.jsonl").read_text()
    summary, shown = train(config.resumed(stopped), stop_at(2))
    assert summary.step == 2 and "going on" not in shown
    assert "no checkpoint: starting from step 0; the old metrics are kept in" in shown
    assert (stopped / "metrics.1.jsonl").read_text() == before


def test_a_finished_run_is_shown_again_and_not_written(straight):
    path, summary, _ = straight
    before = {p: (p.stat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in path.rglob("*")}
    again, shown = train(config.resumed(path))
    assert again == summary and again.exit_status == 0
    for text in ("validation loss", "Side by side", "This run is finished"):
        assert text in shown
    assert before == {
        p: (p.stat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in path.rglob("*")
    }


@pytest.mark.newest_only
def test_ctrl_c_during_the_comparison_skips_it_and_resume_makes_up_for_it(stopped, monkeypatch):
    def interrupted(*args, stop, **more):
        os.kill(os.getpid(), signal.SIGINT)
        return None if stop() else pytest.fail("not told to stop")

    both = compare.SideBySide(4, 1e-8, "w", 1e-3, 1.0, 0.9, 1.1, 5.0, 5.0)
    monkeypatch.setattr(compare, "side_by_side", interrupted)
    first, shown = train(config.resumed(stopped, side_by_side=4))
    assert (first.step, first.exit_status) == (STEPS, 130) and first.validation is not None
    assert "comparison with jax.lax.pmean was skipped; that command does it" in shown
    monkeypatch.setattr(compare, "side_by_side", lambda *args, **more: both)
    second, _ = train(config.resumed(stopped, side_by_side=4))
    assert second == dataclasses.replace(first, side_by_side=both, interrupted=0)
    assert second.seconds > 0 and second.tokens_per_s > 0


@pytest.mark.newest_only
def test_a_second_signal_says_where_the_run_stands(stopped):
    def twice(event):
        if event.step == 7:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    console = Console(file=io.StringIO(), width=200)
    with pytest.raises(KeyboardInterrupt):
        lm.train(config.resumed(stopped), console, (twice,))
    shown = console.file.getvalue()
    assert "Stopped at once. The last checkpoint is of step 5" in shown
    assert folder.resume_command(stopped) in shown
    with folder.locked(stopped):  # it was released
        pass


def test_a_folder_that_cannot_be_written(stopped):
    (stopped / ".lock").unlink()
    (stopped / ".lock").mkdir()  # also for root, who may write what is read-only
    with pytest.raises(CheckpointError, match="stopped cannot be written: Is a dir"):
        train(config.resumed(stopped))


@pytest.mark.newest_only
def test_a_validation_that_is_not_finite_is_no_success(tmp_path, monkeypatch, compiled_once):
    monkeypatch.setattr(lm.Trainer, "evaluate", lambda *state: float("nan"))
    with pytest.raises(StepError, match="validation loss of step 2 is nan"):
        train(tiny(tmp_path / "run", steps=2))
    assert not (tmp_path / "run" / "summary.json").exists()
