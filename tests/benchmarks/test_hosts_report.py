"""The report on emulated hosts accounts for every link, and says what was measured."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import collc
from collc.receipts.timing import per_device, zeros

from ..emulated import account, report

AXES = ("host", "gpu")

# What each of 4 hosts of 2 devices receives and sends, in parts of the buffer of a device.
CROSSING = {
    AXES: [7 / 4] * 4,
    "ring.all_reduce @ (host, gpu)": [7 / 4] * 4,
    "native.reduce_scatter @ gpu >> ring.all_reduce @ host >> native.all_gather @ gpu": [3 / 2] * 4,
    "native.reduce_scatter @ gpu >> native.all_reduce @ host >> native.all_gather @ gpu": [3 / 2]
    * 4,
    # Both devices of host 0 serve: each sends and receives half of the buffer, three times.
    "native.reduce_scatter @ gpu >> server.star @ host >> native.all_gather @ gpu": [3, 1, 1, 1],
}


@pytest.mark.parametrize("on", CROSSING, ids=str)
def test_the_account_of_a_link_is_what_its_devices_exchange_with_other_hosts(on):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), AXES)
    spread = jax.P(AXES)
    body = per_device("all_reduce", on if on == AXES else collc.parse(on))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spread, out_specs=spread, check_vma=False)
    traced = jax.jit(mapped).trace(zeros(mesh, 8 * 64))
    receipt = collc.receipt(traced)
    found = account.crossing(receipt, np.arange(8) // 2)
    expected = [64 * 4 * part for part in CROSSING[on]]
    assert found == {"received": expected, "sent": expected}


def answer(seconds, counted):
    account = {way: [1750.0, 1750.0] for way in ("received", "sent")}
    one = {"seconds": seconds, "received": [counted] * 3, "sent": [counted] * 3}
    names = ("psum", "psum again", "ring")
    job = {
        "times": dict.fromkeys(names, one),
        "account": dict.fromkeys(names, account),
        "unlike": [],
    }
    return dict.fromkeys((str(1 << 20), "step"), job)


@pytest.mark.parametrize(
    ("counted", "said"), [(1750, "met"), (1837, "met"), (1839, "MISSED"), (1660, "MISSED")]
)
def test_the_slowest_host_counts_and_so_does_every_byte(counted, said):
    found = {"1mbit": [answer([0.1, 0.2, 0.1], 1750), answer([0.1, 0.1, 0.3], counted)]}
    row = next(report.rows(found, {"1mbit": 1e6}))
    assert row.seconds.tolist() == [0.1, 0.2, 0.3] and row.ms == pytest.approx(200)
    assert row.wire_ms == pytest.approx(14 * 1514 / 1448)
    lines = report.report(found, {"1mbit": 1e6}, 3)
    promise = next(line for line in lines if line.startswith("| counted to account"))
    assert promise.endswith(f"| {said} |")
    assert all(len(line) <= 120 for line in lines if not line.startswith("|"))


def rows_of(**seconds):
    nothing = np.zeros((2, 1))
    return {
        name.replace("_", " "): report.Row("1gbit", "step", name, np.array(s), nothing, nothing, 1)
        for name, s in seconds.items()
    }


PSUM = [1.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "ring, again, said",
    [
        ([0.8, 0.8, 0.8, 0.9, 1.2], [1.0] * 5, "wins"),
        ([0.8, 0.8, 0.8, 1.0, 1.2], [1.0] * 5, "within noise"),  # its upper quartile is 1
        ([0.8, 0.8, 0.8, 0.9, 1.2], [0.8] * 5, "within noise"),
        ([0.8, 0.8, 0.8, 0.9, 1.2], [1.3] * 5, "within noise"),
        ([1.1] * 5, [0.7] * 5, "is psum"),
    ],
)
def test_who_wins_beats_psum_by_more_than_noise_and_in_most_turns(ring, again, said):
    assert report.says(rows_of(psum=PSUM, psum_again=again, ring=ring)) == said
