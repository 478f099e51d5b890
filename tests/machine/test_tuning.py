"""The constants of NCCL and XLA, and how far the model is from what people posted."""

import numpy as np
import pytest

from collc.errors import MachineError
from collc.machine import nccl
from collc.machine.topology import Network
from collc.machine.tuning import data, of_version
from collc.machine.uniform import uniform

from .pods import GB, US, a100, b200, flat, pod


class TestConstants:
    def test_a_round(self):
        own = nccl.constants(pod("h100", 2))
        assert own.round(1.5 * US, far=False) == pytest.approx((8.4 + 2 + 3.4) * US)
        assert own.round(4.5 * US, far=True) == pytest.approx((8.4 + 2 + 14) * US)
        assert own.round(30 * US, far=True) == pytest.approx((8.4 + 2 + 30) * US)
        assert nccl.constants(uniform(4, 9 * US, 1e-9)).round(9 * US, far=False) == pytest.approx(
            19.4 * US
        )

    @pytest.mark.parametrize(
        "gpu, link, reached",
        [("h100", 450, 0.8), ("h200", 400, 0.9), ("h100", 300, 1), ("", 300, 0.8)],
    )
    def test_what_is_reached_of_a_link(self, gpu, link, reached):
        machine = pod(gpu, 2, link * GB, network=Network(rack=1, uplink=1e-11))
        own = nccl.constants(machine)
        assert own.reached["link"] == pytest.approx(reached)
        assert own.reached["net"] == own.reached["uplink"] == 0.92
        each = own.efficiency(machine)
        assert each.shape == machine.beta.shape and each[-1] == 0.92

    def test_all_models_are_complete(self):
        gpus = of_version(nccl.VERSION)["gpu"]
        assert set(gpus) == {"a100", "h100", "b200", "gb200"}
        assert {frozenset(set(gpu) - {"nvls"}) for gpu in gpus.values()} == {
            frozenset(("channels", "rate", "ll", "ring_ll128", "tree_ll128", "tree"))
        }
        assert {log["gpu"] for log in data()["log"]} == {*gpus, ""}
        assert all(log["source"] for log in data()["log"])

    def test_how_sure(self):
        machine = pod("h200", 4)
        assert (nccl.error(machine, 8), nccl.error(machine, 9)) == (0.35, 0.12)
        assert nccl.calibrated(machine) == 128
        assert nccl.calibrated(uniform(4, US, 1e-9)) == 16


NVL72 = pod("gb200", 1, 900 * GB, devices=72)


# Microseconds of all_reduce_perf, out of place, as people posted them.
LOGS = [
    # coreweave/nccl-tests, README: 64 H100, 8 NICs of 400 Gb/s; one GB200 NVL72.
    (pod("h100", 8), 2**29, 2984.6),
    (pod("h100", 8), 2**30, 5808.0),
    (pod("h100", 8), 2**31, 11163),
    (pod("h100", 8), 2**33, 43980),
    (NVL72, 2**29, 1806.7),
    (NVL72, 2**31, 5589.1),
    (NVL72, 2**33, 20299),
    # coreweave/nccl-tests #92: two nodes, 8 GiB: bus bandwidths of 440.58 and 690.07 GB/s.
    (pod("h100", 2), 2**33, 2**33 * 15 / 8 / 440.58e3),
    (b200(2), 2**33, 2**33 * 15 / 8 / 690.07e3),
    (a100(1), 2**30, 8142.6),  # NVIDIA/nccl #527: a p4d
    (a100(3, nics=4), 133169160, 2666.0),  # NVIDIA/nccl-tests #119: 4 NICs of 200 Gb/s
    (a100(32, nics=4), 8, 62.99),  # NVIDIA/nccl #652
    (pod("h100", 16), 8, 72.01),  # NVIDIA/nccl #1469
    (pod("h100", 16), 64, 62.39),
]


def off(machine, size, posted):
    """How far we are from a posted time, relative."""
    return nccl.native(machine, flat(machine), "all_reduce", size).seconds / (posted * US) - 1


@pytest.mark.parametrize("machine, size, posted", LOGS)
def test_posted_logs(machine, size, posted):
    assert abs(off(machine, size, posted)) < 2 * nccl.error(machine, machine.devices)


@pytest.mark.parametrize("single", [True, False])
def test_the_median_of_them_is_within_the_error(single):
    own = [log for log in LOGS if (log[0].nodes == 1) == single]
    assert np.median([abs(off(*log)) for log in own]) < nccl.error(own[0][0], own[0][0].devices)


def test_versions_are_known_or_refused():
    with pytest.raises(MachineError, match=r"2\.31.*2\.30"):
        nccl.native(pod("h100", 1), np.array([[0, 1]]), "all_reduce", 1, version="2.31")
