"""The loop around a step that does nothing: signals, evaluation, metrics, checkpoints."""

import io
import os
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from collc.training.checkpoints import checkpoint
from collc.training.fitting import progress
from collc.training.fitting.interrupt import Interrupt

from .counting import Fake, at_step, fitting, kill, lines, refuse, saved, values

BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


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
    for text in ("10/10", "tokens/s", "0:00 left", "loss 0.200  validation: loss 0.500  0:0"):
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
    with pytest.raises(KeyboardInterrupt) as error:
        Fake(at={2: kill(number, times=2)}).run(tmp_path)
    assert signal.getsignal(number) is old and not saved(tmp_path)
    assert "2 steps are finished. There is no checkpoint yet." in error.value.__notes__[0]


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


def test_the_bar_counts_every_step_that_is_finished():
    for last, shown in ((0, "0/10"), (1, "1/10"), (2, "2/10")):
        fake = Fake(at={last: lambda: refuse(None)})
        with pytest.raises(OSError):
            fake.run(None, save_every=None, keep=None)
        assert shown in fake.shown and "compiling" not in fake.shown


def test_a_folder_stays_where_it_was_when_the_working_directory_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    Fake().run("run", callbacks=[at_step(3, lambda event: os.chdir(tmp_path / "other"))])
    assert saved(tmp_path / "run") == [4, 8, 10] and not any((tmp_path / "other").iterdir())


def test_an_event_that_is_kept_keeps_its_metrics():
    kept = []
    Fake().run(None, save_every=None, keep=None, callbacks=[kept.append])
    assert [event.metrics for event in kept] == [
        {"loss": pytest.approx(1 / n)} | ({"validation_loss": 0.5} if n % 5 == 0 else {})
        for n in range(1, 11)
    ]


def test_a_run_that_was_stopped_says_so_and_one_with_nothing_to_do(tmp_path):
    fake = Fake()
    fake.run(tmp_path, callbacks=[at_step(3, lambda event: event.stop())])
    assert "stopped by callback after step 3 of 10" in fake.shown
    again = Fake()
    again.run(tmp_path, resume=True, steps=3)
    assert "all 3 were finished before" in again.shown


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


def test_a_log_gets_a_line_every_so_often(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    with progress.Bar(Console(file=log, width=120), 0, 9) as bar:
        bar.show(1, {"loss": 2.0}, 0, 0.5)
        monkeypatch.setattr(progress, "LINE_S", 1e9)
        bar.show(2, {"loss": 1.0}, 0, 0.5)
    said = [line for line in log.getvalue().splitlines() if line.startswith("step")]
    assert said == ["step     1/9  loss 2.000"]
