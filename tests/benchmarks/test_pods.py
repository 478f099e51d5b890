"""The report on compiling for pods says what was measured."""

import argparse
import sys
from pathlib import Path

import pytest


@pytest.fixture
def pods(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    for name in ("pods", "common"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import pods

    return pods


def turn(total: float, memory: float = 700.0) -> dict:
    return {
        "seconds": {"compile": total},
        "total": total,
        "processor": 2 * total,
        "memory": memory,
        "collectives": {"all-reduce": 7},
        "differences": 0,
        "gpu": 8.5,
        "most": 85.0,
    }


def test_a_ratio_is_taken_within_a_turn_and_a_missed_promise_is_named(pods):
    plain, native, tree = pods.WAYS[:3]
    found = {
        plain.name: [turn(10), turn(20), turn(40)],
        native.name: [turn(16), turn(32), turn(40)],
        tree.name: [turn(10), turn(20), turn(400, memory=3100.0)],
    }
    assert pods.ratios(found, native.name) == [1.6, 1.6, 1.0]
    assert pods.median([4, 1, 2]) == 2 and pods.median([1, 2]) == 1.5
    options = argparse.Namespace(
        ways=(plain, native, tree), model="transformer:medium", hosts=512, iterations=3
    )
    text = "\n".join(pods.report(options, found, 123))
    assert "| time, native/native, of plain JAX's | 1.60 | 1.50 | MISSED |" in text
    assert "| time, ring/tree, of plain JAX's | 1.00 | 3.00 | met |" in text
    assert "| peak memory of a process, GB | 3.10 | 3.00 | MISSED |" in text
