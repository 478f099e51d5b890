"""The watchdog's judge, on what a process may know of a job, and how it says that."""

import itertools
import math
import subprocess
import sys
import textwrap
import threading
import time

import jax
import numpy as np
import pytest
from rich.console import Console

from collc.errors import DataError
from collc.runtime import patience
from collc.runtime.watchdog import words
from collc.runtime.watchdog.beats import DONE, ENDING, FAILED, Beat, Store
from collc.runtime.watchdog.clock import Clock
from collc.runtime.watchdog.judge import Limits, Seen, Verdict, View, behind, judge
from collc.runtime.watchdog.watchdog import Watchdog, reporter, told
from collc.training.fitting.fit import fit

LIMITS = Limits(timeout=60, silent=45, grace=3)
NOW = 1000.0


def at(step, phase, moved=0.0, heard=0.0, host="h0", **more):
    """Where a process is, that moved and was heard of so many seconds ago."""
    then = NOW - moved
    return Seen(Beat(host, 1, step=step, phase=phase, **more), NOW - heard, then, then)


def view(*seen, me=0, answered=0.0, began=100.0):
    """Of processes, None for one that has not come."""
    known = {p: s for p, s in enumerate(seen) if s}
    return View(me, len(seen), NOW - began, NOW - answered, known)


def verdict(*seen, **more):
    return judge(view(*seen, **more), NOW, LIMITS)


def test_a_job_that_goes_on_is_let_alone():
    assert verdict(at(41, "input"), at(42, "wait", moved=500)) is None  # one moved just now
    assert verdict(at(41, "input", moved=59.9), at(42, "wait", moved=59.9)) is None
    assert verdict(at(9, "input")) is None


def test_who_is_behind_is_named():
    seen = [at(42, "wait", 61, host=f"h{p // 2}") for p in range(6)]
    seen[5] = at(41, "input", 60.5, host="h2")
    assert verdict(*seen) == Verdict(
        "process 5 on host h2 has been at step 41 (input), the others at step 42 (wait) for 60 s",
        (5,),
    )
    assert verdict(at(3, "wait", 99), at(2, "wait", 99)) == Verdict(
        "process 1 on host h0 has been at step 2 (wait), the other at step 3 (wait) for 99 s", (1,)
    )
    assert verdict(at(7, "input", 60)) == Verdict(
        "process 0 on host h0 has been at step 7 (input) for 60 s", (0,)
    )


def test_nobody_is_blamed_where_all_are_alike():
    assert verdict(*[at(42, "wait", 60)] * 4) == Verdict(
        "all 4 processes have been at step 42 (wait), none behind another, for 60 s"
    )


@pytest.mark.parametrize(
    "where, culprits",
    [
        ([(1, "step"), (1, "input")], (1,)),
        ([(1, "wait"), (1, "step")], (1,)),
        ([(1, "wait"), (1, "checkpoint"), (1, "step")], (1,)),
        ([(2, "input"), (1, "wait"), (2, "wait")], (1,)),
        ([(1, "input"), (1, "callbacks")], ()),
        ([(1, "input"), (1, "metrics"), (1, "wait")], (0, 1)),
        ([(5, "anything")], (0,)),
    ],
)
def test_a_process_that_waits_for_devices_is_not_blamed_for_another(where, culprits):
    """In any order of the processes."""
    for order in itertools.permutations(range(len(where))):
        beats = {
            place: Beat("h", 1, step=where[p][0], phase=where[p][1])
            for place, p in enumerate(order)
        }
        assert set(behind(beats)) == {order.index(p) for p in culprits}


def test_the_done_are_exempt():
    gone = at(50, "wait", 500, 500, state=DONE)
    assert verdict(gone, at(49, "input"), me=1) is None
    found = verdict(gone, at(49, "input", 60), me=1)
    assert found == Verdict("process 1 on host h0 has been at step 49 (input) for 60 s", (1,))


def test_one_that_has_ended_too_early_is_named_where_the_others_only_wait():
    gone = at(15, "checkpoint", 99, host="h1", state=DONE)
    assert verdict(at(16, "wait", 60), gone) == Verdict(
        "process 1 on host h1 has ended at step 15 (checkpoint), while process 0 on host h0 has been "
        "at step 16 (wait) for 60 s",
        (1,),
    )
    for own in (at(16, "input", 60), at(15, "wait", 60)):
        found = verdict(own, gone)
        assert found is not None and found.culprits == (0,)


def test_silence_is_counted_while_the_store_answers():
    assert verdict(at(42, "wait"), at(41, "input", 44, 44, host="h1")) is None
    found = verdict(at(42, "wait"), at(41, "input", 47, 46, host="h1"))
    assert found == Verdict(
        "process 1 on host h1 has not been heard of for 46 s, last at step 41 (input): stopped, cut "
        "off, or holding Python's lock",
        (1,),
    )
    # The store was last read 40 s ago: of the 80 s of silence these are nobody's fault.
    assert verdict(at(42, "wait"), at(41, "input", 80, 80), answered=40) is None
    found = verdict(at(2, "wait"), *[at(1, "input", 99, 50, host="h1")] * 2, at(2, "wait"))
    assert found is not None and found.culprits == (1, 2)
    assert found.text.startswith("processes 1, 2 on host h1 have not been heard of for 50 s")


def test_a_process_that_is_silent_when_nobody_has_moved_is_named_for_its_silence():
    found = verdict(at(42, "wait", 61), at(41, "input", 61, 23, host="h1"))
    assert found is not None and found.culprits == (1,)
    assert found.text.startswith("process 1 on host h1 has not been heard of for 23 s, last at")
    found = verdict(at(42, "wait", 61), at(41, "input", 61, 22, host="h1"))
    assert found is not None and found.text.startswith("process 1 on host h1 has been at step 41")


def test_a_store_that_does_not_answer_is_the_coordinator():
    found = verdict(at(41, "input", 46, 46, host="h9"), at(42, "wait"), me=1, answered=45)
    assert found == Verdict(
        "the coordinator, process 0 on host h9, last at step 41 (input), has not answered for 45 s: "
        "it is stopped, or the network to it is cut",
        (0,),
    )
    found = verdict(None, at(42, "wait"), me=1, answered=45)
    assert found is not None and found.text.startswith(
        "the coordinator, process 0 has not answered"
    )
    assert verdict(at(7, "input", 50), answered=50) is None  # a process alone has no store
    found = verdict(at(7, "input"), at(7, "input"), answered=45)
    assert found is not None and "service of this process" in found.text


def test_a_process_that_never_comes_has_the_time_of_progress():
    assert verdict(at(0, "start", 59), None, None, began=59) is None
    found = verdict(at(0, "start", 60), None, None, began=60)
    assert found == Verdict("processes 1, 2 have not come to the watch within 60 s", (1, 2))


def test_who_fails_alone_is_named_after_a_grace():
    def failed(moved):
        return at(41, "input", moved, 99, state=FAILED, why="ValueError: no", host="h1")

    assert verdict(at(42, "wait"), failed(2)) is None
    found = verdict(at(42, "wait"), failed(3), failed(2.5))
    assert found == Verdict("process 1 on host h1 failed at step 41 (input): ValueError: no", (1,))


def test_what_another_says_is_taken_over():
    other = at(42, "wait", state=ENDING, why="because", culprits=(2,))
    assert verdict(at(42, "wait"), other, at(41, "input")) == Verdict("because", (2,))


def test_the_surest_cause_is_said():
    silent, failed = at(1, "input", 99, 99), at(1, "input", 99, 99, state=FAILED, why="E")
    told_of = at(1, "wait", state=ENDING, why="because")
    for seen, said, more in [
        ((silent, told_of, failed), "because", {"answered": 99}),
        ((silent, failed), "failed", {"answered": 99}),
        ((silent, silent, None), "not answered", {"answered": 50}),
        ((silent, None), "not been heard", {}),
        ((at(1, "input", 99), None), "not come", {}),
    ]:
        found = verdict(at(1, "wait", 99), *seen, **more)
        assert found is not None and said in found.text, (found, said)


def test_beats_are_read_by_the_clock_of_the_reader():
    first, later = Beat("h", 1, sent=1, moved=1), Beat("h", 1, sent=2, moved=1)
    seen = view(None, None).after({1: first}, 10).seen[1]
    assert (seen.heard, seen.moved) == (10, 10)
    assert seen.then(first, 11) == Seen(first, 10, 10, 10)
    assert seen.then(later, 12) == Seen(later, 12, 10, 10)
    failed = Beat("h", 1, sent=3, moved=2, state=FAILED)
    assert seen.then(failed, 13) == Seen(failed, 13, 13, 13)
    ending = Beat("h", 1, sent=3, moved=1, state=ENDING)
    assert seen.then(ending, 13) == Seen(ending, 13, 10, 13)


def test_beats_and_stacks_go_through_the_store_as_text():
    class Client:
        def __init__(self):
            self.kept = {}

        def key_value_set(self, key, value, allow_overwrite):
            assert allow_overwrite and isinstance(value, str)
            self.kept[key] = value

        def key_value_dir_get(self, prefix):
            return [(k, v) for k, v in self.kept.items() if k.startswith(prefix)]

    client = Client()
    store, other = Store(client, 0), Store(client, 1)
    beat = Beat('h "1"', 7, 3, 2, 41, "input", ENDING, "why", (1, 12))
    store.publish(12, Beat("h", 1))
    store.publish(12, beat)
    store.leave_stack(12, "File ...")
    other.publish(0, Beat("h", 1))
    assert store.beats() == {12: beat} and store.stacks() == {12: "File ..."}
    assert list(other.beats()) == [0] and other.stacks() == {}


def test_the_table_has_a_line_for_all_that_are_alike():
    seen = [at(42, "wait", 60, 1, host=f"h{p // 4}") for p in range(16)]
    seen[5], seen[9] = at(41, "input", 61, 2, host="h1"), at(43, "wait", 9, 9, state=DONE)
    assert words.table(view(*seen, None), NOW) == [
        "process 5 on host h1: step 41 (input), moved 61 s ago, heard of 2 s ago",
        "process 9 on host h0: step 43 (wait), done, moved 9 s ago, heard of 9 s ago",
        "processes 0-4, 6-8, 10-15: step 42 (wait), moved 60 s ago, heard of 1 s ago",
        "process 16: never heard of",
    ]


def test_one_process_reports():
    a, gone = at(1, "wait"), at(1, "wait", state=DONE)
    assert reporter(view(a, a, a, me=2), Verdict("", (0,))) == 1
    assert reporter(view(gone, a, a, me=2), Verdict("")) == 1
    assert reporter(view(a, gone), Verdict("", (0,))) == 0
    assert told(view(a, gone, at(1, "x", state=ENDING))) and not told(view(a, gone, a))
    assert not told(view(a, None))


def test_time_in_which_a_process_was_stopped_does_not_count(monkeypatch):
    times = iter([0.0, 1.0, 3.5, 100.5, 101.0])  # on time, late, stopped
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    clock = Clock(pause=1.0)
    assert [clock.now() for _ in range(4)] == [1.0, 3.5, 4.5, 5.0]


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, 1e300, 10**400, True, "10"])
def test_limits_that_cannot_be_are_refused(value):
    with pytest.raises(DataError, match="a number of seconds above 0 is needed"):
        Watchdog(value)
    with pytest.raises(DataError, match="silent_s"):
        Watchdog(silent_s=value)


def test_seconds_may_be_of_numpy():
    assert [patience.seconds("s", kind(5), DataError) for kind in (np.int64, np.float32)] == [5, 5]


def test_a_run_that_moves_is_let_alone_and_an_object_watches_once(capfd):
    watchdog = Watchdog(0.4)
    with watchdog:
        for step in range(8):
            watchdog.beat(step, "input")
            time.sleep(0.1)
    with pytest.raises(DataError, match="watches once"):
        watchdog.__enter__()
    with pytest.raises(ValueError, match="mine"), Watchdog():
        raise ValueError("mine")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("before_s", [0, 0.3])  # at once; between two looks of the judge
def test_a_process_alone_that_holds_pythons_lock_is_ended(before_s):
    script = f"""
        import ctypes, time
        from collc.runtime.watchdog import watchdog
        watchdog.GRACE_S = 0.5
        def hold():
            ctypes.PyDLL(None).sleep(60)
        with watchdog.Watchdog(1.0) as watch:
            time.sleep({before_s})
            hold()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 1
    assert "Timeout" in done.stderr and "in hold" in done.stderr


def test_a_process_alone_that_is_stuck_ends():
    script = """
        import time
        from collc.runtime.watchdog.watchdog import Watchdog
        def slow_batch():
            time.sleep(60)
        print("kept", end="")
        with Watchdog(1.0) as watchdog:
            watchdog.beat(3, "input")
            slow_batch()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 75 and done.stdout == "kept"
    assert "collc watchdog: process 0 on host" in done.stderr
    assert "has been at step 3 (input) for 1 s." in done.stderr
    assert "in slow_batch" in done.stderr


def test_fit_watches_where_it_is_asked_to():
    def names(event):
        seen.append({thread.name for thread in threading.enumerate()})

    seen, quiet = [], Console(quiet=True)
    for asked in (None, math.inf, 30):
        step = jax.jit(lambda w, batch: (w + batch, w))
        fit(
            step,
            0.0,
            lambda t: 1.0,
            steps=1,
            callbacks=[names],
            watchdog=asked,
            profile=0,
            console=quiet,
        )
    assert ["collc-watchdog" in found for found in seen] == [False, False, True]
    for value in (0, -1, True, "10", math.nan):
        with pytest.raises(DataError, match=r"watchdog is .*: a number of seconds"):
            fit(step, 0.0, lambda t: 1.0, steps=1, watchdog=value)
