"""The report on emulated hosts accounts for every link, and says what was measured."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import collc
from collc.receipts.timing import per_device, zeros

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
AXES = ("host", "gpu")


@pytest.fixture
def hosts(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in [n for n in sys.modules if n == "common" or n.split(".")[0] == "hosts"]:
        monkeypatch.delitem(sys.modules, name)
    import hosts.account
    import hosts.report

    return hosts


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
def test_the_account_of_a_link_is_what_its_devices_exchange_with_other_hosts(hosts, on):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), AXES)
    spread = jax.P(AXES)
    body = per_device("all_reduce", on if on == AXES else collc.parse(on))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spread, out_specs=spread, check_vma=False)
    traced = jax.jit(mapped).trace(zeros(mesh, 8 * 64))
    receipt = collc.receipt(traced)
    found = hosts.account.crossing(receipt, np.arange(8) // 2)
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
def test_the_slowest_host_counts_and_so_does_every_byte(hosts, counted, said):
    found = {"1mbit": [answer([0.1, 0.2, 0.1], 1750), answer([0.1, 0.1, 0.3], counted)]}
    row = next(hosts.report.rows(found, {"1mbit": 1e6}))
    assert row.seconds.tolist() == [0.1, 0.2, 0.3] and row.ms == pytest.approx(200)
    assert row.wire_ms == pytest.approx(14 * 1514 / 1448)
    lines = hosts.report.report(found, {"1mbit": 1e6}, 3)
    promise = next(line for line in lines if line.startswith("| counted to account"))
    assert promise.endswith(f"| {said} |")
    assert all(len(line) <= 120 for line in lines if not line.startswith("|"))
