"""The loop around a step that does nothing: signals, evaluation, metrics, checkpoints."""

import importlib
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
from rich.console import Console

from collc.errors import CheckpointError, StepError
from collc.training.checkpoints import checkpoint
from collc.training.fitting.interrupt import Interrupt
from collc.training.fitting.metrics import Metrics

BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
fitting = importlib.import_module("collc.training.fitting.fit")  # the package has a function fit


@dataclass
class Fake:
    """A run that counts; `at` maps a step to what happens in it."""

    at: dict = field(default_factory=dict)
    losses: dict = field(default_factory=dict)
    steps: list = field(default_factory=list)
    evaluated: list = field(default_factory=list)
    validation: float = 0.5
    shown: str = ""

    def step(self, state, t):
        self.steps.append(t)
        self.at.get(t, lambda: None)()
        return state + 1, self.losses.get(t, 1 / (t + 1))

    def evaluate(self, state):
        self.evaluated.append(int(state))
        return self.validation

    def run(self, folder, **given):
        console = Console(file=io.StringIO(), width=100)
        given = {"steps": 10, "save_every": 4, "evaluate_every": 5, "keep": 9, **given}
        try:
            return fitting.fit(
                self.step,
                0,
                lambda t: t,
                folder=folder,
                evaluate=self.evaluate,
                tokens=100,
                profile=0,
                console=console,
                **given,
            )
        finally:
            self.shown = console.file.getvalue()


def saved(folder):
    return list(checkpoint.steps(folder / "checkpoints"))


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def values(folder):
    """The lines without times."""
    keep = ("step", "loss", "validation_loss")
    return [{k: r[k] for k in keep if k in r} for r in lines(folder)]


def kill(number, times=1):
    def now():
        for _ in range(times):
            os.kill(os.getpid(), number)

    return now


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    fake = Fake()
    return folder, fake, fake.run(folder)


def test_every_step_once_with_checkpoints_and_validations(whole):
    folder, fake, found = whole
    assert (found.step, found.report.stopped) == (10, "")
    assert fake.steps == list(range(10)) and fake.evaluated == [5, 10]
    assert saved(folder) == [4, 8, 10]
    records = lines(folder)
    assert [(r["step"], r["loss"]) for r in records if "loss" in r] == [
        (n, pytest.approx(1 / n)) for n in range(1, 11)
    ]
    assert [(r["step"], r["validation_loss"]) for r in records if "validation_loss" in r] == [
        (5, 0.5),
        (10, 0.5),
    ]
    assert all(r["tokens_per_s"] > 0 for r in records if "loss" in r)
    for text in ("10/10", "tokens/s", "0:00 left", "loss 0.200  validation loss 0.500  0:0"):
        assert text in fake.shown


def test_nothing_left_to_do_asks_and_saves_nothing(whole):
    folder, _, first = whole
    before, fake = (folder / "metrics.jsonl").read_text(), Fake()
    found = fake.run(folder, resume=True)
    assert (found.step, found.metrics) == (10, first.metrics)
    assert "10/10" in fake.shown and "compiling" not in fake.shown
    assert fake.steps == fake.evaluated == []
    assert (folder / "metrics.jsonl").read_text() == before


@BOTH
def test_a_signal_finishes_the_step_and_saves(tmp_path, number):
    old = signal.getsignal(number)
    found = Fake(at={5: kill(number)}).run(tmp_path)
    assert (found.step, found.report.stopped) == (6, number.name)
    assert saved(tmp_path) == [4, 6] and lines(tmp_path)[-1]["step"] == 6
    assert signal.getsignal(number) is old


@pytest.mark.parametrize("last", [3, 4, 9])
def test_a_signal_saves_once_before_the_evaluation_which_the_resumed_run_makes(
    whole, tmp_path, monkeypatch, last
):
    save, calls = checkpoint.save, []
    monkeypatch.setattr(checkpoint, "save", lambda *a: (calls.append(a[1]), save(*a)))
    fake = Fake(at={last: kill(signal.SIGTERM)})
    found = fake.run(tmp_path)
    assert found.step == last + 1 and fake.evaluated == [5, 10][: last // 5]
    assert calls == saved(tmp_path) == [*range(4, last + 1, 4), last + 1]
    Fake().run(tmp_path, resume=True)
    assert values(tmp_path) == values(whole[0])


def test_a_signal_before_the_first_step_leaves_a_checkpoint(tmp_path, monkeypatch):
    interrupt, fake = Interrupt(), Fake()
    interrupt.signal = signal.SIGINT
    monkeypatch.setattr(fitting, "Interrupt", lambda: interrupt)
    assert fake.run(tmp_path).step == 0
    assert saved(tmp_path) == [0] and fake.steps == fake.evaluated == []


@BOTH
def test_a_second_signal_stops_at_once(tmp_path, number):
    old = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        Fake(at={2: kill(number, times=2)}).run(tmp_path)
    assert signal.getsignal(number) is old and not saved(tmp_path)


@BOTH
def test_a_signal_while_starting_ends_the_process_with_a_line(number):
    code = f"""
import os
from collc.training.fitting.interrupt import Interrupt
with Interrupt(starting=True):
    try:
        os.kill(os.getpid(), {int(number)})
    except BaseException:
        pass
print("still there")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (128 + number, "")
    assert ended.stderr == "stopped; nothing was written\n"


def test_a_validation_that_is_not_finite_stops(tmp_path):
    with pytest.raises(StepError, match=r"validation loss of step 5 is nan. The last .* step 4"):
        Fake(validation=float("nan")).run(tmp_path)
    assert saved(tmp_path) == [4] and lines(tmp_path)[-1]["step"] == 5


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_and_saves_no_more(tmp_path, loss):
    with pytest.raises(
        StepError, match=rf"loss of step 6 is {loss}. The last checkpoint is that of step 4"
    ):
        Fake(losses={5: loss}).run(tmp_path)
    assert saved(tmp_path) == [4]


def test_metrics_go_on_where_the_checkpoint_is(whole, tmp_path):
    def die():
        raise RuntimeError

    with pytest.raises(RuntimeError):
        Fake(at={7: die}).run(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')  # the process died while writing
    fake = Fake()
    fake.run(tmp_path, resume=True)
    assert fake.steps == list(range(4, 10)) and saved(tmp_path) == [4, 8, 10]
    assert values(tmp_path) == values(whole[0])
    seconds = [r["seconds"] for r in lines(tmp_path)]
    assert seconds == sorted(seconds)


def written(path):
    """A file of ten steps' metrics."""
    metrics = Metrics(path)
    for step in range(1, 11):
        metrics.write(step, loss=1 / step, seconds=float(step))
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


def test_metrics_count_steps_and_seconds_over_all_resumptions(tmp_path):
    path = tmp_path / "m.jsonl"
    written(path)
    metrics = Metrics(path, 4)
    assert (metrics.steps, metrics.seconds) == (4, 4.0)
    metrics.write(5, loss=1.0, seconds=99.5)
    assert (metrics.steps, metrics.seconds) == (5, 99.5)
    metrics.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_metrics_on_a_full_disk(tmp_path):
    metrics = Metrics(tmp_path / "m.jsonl")
    metrics.close()
    metrics._file = open("/dev/full", "a")  # noqa: SIM115
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
        metrics.write(1, loss=1.0)
    metrics.close()


def test_a_foreign_file_is_no_metrics_and_is_kept(tmp_path):
    for text in ("hello\n", "[1]\n", '{"loss": 1}\n'):
        (tmp_path / "m.jsonl").write_text(text)
        with pytest.raises(CheckpointError, match="not a file of metrics"):
            Metrics(tmp_path / "m.jsonl", 3)
        assert (tmp_path / "m.jsonl").read_text() == text
