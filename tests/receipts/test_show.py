"""What a receipt looks like: as text, as JSON, as comments in the HLO, and beside another one."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from collc.lowering.sends import Asked
from collc.receipts.against import side_by_side
from collc.receipts.compare import compare
from collc.receipts.export import annotated, as_json
from collc.receipts.hlo.collectives import CollectivePermute
from collc.receipts.overlap import MOST
from collc.receipts.pods import Pod, target
from collc.receipts.reading import receipt
from collc.receipts.receipt import Entry, Memory
from collc.receipts.rows import rows
from collc.receipts.show import WIDTH, plain, text
from collc.receipts.spans import Links, sent

from .written import fixture, module

FIXTURES = [f"{name}-0.{v}" for name in ("fsdp-cuda", "loop-cuda", "loop-cpu") for v in (10, 12)]
MIB = 2**20


def mesh_of(name):
    return {"host": 2, "gpu": 4 if "cpu" in name else 8}


def made(name="fsdp-cuda-0.12", **changed):
    """The receipt of a text, with all that only a compiled program on a pod has."""
    found = receipt(fixture(name), mesh=mesh_of(name))
    requests = (
        Asked("all-gather", ("host", "gpu"), None, "bf16", MIB, 8, "all_gather", False),
        Asked(
            *("all-reduce", ("host",), None, "f32", MIB, 2, "collc/native.all_reduce/host", True),
            reduction="add",
        ),
    )
    compared = compare(requests, found.module.collectives, mesh_of(name))
    domains = np.arange(found.module.devices) // 8
    return replace(
        found,
        pod=Pod(target.find("h100"), 8, 8, domains, domains),
        entries=tuple(
            replace(
                e,
                links=Links(*map(round, sent(e.collective, domains).sum(axis=1))),
                serves=serves,
            )
            for e, serves in zip(found.entries, compared.served, strict=True)
        ),
        asked=requests,
        absent=compared.absent,
        differences=compared.differences,
        memory=Memory(40 * MIB, 40 * MIB, 32 * MIB, 12 * MIB, 0, 80 * 2**30),
        seconds={"trace": 0.25, "lower": 0.5, "compile": 4.0, "receipt": 0.125},
        **changed,
    )


def entry(scope, *, count=1, dtype="f32", shape=(8,), by="plan", serves=()):
    pairs = tuple((i, (i + 1) % 8) for i in range(8))
    name = f"jit(f)/shard_map/{scope}"
    c = CollectivePermute("p", (dtype,), (shape,), (), count, True, "nccl", name, (), pairs)
    return Entry(c, ("gpu",), None, by, serves)


# ---- text -----------------------------------------------------------------------------------------


def test_all_that_a_receipt_says(golden):
    golden("receipt.txt", text(made()))
    assert str(made()) == text(made())


def test_what_hlo_alone_says(golden):
    golden("receipt_hlo.txt", text(receipt(fixture("loop-cuda-0.12"))))


@pytest.mark.parametrize("name", FIXTURES)
def test_it_fits_100_columns(name):
    lines = text(made(name)).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert not [line for line in lines if line != line.rstrip()]


def test_no_collectives():
    found = text(receipt(module("ROOT %x = f32[8]{0} add(%param.1, %param.1)")))
    assert "no collectives: no device needs anything of another one" in found
    assert "in flight" not in found and "Overlap" not in found


def test_text_that_is_not_scheduled_says_nothing_of_overlap():
    unscheduled = fixture("loop-cuda-0.12").replace("is_scheduled=true", "is_scheduled=false")
    found = text(receipt(unscheduled))
    assert "in flight    unknown: the text is from before XLA's scheduling" in found
    assert "Overlap" not in found


def test_many_kinds_of_collectives_are_counted_not_cut_off_silently():
    found = made()
    many = tuple(entry("ppermute", shape=(n,), by="program") for n in range(1, MOST + 4))
    shown = text(replace(found, entries=many))
    assert shown.count("  exposed  ") == MOST
    assert "and 3 more kinds, with fewer bytes: --json lists all" in shown
    assert f"{4 * (MOST + 3)} B" in shown and "  12 B  waited" not in shown


# ---- rows -----------------------------------------------------------------------------------------


def asked(scope, count, *, dtype="f32", elements=8, kind="collective-permute", plan=True):
    return Asked(kind, ("gpu",), None, dtype, elements, count, scope, plan)


RING = "collc/ring.reduce_scatter/gpu"


def counts(entries, absent=()):
    found = rows(replace(made(), entries=tuple(entries), absent=tuple(absent)))
    return [(r.scope, r.wire, r.asked, r.found) for r in found]


def test_equal_collectives_are_one_row():
    two = [
        entry(f"{RING}/r{i}/ppermute", count=i + 1, serves=((asked(RING, 6), i + 1),))
        for i in range(3)
    ]
    assert counts(two) == [("ring.reduce_scatter @ gpu", "f32", 6, 6)]


def test_one_that_nobody_asked_for():
    assert counts([entry("mul", by="XLA")]) == [("mul", "f32", 0, 1)]


def test_one_that_is_not_there_has_a_row_of_its_own():
    psum = asked("psum", 2, kind="all-reduce", plan=False)
    assert counts([], [(psum, 2)]) == [("psum", "f32", 2, 0)]


def test_more_than_are_there_and_loops_that_nobody_counts():
    here = entry(f"{RING}/r0/ppermute", count=7, serves=((asked(RING, 9), 7),))
    assert counts([here], [(asked(RING, 9), 2)])[0][2:] == (9, 7)
    unknown = entry(f"{RING}/r0/ppermute", count=7, serves=((asked(RING, None), 7),))
    assert counts([unknown])[0][2:] == (math.inf, 7)


# ---- JSON, HLO, side by side ------------------------------------------------------------------------


def test_json_holds_all_of_it():
    found = json.loads(json.dumps(as_json(made())))
    assert found["mesh"] == {"host": 2, "gpu": 8} and found["pod"] == "h100"
    assert found["counts"] == {"all-gather": 8, "all-reduce": 1, "reduce-scatter": 4}
    assert sum(c["count"] for c in found["collectives"]) == 13
    first = found["collectives"][0]
    assert first["axes"] == ["host", "gpu"] and first["among"] is None and first["bytes"] == 2 * MIB
    assert found["memory"]["total"] == 60 * MIB and found["memory"]["fits"] is True
    assert [d["what"] for d in found["differences"]] == [
        "unplanned",
        "unplanned",
        "removed",
    ]
    assert found["asked"][0]["count"] == 8
    for link, every in found["links"].items():
        assert every == sum(c["links"][link] for c in found["collectives"])
    assert found["busiest"]["network"] * 16 == pytest.approx(found["links"]["network"], abs=16)


def test_json_of_hlo_alone():
    found = as_json(receipt(fixture("loop-cuda-0.12")))
    absent = ("pod", "mesh", "asked", "links", "memory")
    assert [found[key] for key in absent] == [None] * 5
    (one,) = found["collectives"]
    assert one["axes"] is None and one["among"] == "16 pairs" and one["count"] == 5


@pytest.mark.parametrize("name", FIXTURES)
def test_annotated_text_can_be_read_again(name):
    hlo = fixture(name)
    found = receipt(hlo, mesh=mesh_of(name))
    more = annotated(found, hlo)
    assert receipt(more, mesh=mesh_of(name)).entries == found.entries
    comments = [line for line in more.splitlines() if line.lstrip().startswith("// ")]
    assert len(comments) == len({e.collective.name for e in found.entries})
    assert "\n".join(line for line in more.splitlines() if line not in comments) == hlo.rstrip("\n")


def test_a_comment_stands_above_its_collective():
    hlo = fixture("loop-cuda-0.12")
    lines = annotated(receipt(hlo, mesh={"host": 2, "gpu": 8}), hlo).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("  // "))
    assert lines[at] == (
        "  // collective-permute over gpu: 131,072 bytes (128.0 KiB, 65,536 bf16); 5 times; "
        "asynchronous, nccl; asked by the program: ppermute; beside dot_general 33.6 MFLOP, "
        "1 other kernel (4 B)"
    )
    assert "collective-permute-start" in lines[at + 1]


def test_two_side_by_side(golden):
    pair = [("step", made()), ("native", made("fsdp-cuda-0.10"))]
    golden("receipt_against.txt", plain(side_by_side(pair)))
