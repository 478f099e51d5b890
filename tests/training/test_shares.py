"""Shares of time: by the clock, and by spans whose sums are known."""

import json
import time

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from collc.receipts.profile import Span
from collc.training.fitting import shares
from collc.training.fitting.fit import fit
from collc.training.fitting.shares import Clock, Profiler, Split
from collc.training.fitting.waiting import Watch


def span(device, operation, start, end):
    return Span(device, "", "", False, start, end, operation, "jit_step", 0)


def test_spans_are_split_without_counting_twice():
    spans = [
        span(0, "dot.1", 0, 4),
        span(0, "fusion", 3, 5),  # beside the first
        span(0, "ppermute.2", 4, 7),  # 1 of it behind compute
        span(1, "dot.1", 0, 4),
        span(1, "all-reduce-start.1", 4, 6),
    ]
    found = shares.split(spans, 10.0, 2)
    assert found == Split(
        2, compute=9 / 20, communication=pytest.approx(4 / 20), hidden=1 / 20, idle=7 / 20
    )


def test_what_was_not_seen_is_said_and_not_invented():
    assert "noted nothing" in shares.split([], 1.0, 3)
    assert "more than the steps" in shares.split([span(0, "dot", 0, 3)], 1.0, 3)
    timer = Clock()
    timer.add("steps", 8.0)
    timer.add("input", 2.0)
    told = shares.report(timer, "compute and communication: no profiler", steps=5, here=5)
    assert (told.input, told.compute, told.communication, told.idle) == (0.25, None, None, None)
    assert "input 25.0%" in str(told) and "not measured: compute and communication" in str(told)
    assert json.loads(json.dumps(told.to_json(), allow_nan=False))["compute"] is None
    told = shares.report(timer, Split(3, 0.5, 0.25, 0.125, 0.25), steps=5, here=5)
    assert (told.compute, told.communication, told.idle) == (0.375, 0.1875, 0.1875)
    assert sum((told.compute, told.communication, told.idle, told.input)) == 1 and not told.why
    assert "compute 37.5%, communication 18.8%, input 25.0%" in str(told)
    assert "more communication behind compute (3 steps profiled)" in str(told)
    assert "no step after the first" in shares.report(Clock(), "", steps=1, here=1).why
    none = shares.report(Clock(), "", steps=3, here=0)
    assert "no step to do" in none.why and "all 3 were finished before" in str(none)


def test_the_report_says_the_whole_time_first_then_its_parts_and_what_stopped_it():
    seconds = {"total": 75.0, "first step": 3.14, "steps": 60.5, "input": 2.0, "evaluation": 9.26}
    none = dict.fromkeys(("input", "compute", "communication", "hidden", "idle"))
    told = shares.Report(7, 7, seconds, **none, profiled=0, why="", stopped="SIGTERM", asked=50)
    assert str(told).splitlines() == [
        "stopped by SIGTERM after step 7 of 50",
        "7 steps in 1:15",
        "of which first step 3.1 s, steps 1:00, evaluation 9.3 s, other 2.1 s",
    ]


def test_one_device_has_nobody_to_communicate_with():
    spans = [span(0, "dot.1", 0, 4), span(0, "all-reduce.1", 4, 5)]
    assert shares.split(spans, 10.0, 1, alone=True) == Split(1, 0.5, 0.0, 0.0, 0.5)


@jax.jit
def long(x):
    """Tens of milliseconds."""
    return jax.lax.fori_loop(0, 40, lambda _, y: jnp.tanh(y @ x), x).sum()


def test_a_device_waits_from_the_end_of_its_step_until_the_batch_is_there():
    x = jnp.ones((400, 400))
    long(x).block_until_ready()
    with Watch() as watch:
        began = time.perf_counter()
        out = long(x)
        moment = watch.when({"loss": out, "plain": 3})
        assert moment.waited(began) == 0 or out.is_ready()
        out.block_until_ready()
        done = time.perf_counter()
        time.sleep(0.2)  # the loader is late
        waited, late = moment.waited(began), time.perf_counter() - done
        assert late - 0.05 < waited < late + 0.05 and waited < time.perf_counter() - began
        since = time.perf_counter()
        assert moment.waited(since) < 0.05  # asked for after the step had ended


def test_the_share_of_input_is_the_time_beyond_the_step():
    x, took = jnp.ones((400, 400)), []
    for _ in range(5):
        began = time.perf_counter()
        long(x).block_until_ready()
        took.append(time.perf_counter() - began)

    def data(t):
        time.sleep(2 * min(took))  # half of it behind the step
        return x

    step = jax.jit(lambda state, batch: (state, long(batch)))
    told = fit(step, 0, data, steps=12, profile=0, console=Console(quiet=True)).report
    assert told.input is not None and 0.2 < told.input < 0.8
    parts = [told.seconds[name] for name in ("first step", "steps")]
    assert told.seconds["input"] < parts[1] and sum(parts) < told.seconds["total"]


def test_virtual_devices_are_not_profiled():
    profiler = Profiler(3, jax.devices()[:4])
    assert "4 virtual CPU devices" in profiler.result
    with profiler.step(5) as profiled:
        assert not profiled
    assert Profiler(0, jax.devices()[:1]).result.endswith("profile=0")


def test_one_device_is_profiled():
    step = jax.jit(lambda x: jnp.tanh(x @ x))
    x = jnp.ones((200, 200))
    profiler = Profiler(2, jax.devices()[:1])
    assert "too few steps" in profiler.result
    for number in range(6):
        with profiler.step(number) as profiled:
            assert profiled == (2 <= number < 4)
            step(x).block_until_ready()
    found = profiler.result
    assert isinstance(found, Split) and found.steps == 2
    assert 0 < found.compute <= 1.05 and found.communication == found.hidden == 0


def test_a_profiler_that_runs_already(tmp_path):
    profiler = Profiler(1, jax.devices()[:1])
    with jax.profiler.trace(str(tmp_path)), profiler.step(2) as profiled:
        assert not profiled
    assert "cannot be started" in profiler.result
    profiler.close()
