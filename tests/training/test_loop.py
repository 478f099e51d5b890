"""The loop: progress, metrics, checkpoints, signals."""

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
from collc.training.lm import loop


@dataclass
class Fake:
    """A job that counts; `at` maps a step to what happens in it."""

    at: dict = field(default_factory=dict)
    losses: dict = field(default_factory=dict)
    steps: list = field(default_factory=list)
    saved: list = field(default_factory=list)
    evaluated: int = 0

    def advance(self, step):
        self.steps.append(step)
        self.at.get(step, lambda: None)()
        return self.losses.get(step, 1 / (step + 1))

    def evaluate(self):
        self.evaluated += 1
        return 0.5

    def job(self, steps=10):
        return loop.Job(
            self.advance,
            self.evaluate,
            self.saved.append,
            steps,
            tokens=100,
            save_every=4,
            evaluate_every=5,
        )


def run(fake, path, start=0, steps=10, interrupt=None):
    console = Console(file=io.StringIO(), width=100)
    metrics = loop.Metrics(path, start)
    try:
        with interrupt or loop.Interrupt() as interrupt:
            finished = loop.run(fake.job(steps), start, metrics, console, interrupt)
    finally:
        metrics.close()
    return finished, interrupt.signal, console.file.getvalue()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_step_once_with_checkpoints_and_validations(tmp_path):
    fake = Fake()
    finished, number, shown = run(fake, tmp_path / "m.jsonl")
    assert (finished, number) == (10, 0)
    assert fake.steps == list(range(10)) and fake.saved == [4, 8, 10] and fake.evaluated == 1
    records = lines(tmp_path / "m.jsonl")
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 11))
    assert [r["loss"] for r in records if "loss" in r] == [1 / n for n in range(1, 11)]
    assert [(r["step"], r["validation_loss"]) for r in records if "validation_loss" in r] == [
        (5, 0.5)
    ]
    assert all(r["tokens_per_s"] > 0 for r in records if "loss" in r)
    assert (
        "10/10" in shown
        and "tokens/s" in shown
        and "0:00 left" in shown
        and "validation 0.500" in shown
    )


def test_nothing_left_to_do_saves_nothing(tmp_path):
    fake = Fake()
    finished, _, shown = run(fake, tmp_path / "m.jsonl", start=10)
    assert finished == 10 and "10/10" in shown and "compiling" not in shown
    assert fake.steps == fake.saved == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_saves(tmp_path, number):
    old = signal.getsignal(number)
    fake = Fake(at={5: lambda: os.kill(os.getpid(), number)})
    finished, seen, _ = run(fake, tmp_path / "m.jsonl")
    assert (finished, seen) == (6, number)
    assert fake.saved == [4, 6] and lines(tmp_path / "m.jsonl")[-1]["step"] == 6
    assert signal.getsignal(number) is old


def test_a_signal_in_the_step_that_saves_saves_once(tmp_path):
    fake = Fake(at={3: lambda: os.kill(os.getpid(), signal.SIGTERM)})
    assert run(fake, tmp_path / "m.jsonl")[:2] == (4, signal.SIGTERM)
    assert fake.saved == [4]


def test_a_signal_before_the_first_step_leaves_a_checkpoint(tmp_path):
    interrupt = loop.Interrupt()
    interrupt.signal = signal.SIGINT
    fake = Fake()
    assert run(fake, tmp_path / "m.jsonl", interrupt=interrupt)[0] == 0
    assert fake.saved == [0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_stops_at_once(tmp_path, number):
    def twice():
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)

    old = signal.getsignal(number)
    fake, interrupt = Fake(at={2: twice}), loop.Interrupt()
    with pytest.raises(KeyboardInterrupt):
        run(fake, tmp_path / "m.jsonl", interrupt=interrupt)
    assert signal.getsignal(number) is old and interrupt.signal == number and not fake.saved


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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
    fake = Fake()
    fake.evaluate = lambda: float("nan")
    with pytest.raises(StepError, match=r"validation loss of step 5 is nan. The last .* step 4"):
        run(fake, tmp_path / "m.jsonl")
    assert fake.saved == [4] and "NaN" not in (tmp_path / "m.jsonl").read_text()


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_and_saves_no_more(tmp_path, loss):
    fake = Fake(losses={5: loss})
    with pytest.raises(
        StepError, match=rf"loss of step 6 is {loss}. The last checkpoint is that of step 4"
    ):
        run(fake, tmp_path / "m.jsonl")
    assert fake.saved == [4]


def test_metrics_go_on_where_the_checkpoint_is(tmp_path):
    path = tmp_path / "m.jsonl"
    run(Fake(), path)
    whole = path.read_text()
    path.write_text(whole + '{"step": 10, "lo')  # the process died while writing
    fake = Fake()
    run(fake, path, start=4)
    assert fake.steps == list(range(4, 10)) and fake.saved == [8, 10]
    keep = ("step", "loss", "validation_loss")
    assert [{k: r[k] for k in keep if k in r} for r in lines(path)] == [
        {k: r[k] for k in keep if k in r} for r in map(json.loads, whole.splitlines())
    ]
    seconds = [r["seconds"] for r in lines(path)]
    assert seconds == sorted(seconds)


def test_metrics_from_step_0_keep_the_old_ones(tmp_path):
    path = tmp_path / "m.jsonl"
    for n in (1, 2):
        run(Fake(), path)
        before = path.read_text()
        metrics = loop.Metrics(path)
        metrics.close()
        assert metrics.backup == tmp_path / f"m.{2 * n - 1}.jsonl"
        assert metrics.backup.read_text() == before and path.read_text() == ""
        run(Fake(), path)  # nothing to keep
        assert loop.Metrics(path).backup == tmp_path / f"m.{2 * n}.jsonl"


def test_metrics_count_steps_and_seconds_over_all_resumptions(tmp_path):
    path = tmp_path / "m.jsonl"
    run(Fake(), path)
    metrics = loop.Metrics(path, 4)
    assert (metrics.steps, metrics.seconds) == (4, lines(path)[-1]["seconds"])
    metrics.write(5, loss=1.0, seconds=99.5)
    assert (metrics.steps, metrics.seconds) == (5, 99.5)
    metrics.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_metrics_on_a_full_disk(tmp_path):
    metrics = loop.Metrics(tmp_path / "m.jsonl")
    metrics.close()
    metrics._file = open("/dev/full", "a")  # noqa: SIM115
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
        metrics.write(1, loss=1.0)
    metrics.close()


def test_a_foreign_file_is_no_metrics_and_is_kept(tmp_path):
    for text in ("hello\n", "[1]\n", '{"loss": 1}\n'):
        (tmp_path / "m.jsonl").write_text(text)
        with pytest.raises(CheckpointError, match="not a file of metrics"):
            loop.Metrics(tmp_path / "m.jsonl", 3)
        assert (tmp_path / "m.jsonl").read_text() == text
