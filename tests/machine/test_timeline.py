"""The critical path to the last second; traces that viewers open; pictures; a whole step."""

import json
import math
import sys
from itertools import pairwise
from math import fsum
from pathlib import Path

import numpy as np
import pytest

from collc.errors import MachineError
from collc.language.library import lookup
from collc.language.parse import parse
from collc.machine.flow import flow
from collc.machine.placement import placed
from collc.machine.price import price
from collc.machine.simulation import record as recording
from collc.machine.simulation.critical import critical
from collc.machine.simulation.faults import parse_fault
from collc.machine.simulation.picture import MOST_LANES, picture
from collc.machine.simulation.simulate import simulate
from collc.machine.simulation.step import step_timeline
from collc.machine.simulation.timeline import chrome
from collc.machine.uniform import two_level, uniform

SIZES = {"host": 2, "gpu": 4}
SHARED = two_level(2, 4, (1, 1), (4, 2), nics=2, gamma=1)
NESTED = parse("hierarchical.hierarchical('host', 'gpu')")


def run(schedule, machine, sizes, size, *faults, **options):
    own = [parse_fault(text) for text in faults]
    where = placed(machine, sizes)
    return simulate(flow(schedule, sizes), where, size, own, record=True, **options)


def on(n, name, *faults, **options):
    """On n devices whose messages take 3 s and 1 s per byte, with 2 s per byte added; n bytes."""
    return run(lookup(name), uniform(n, 3, 1, 2), {"": n}, n, *faults, **options)


def test_a_ring_by_hand():
    found = critical(on(3, "ring.all_reduce"))
    # Four steps of one byte each; after the first two it is added.
    assert found.seconds == {"latency": 12, "bytes": 4, "adding": 4}
    ends = [leg.end for leg in found.legs]
    assert sorted(ends) == [4, 6, 10, 12, 16, 20]
    assert found.legs[-1].end == 20 and found.legs[0].start == 0


def test_a_star_by_hand():
    """Three senders and one receiver with one port: two messages wait, and nothing else does."""
    found = critical(on(4, "server.reduce"))
    # 4 bytes each: 7 s a message, one behind the other, then 12 bytes are added.
    assert found.seconds == {"latency": 3, "bytes": 4, "waiting": 14, "adding": 24}
    wait, message, adding = found.legs
    assert (wait.start, wait.end, wait.rank, wait.behind) == (0, 14, 3, (2, 0))
    assert (message.start, message.end, message.rank, message.to) == (14, 21, 3, 0)
    assert (adding.start, adding.end, adding.rank) == (21, 45, 0)
    assert message.link == "node0/switch -> gpu0" and found.ranks == (3, 0)


def test_faults_have_their_share_of_the_seconds():
    slow = critical(on(2, "ring.all_gather", "slow rank 1 x3"))
    assert slow.seconds == {"latency": 3, "bytes": 1, "fault": 8} and slow.ranks[0] == 1
    late = critical(on(2, "ring.all_gather", "late rank 1 by 9s"))
    assert late.seconds == {"latency": 3, "bytes": 1, "fault": 9}
    assert (late.legs[0].start, late.legs[0].end, late.legs[0].rank) == (0, 9, 1)
    link = critical(on(2, "ring.all_gather", "slow link node0/gpu1 -> switch x5"))
    assert link.seconds == {"latency": 3, "bytes": 1, "fault": 4}
    assert link.links == ("node0/gpu1 -> switch",)


@pytest.mark.parametrize("model", ["abstract", "lowered"])
@pytest.mark.parametrize("text", [
    "hierarchical.hierarchical('host', 'gpu')", "torus.torus('host', 'gpu')",
    "allpairs.two_shot @ (host, gpu)", "server.star @ (host, gpu)", "bruck.all_to_all @ gpu",
])  # fmt: skip
def test_the_legs_are_a_chain_that_takes_all_the_time(text, model):
    for faults in ([], ["slow rank 3 x3", "late rank 5 by 7s"], ["slow nic 1 of node 1 x4"]):
        outcome = run(parse(text), SHARED, SIZES, 64, *faults, model=model)
        found = critical(outcome)
        assert found.legs[0].start == 0 and found.legs[-1].end == outcome.seconds
        assert all(a.end == b.start for a, b in pairwise(found.legs))
        assert math.isclose(fsum(found.seconds.values()), outcome.seconds, rel_tol=1e-12)
        assert "critical path" in str(found)


def test_what_is_not_recorded_has_no_path(monkeypatch):
    where = placed(uniform(4, 1, 1), {"": 4})
    quiet = simulate(flow(lookup("ring.all_reduce"), {"": 4}), where, 4)
    for ask in (critical, chrome):
        with pytest.raises(MachineError, match="record=True"):
            ask(quiet)
    with pytest.raises(MachineError, match="nothing ends last"):
        critical(on(4, "ring.all_reduce", "broken rank 1"))
    monkeypatch.setattr(recording, "MOST_RECORDED", 10)
    with pytest.raises(MachineError, match="more than the 10 messages"):
        on(4, "ring.all_reduce")
    assert critical(on(1, "ring.all_reduce")).legs == ()


def spans(trace):
    found = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    for e in found:
        assert {"name", "cat", "ts", "dur", "pid", "tid"} <= e.keys() and e["dur"] >= 0 <= e["ts"]
    return found


def test_a_trace_of_ranks():
    outcome = run(NESTED, SHARED, SIZES, 64, "slow rank 3 x3")
    trace = chrome(outcome)
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names == {f"rank {r}" for r in range(8)}
    assert {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"} == {
        "node 0", "node 1",
    }  # fmt: skip
    assert {(e["pid"], e["tid"]) for e in spans(trace)} == {(r // 4 + 1, r + 1) for r in range(8)}
    assert max(e["ts"] + e["dur"] for e in spans(trace)) == pytest.approx(outcome.seconds * 1e6)
    steps = [e for e in spans(trace) if e["cat"] != "waiting"]
    waits = [e for e in spans(trace) if e["cat"] == "waiting"]
    assert waits and steps[0]["name"] == "ring.reduce_scatter @ gpu step 0"
    assert steps[0]["args"]["bytes sent"] == 16 and steps[0]["args"]["to"] == "1"
    assert steps[0]["args"]["share of the buffer sent"] == 0.25
    for tid in range(8):  # steps of a rank do not overlap, and what it waits lies inside one
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in steps if e["tid"] == tid)
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(own))
        for e in waits:
            inside = (s <= e["ts"] and e["ts"] + e["dur"] <= t + 1e-3 for s, t in own)
            assert e["tid"] != tid or any(inside)


def test_a_trace_of_links():
    trace = chrome(run(NESTED, SHARED, SIZES, 64), "link")
    names = {
        e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"
    }
    assert "node0/nic1 -> network" in names.values() and "node1/gpu2 -> switch" in names.values()
    for tid in names:  # a link serves one message at a time
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans(trace) if e["tid"] == tid)
        assert own and all(a[1] <= b[0] + 1e-6 for a, b in pairwise(own))
    assert any(e["args"]["waited in us"] > 0 for e in spans(trace))
    with pytest.raises(MachineError, match="no lanes by 'node'"):
        chrome(on(2, "ring.all_gather"), "node")


def test_a_stall_is_in_the_trace_and_in_the_picture(tmp_path):
    outcome = on(4, "ring.all_reduce", "broken rank 1")
    trace = chrome(outcome)
    json.dumps(trace, allow_nan=False)
    assert sum(e.get("args", {}).get("never over", False) for e in spans(trace)) == 3
    picture(outcome, tmp_path / "stall.svg")


def test_side_by_side_has_lanes_of_its_own():
    outcome = run(lookup("ring.two_way_all_reduce"), uniform(4, 3, 1), {"": 4}, 16)
    assert set(outcome.record.tracks) == {0, 1}
    assert len({e["tid"] for e in spans(chrome(outcome))}) == 8


@pytest.mark.parametrize("lanes", ["rank", "link"])
def test_a_picture_is_the_same_each_time(lanes, tmp_path):
    few = two_level(2, 2, (1, 1), (4, 2), nics=1)
    outcome = run(NESTED, few, {"host": 2, "gpu": 2}, 64, "slow rank 3 x3")
    for name in ("a.svg", "b.svg", "c.png"):
        picture(outcome, tmp_path / name, lanes)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_says_what_it_leaves_out(tmp_path):
    outcome = run(lookup("binomial.broadcast"), uniform(64, 3, 1), {"": 64}, 64)
    picture(outcome, tmp_path / "many.svg")
    text = (tmp_path / "many.svg").read_text(encoding="utf-8")
    assert f"{64 - MOST_LANES} of 64 rank lanes are not drawn" in text
    assert "binomial.broadcast" in text and "critical path" in text


def test_a_picture_that_cannot_be(tmp_path, monkeypatch):
    outcome = on(2, "ring.all_gather")
    with pytest.raises(MachineError, match=r"\.svg or \.png"):
        picture(outcome, tmp_path / "a.pdf")
    with pytest.raises(MachineError, match="no folder"):
        picture(outcome, tmp_path / "nowhere" / "a.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MachineError, match=r"collc\[plot\]"):
        picture(outcome, Path("a.svg"))


def test_a_whole_step():
    where = placed(uniform(4, 3, 1), {"": 4})
    ring = lookup("ring.all_reduce")
    alone = price(ring, where, 8).abstract  # of one of two buckets
    one = step_timeline(ring, where, 300, 16, buckets=2, overlap=False, model="abstract")
    assert one.seconds == 300 + 2 * alone
    over = step_timeline(ring, where, 300, 16, buckets=2, model="abstract")
    # The first bucket is reduced behind the second half of the backward.
    assert over.seconds == 300 + alone
    assert critical(over).seconds["computing"] == 300
    slow = step_timeline(
        ring, where, 300, 16, buckets=2, faults=[parse_fault("slow rank 2 x2")], model="abstract"
    )
    assert slow.seconds > 600 and critical(slow).seconds["fault"] >= 300
    # Computing has a lane, and what is reduced has another.
    assert len({e["tid"] for e in spans(chrome(over))}) == 8
    phases = over.record.phases
    assert phases[:2] == ("forward", "backward") and "ring" in phases[2]
    native = step_timeline(lookup("native.all_reduce"), where, 300, 2**20, buckets=3)
    assert native.seconds > 300 and "native" in critical(native).seconds
    assert np.isfinite(native.finish).all()
    with pytest.raises(MachineError, match="buckets"):
        step_timeline(ring, where, 300, 16, buckets=0)
    with pytest.raises(MachineError, match="1 schedules for 2"):
        step_timeline([ring], where, 300, 16, buckets=2)
