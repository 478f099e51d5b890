"""Shares of time: by the clock, and by spans whose sums are known."""

import json

import jax
import jax.numpy as jnp
import pytest

from collc.receipts.profile import Span
from collc.training.fitting import shares
from collc.training.fitting.shares import Clock, Profiler, Split


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
