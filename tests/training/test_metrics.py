"""Metrics as lines: what is kept, what is counted, what is refused."""

import os

import pytest

from collc.errors import CheckpointError
from collc.training.fitting.metrics import Metrics

from .counting import lines


def written(path):
    """A file of ten steps' metrics."""
    metrics = Metrics(path)
    for step in range(1, 11):
        metrics.write(step, {"loss": 1 / step, "seconds": float(step)})
    metrics.close()
    return metrics


def test_metrics_from_step_0_keep_the_old_ones(tmp_path):
    path = tmp_path / "m.jsonl"
    assert written(path).backup is None  # nothing to keep
    for n in (1, 2):
        before = path.read_text()
        metrics = Metrics(path)
        metrics.close()
        assert metrics.backup == tmp_path / f"m.{n}.jsonl"
        assert metrics.backup.read_text() == before and path.read_text() == ""
        assert written(path).backup is None


def test_metrics_keep_lines_whatever_their_names(tmp_path):
    metrics = Metrics(tmp_path / "m.jsonl")
    for step in (1, 2):
        metrics.write(step, {"loss": 1.0, "final": 1.0, "self": 2.0})
    metrics.close()
    Metrics(tmp_path / "m.jsonl", 1).close()
    assert lines(tmp_path, "m.jsonl") == [{"step": 1, "loss": 1.0, "final": 1.0, "self": 2.0}]


def test_metrics_count_steps_and_seconds_over_all_resumptions(tmp_path):
    path = tmp_path / "m.jsonl"
    written(path)
    metrics = Metrics(path, 4)
    assert (metrics.steps, metrics.seconds) == (4, 4.0)
    metrics.write(5, {"loss": 1.0, "seconds": 99.5})
    assert (metrics.steps, metrics.seconds) == (5, 99.5)
    metrics.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_metrics_on_a_full_disk(tmp_path):
    metrics = Metrics(tmp_path / "m.jsonl")
    metrics.close()
    metrics._file = open("/dev/full", "a")  # noqa: SIM115
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
        metrics.write(1, {"loss": 1.0})
    metrics.close()


def test_a_foreign_file_is_no_metrics_and_is_kept(tmp_path):
    for text in ("hello\n", "[1]\n", '{"loss": 1}\n'):
        (tmp_path / "m.jsonl").write_text(text)
        with pytest.raises(CheckpointError, match="not a file of metrics"):
            Metrics(tmp_path / "m.jsonl", 3)
        assert (tmp_path / "m.jsonl").read_text() == text
