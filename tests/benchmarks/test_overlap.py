"""The report on overlap counts what is beside what."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from collc.receipts.hlo.work import Work
from collc.receipts.receipt import Entry

MIB = 2**20


@pytest.fixture
def overlap(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    for name in ("overlap", "overlap_programs", "common"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import overlap

    return overlap


def entry(size: int, count: int, *beside: Work) -> Entry:
    collective: Any = SimpleNamespace(bytes=size, count=count, beside=beside)
    return Entry(collective, axes=None, links=None, by="plan")


def made(overlap) -> dict:
    product = Work("dot", "fusion", "jit(f)/transpose(jvp(mlp))/dot_general", 10**12, 8)
    counter = Work("add", "fusion", "jit(f)/while/body/add", 0, 8)
    update = Work("sub", "fusion", "jit(f)/sub", 0, MIB)
    return overlap.account(
        SimpleNamespace(
            entries=[
                entry(MIB, 4, product, update),
                entry(2 * MIB, 3, counter),
                entry(MIB, 1, update),
                entry(5 * MIB, 2),
            ],
            module=SimpleNamespace(in_flight=1, flops=10**13),
            memory=SimpleNamespace(total=MIB),
        )
    )


def test_bytes_are_told_by_what_is_beside_them_and_all_executions_count(overlap):
    found = made(overlap)
    assert (found["count"], found["bytes"]) == (10, 21 * MIB)
    assert (found["hidden"], found["brief"], found["exposed"]) == (4 * MIB, 7 * MIB, 10 * MIB)
    assert found["counters"] == 6 * MIB
    assert found["products"] == {"attention": 0, "mlp": 4 * 10**12, "other": 0}


def test_the_report_has_a_row_for_each_program_and_says_what_is_hidden(overlap):
    every = [*overlap.matrix(), *overlap.changed()]
    assert len(set(every)) == len(every)
    each = {
        "rows": [[program.__dict__, made(overlap)] for program in every],
        "excerpts": {overlap.key(program): ["Overlap"] for program in every},
        "versions": "jax 1.2, jaxlib 1.2",
    }
    lines = overlap.report([each])
    row = "| 10 | 21 | 4 | 7 | 10 | 6 | 1 | mlp 4.0 | 0.00 |"
    assert sum(line.endswith(row) for line in lines) == len(every)
    assert "4 of 21 MiB (jax 1.2)" in " ".join(lines)
    assert all(len(line) <= 120 for line in lines if not line.startswith("|"))
