"""Scaling studies: the sums of a step, who wins where, what is extrapolated, left out and refused."""

import math
from itertools import pairwise

import pytest

import collc
from collc.errors import DataError, MachineError
from collc.machine import nccl
from collc.machine.catalog import model
from collc.machine.scaling.effort import effort
from collc.machine.scaling.growing import default_counts, machines
from collc.machine.scaling.scale import MOST_WORK, SCHEDULES, scale, spread
from collc.machine.scaling.table import explain
from collc.machine.scaling.work import work
from collc.machine.uniform import uniform

ALPHA, BETA, MIB = 2e-6, 1 / 8e9, 2**20


def one_switch(n):
    return uniform(n, ALPHA, BETA)


@pytest.fixture(scope="module")
def study():
    """Of a few sizes: within the calibrated range, at twice its end, and beyond."""
    return scale("dgx-h100", 0.01, 64 * MIB, (8, 64, 256, 512, 2048))


@pytest.mark.parametrize("overlap", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("strong", [False, True])
def test_the_sums_of_a_step(overlap, strong):
    size, whole = 4 * MIB, 0.05
    found = scale(
        one_switch,
        whole,
        size,
        (8, 16),
        {"ring": "ring.all_reduce"},
        overlap=overlap,
        strong=strong,
    )
    for n in (8, 16):
        point = found.point(n, "ring")
        compute = whole / n if strong else whole
        assert point.compute == compute
        closed = 2 * (n - 1) * ALPHA + 2 * (n - 1) / n * size * BETA
        assert point.abstract == pytest.approx(closed, rel=1e-12)
        sums = point.middle
        # A GPU that nobody knows: NCCL's base, XLA's launch and a hop for each round, 0.8 of the link.
        lowered = 2 * (n - 1) * (8.4 + 2 + 3.4) * 1e-6 + 2 * (n - 1) / n * size * BETA / 0.8
        assert sums.communication == pytest.approx(lowered, rel=1e-12)
        exposed = max(0.0, sums.communication - overlap * compute)
        assert sums.exposed == exposed and sums.seconds == compute + exposed
        # Work a second, against that of one device.
        assert sums.speedup == pytest.approx(n / (1 + exposed / compute))
        assert sums.efficiency == pytest.approx(sums.speedup / n)
        assert sums.share == pytest.approx(exposed / (compute + exposed))


def test_weak_scaling_keeps_its_compute_and_strong_scaling_shares_it_out():
    weak = scale("roce", 1e-3, MIB, (8, 64), {})
    strong = scale("roce", 64e-3, MIB, (8, 64), {}, strong=True)
    assert weak.point(64, "native").middle == strong.point(64, "native").middle
    assert weak.point(8, "native").middle.efficiency < strong.point(8, "native").middle.efficiency


def test_beyond_twice_the_calibrated_devices_there_is_a_range(study):
    assert study.calibrated == nccl.calibrated(machines("dgx-h100")(8)) == 128
    before = 0.0
    for n in study.devices:
        for point in study.at(n):
            assert point.extrapolated == (n > 256)
            low, middle, high = (p.communication for p in (point.low, point.middle, point.high))
            if not point.extrapolated:
                assert low == middle == high
                continue
            error = 0.12 * (1 + math.log2(n / 256))
            assert point.error == pytest.approx(error)
            assert high / middle == pytest.approx(1 + error) == pytest.approx(middle / low)
            assert point.low.seconds < point.middle.seconds < point.high.seconds
            assert point.low.speedup > point.high.speedup
        width = study.at(n)[0].error
        assert n < 512 or width > before
        before = width


def test_the_range_grows_and_begins_without_a_jump():
    widths = [spread(0.12, n, 128) for n in (8, 256, 257, 512, 1024, 4096)]
    assert widths[0] == widths[1] == 0.12 and widths[1] < widths[2] < 0.121
    assert all(a <= b for a, b in pairwise(widths))


def test_the_calibrated_range_can_be_said():
    found = scale("dgx-h100", 0.01, MIB, (8, 64), {}, calibrated=16)
    assert [p.extrapolated for p in found.points] == [False, True]


def test_ties_are_what_the_error_cannot_tell_apart(study):
    for n in study.devices:
        best, *rest = study.at(n)
        names = set(study.ties(n))
        assert best.schedule in names
        for point in rest:
            near = point.middle.communication <= best.middle.communication * (1 + best.error)
            assert (point.schedule in names) == near


def test_what_is_hidden_is_tied():
    found = scale("dgx-h100", 1.0, MIB, (8, 64), overlap=0.5)
    assert set(found.ties(64)) == set(SCHEDULES)
    assert found.at(64)[0].middle.efficiency == 1
    # Of equal steps the one with the quickest communication comes first.
    assert found.at(64)[0].middle.communication == min(p.middle.communication for p in found.at(64))


def test_where_a_schedule_starts_and_stops_winning():
    """GPUs that nobody knows, a slow network: two levels begin to win somewhere."""
    unknown = "gpus=8 link=25GB/s,3us nics=1 net=25Gb/s,30us"
    found = scale(unknown, 1e-3, 4 * MIB, (8, 16, 32, 128, 256), calibrated=256)
    (alone,) = [r for r in found.reigns("halving by host") if not r.tied]
    before = [n for n in found.devices if n < alone.first]
    assert before and found.ties(before[-1]) != ("halving by host",)
    for name in SCHEDULES:
        covered = [n for n in found.devices for r in found.reigns(name) if r.first <= n <= r.last]
        assert covered == [n for n in found.devices if name in found.ties(n)]
    said = next(x for x in explain(found).splitlines() if x.startswith("  halving by host: "))
    span = (
        f"from {alone.first} to {alone.last}" if alone.last > alone.first else f"on {alone.first}"
    )
    assert f"wins {span}" in said and said.count("ties") == len(found.reigns("halving by host")) - 1


def test_native_is_always_a_candidate():
    found = scale("ethernet", 0.01, MIB, (16,), {"mine": "tree.all_reduce"})
    assert list(found.schedules) == ["native", "mine"]
    assert str(found.schedules["mine"]).endswith("@ (host, gpu)")


def test_what_is_left_out_by_a_rule(study):
    assert {(x.schedule, x.devices) for x in study.left_out} == {
        ("halving", 2048), ("8 servers", 2048)
    }  # fmt: skip
    assert study.point(2048, "halving") is None
    assert "halving on 2,048: about" in explain(study)
    halving = collc.parse(SCHEDULES["halving"])
    assert effort(halving, {"host": 256, "gpu": 8}) > MOST_WORK


@pytest.mark.parametrize("n", [8, 16, 32])
def test_effort_counts_steps_that_are_alike_once(n):
    def of(text):
        return effort(collc.parse(text) @ ("host", "gpu"), {"host": n // 8, "gpu": 8})

    assert of("ring.all_reduce") == 2 * (n + n)  # n sends and a round, twice
    assert of("pairwise.all_to_all") == (n - 1) * (n + n)
    assert of("halving.all_reduce") == 2 * (n * (n - 1) + math.log2(n) * n)
    assert effort(collc.parse("native.all_reduce @ gpu"), {"gpu": n}) == 0


def test_effort_grows_on_as_it_did():
    halving = collc.parse("halving.reduce_scatter @ gpu")
    for n in (128, 1024):
        exact = n * (n - 1) + math.log2(n) * n
        assert 0.8 < effort(halving, {"gpu": n}) / exact < 1.3


def test_a_schedule_that_fails_somewhere_is_left_out_there():
    found = scale(
        "infiniband", 0.01, MIB, (8, 16), {"racks": "rack.all_reduce((0, 1, 2, 3), (4, 5, 6, 7))"}
    )
    assert found.point(8, "racks") is not None
    ((left),) = found.left_out
    assert left.devices == 16 and "do not hold each of the ranks" in left.why


@pytest.mark.parametrize(
    "kind, counts",
    [
        ("dgx-h100", tuple(2**k for k in range(3, 13))),
        ("gb200-nvl72", (8, 16, 32, 64, 72, 144, 288, 576, 1152, 2304)),
        ("gpus=4 link=450GB/s,1us net=400Gb/s,5us", tuple(2**k for k in range(3, 13))),
        ("gpus=6 link=450GB/s,1us net=400Gb/s,5us", (12, 24, 48, 96, 192, 384, 768, 1536, 3072)),
    ],
)
def test_default_numbers_of_devices(kind, counts):
    make = machines(kind)
    assert default_counts(make) == counts
    assert [make(n).devices % make(n).node.devices for n in counts] == [0] * len(counts)


def test_a_machine_grows_by_hosts():
    make = machines("gb200-nvl72 net=200Gb/s")
    assert (make(8).text, make(144).text) == (
        "gb200-nvl72:18 net=200Gb/s", "gb200-nvl72:36 net=200Gb/s"
    )  # fmt: skip
    assert make(8) is make(8)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"machine": "dgx-h100:4"}, "the number of hosts is what is scaled"),
        ({"machine": "dgx-h100 racks=2 uplink=400Gb/s"}, "racks= counts the racks of one machine"),
        ({"compute_seconds": 0.0}, "compute takes 0.0 s"),
        ({"compute_seconds": math.nan}, "compute takes nan s"),
        ({"parameter_bytes": 0}, "parameters of 0 bytes"),
        ({"overlap": 1.5}, "overlap 1.5 is no share"),
        ({"overlap": math.nan}, "overlap nan is no share"),
        ({"calibrated": 0}, "calibrated on 0 devices"),
        ({"devices": ()}, "give numbers from 1"),
        ({"devices": (0,)}, "give numbers from 1"),
        ({"devices": (12,)}, "12 devices are no whole number of nodes of 8. Say 8,"),
        ({"schedules": {"x": "ring.all_gather"}}, "is all_gather, not an all-reduce"),
        ({"schedules": {"x": "ring.all_reduce @ data"}}, "is placed on data"),
    ],
)
def test_refusals(change, message):
    given = {"machine": "dgx-h100", "compute_seconds": 0.1, "parameter_bytes": 1e6} | change
    with pytest.raises(MachineError) as e:
        scale(
            given.pop("machine"),
            given.pop("compute_seconds"),
            given.pop("parameter_bytes"),
            **given,
        )
    assert message in str(e.value)


def test_explain(study):
    text = explain(study)
    assert max(map(len, text.splitlines())) <= 110
    again = scale("dgx-h100", 0.01, 64 * MIB, (8, 64, 256, 512, 2048))
    assert explain(again) == text and again == study
    assert "~ is extrapolated: more than twice the 128 devices" in text
    assert "communication, lowered | abstract" in text
    best = next(line for line in text.splitlines() if line.startswith("    2,048  native"))
    assert best.count("~") == 4  # a range instead of each number


# ---- receipts -----------------------------------------------------------------------------------


def collective(kind, axes, bytes, count=1, scope="", by="plan"):
    return {"name": "x", "kind": kind, "axes": axes, "bytes": bytes, "count": count, "by": by} | {
        "scope": scope
    }


def receipt(*collectives, **more):
    own = {"flops": 8e12, "flops_exact": True, "pod": "h100", "mesh": {"host": 4, "gpu": 8}}
    return own | {"collectives": list(collectives)} | more


def permutes(leaf, axis, bytes, count):
    return collective("collective-permute", [axis], bytes, count, f"collc/{leaf}/{axis}")


def test_bytes_of_permutes_are_those_of_the_buffer_that_they_reduce():
    found = work(
        receipt(
            permutes("ring.reduce_scatter", "gpu", 1000, 7),
            permutes("tree.reduce", "host", 1000, 3),  # three rounds of the eighth that is left
            permutes("tree.reduce.reversed()", "host", 1000, 3),
            permutes("ring.all_gather", "gpu", 1000, 7),
        ),
        "h100",
    )
    assert found.parameters == 8000 and found.notes == ()
    assert found.compute == 8e12 / (model("h100").peak * 0.4)


def test_bytes_of_natives_and_of_buckets():
    found = work(
        receipt(
            collective("reduce-scatter", ["gpu"], 100),
            collective("all-reduce", ["host"], 100),
            collective("all-gather", ["gpu"], 800),
            collective("all-reduce", ["host", "gpu"], 50, count=2),
            collective("all-reduce", ["gpu"], 10**9, by="program"),
        )
    )
    assert found.parameters == 900


def test_a_step_without_a_plan():
    found = work(receipt(collective("all-reduce", ["gpu"], 64, by="XLA")), "b200", 0.5)
    assert found.parameters == 64 and "no plan" in found.notes[0]
    assert found.compute == 8e12 / (model("b200").peak * 0.5)


@pytest.mark.parametrize(
    "given, message",
    [
        ({}, "no 'flops'"),
        ([], "no 'flops'"),
        ({"step": receipt(), "native": receipt()}, "It holds several; compile without --against"),
        (receipt(flops=0), "computes nothing"),
        (receipt(flops="x"), "'flops' is 'x'"),
        (receipt(mesh=None), "'mesh' is None"),
        (receipt(), "reduces nothing"),
        (receipt(pod=None), "is not known"),
        (receipt({"kind": "all-reduce", "by": "plan"}), "lacks 'axes'"),
        (receipt(collective("all-reduce", None, 1)), "over which axes"),
        (receipt(permutes("nowhere.mine", "gpu", 1, 1)), "'nowhere.mine' is not known here"),
        (
            receipt(
                *(collective("all-reduce", [axis], 8) for axis in ("gpu", "host")),
                *(collective("reduce-scatter", [axis], 8) for axis in ("gpu", "host")),
            ),
            "both scattered and all-reduced",
        ),
        (receipt(7), "has no fields"),
        (receipt(collective("all-reduce", ["model"], 8)), "is over ['model'], its mesh has"),
        (receipt(collective("all-reduce", ["gpu"], "many")), "a collective of the receipt is"),
        (receipt(collective("all-reduce", ["gpu"], 8), mesh={"gpu": -8}), "no number above 0"),
        (receipt(permutes("evil.py:mine", "gpu", 1, 1)), "is not known here"),  # no file is run
    ],
)  # fmt: skip
def test_what_is_no_receipt(given, message):
    with pytest.raises(DataError) as e:
        work(given)
    assert message in str(e.value)


def test_a_utilisation_is_a_share():
    with pytest.raises(DataError, match="what part of its peak"):
        work(receipt(collective("all-reduce", ["gpu"], 64)), utilisation=1.2)
