"""NCCL's model: the closed formulas, what it chooses, who shares what."""

from dataclasses import replace
from itertools import pairwise

import networkx as nx
import numpy as np
import pytest

from collc.errors import MachineError
from collc.machine import nccl, rings
from collc.machine.graph import OUTSIDE, node, wire
from collc.machine.text import machine as read
from collc.machine.topology import Machine, Network
from collc.machine.uniform import two_level, uniform

from .pods import GB, MIB, US, a100, b200, flat, pod


def found(machine, algorithm, protocol="Simple", size=512 * MIB, collective="all_reduce"):
    all = nccl.candidates(machine, flat(machine), collective, size)
    return next(c for c in all if (c.algorithm, c.protocol) == (algorithm, protocol))


# FORMULAS of NCCL 2.30: base, hop on NVLink, hop on the network; LL, LL128, Simple.
RING = {"LL": (6.6, 0.6, 2.7), "LL128": (14, 1.9, 4), "Simple": (8.4, 3.4, 14)}
TREE = {"LL": (6.8, 0.6, 5), "LL128": (14, 1.25, 8.5), "Simple": (8.4, 4, 14)}


@pytest.mark.parametrize("nodes", [1, 2, 8, 64])
@pytest.mark.parametrize("protocol", RING)
class TestClosedFormulas:
    def test_ring(self, nodes, protocol):
        n, x = 8 * nodes, 2 * (nodes - 1)
        base, intra, inter = RING[protocol]
        ring = found(pod("h100", nodes, late=2 * US), "ring", protocol)
        assert ring.latency == pytest.approx((base + (2 * (n - 1) - x) * intra + x * inter) * US)
        if protocol == "Simple":
            assert ring.bandwidth == pytest.approx(512 * MIB / (360 * GB * n / (2 * (n - 1))))

    def test_tree(self, nodes, protocol):
        base, intra, inter = TREE[protocol]
        tree = found(pod("h100", nodes), "tree", protocol)
        lg = nodes.bit_length() - 1
        assert tree.latency == pytest.approx((base + 2 * (7 * intra + lg * inter)) * US)
        if protocol == "Simple":
            assert tree.bandwidth == pytest.approx(512 * MIB / (0.46 * 360 * GB))

    def test_half_an_all_reduce(self, nodes, protocol):
        n, x = 8 * nodes, nodes - 1
        base, intra, inter = RING[protocol]
        for collective in ("all_gather", "reduce_scatter"):
            ring = found(pod("h100", nodes, late=2 * US), "ring", protocol, collective=collective)
            assert ring.latency == pytest.approx((base + (n - 1 - x) * intra + x * inter) * US)
            if protocol == "Simple":
                assert ring.bandwidth == pytest.approx(512 * MIB * (n - 1) / n / (360 * GB))


def test_protocols_cost_bandwidth():
    one = pod("h100", 1)
    rates = {p: 512 * MIB * 1.75 / found(one, "ring", p).bandwidth / GB for p in RING}
    assert rates == pytest.approx({"LL": 141, "LL128": 360 * 0.92, "Simple": 360})


def test_a_tree_reaches_less_at_some_sizes():
    whole = 1 / (0.46 * 360 * GB)
    tree = {size: found(pod("h100", 2), "tree", size=size * MIB) for size in (1, 64, 96, 128, 512)}
    parts = {size: size * MIB * whole / c.bandwidth for size, c in tree.items()}
    assert (parts[1], parts[64], parts[128], parts[512]) == pytest.approx((0.5, 0.8, 0.9, 1))
    assert 0.8 < parts[96] < 0.9


def test_switches_add_in_a_node():
    nvls = found(pod("h100", 1), "nvls")
    assert nvls.latency == pytest.approx(25 * US) and nvls.in_network
    # 8 channels of 40 GB/s, of which one is for control, 0.85 of them; both ways at once.
    assert 512 * MIB / nvls.bandwidth == pytest.approx(7 * 40 * GB * 0.85 * 8 / 7)
    assert "nvls" not in {
        c.algorithm for c in nccl.candidates(a100(1), flat(a100(1)), "reduce", 2**30)
    }


def test_nobody_is_quicker_than_the_machine_s_links():
    slow = pod("h100", 1, link=180 * GB)
    assert found(slow, "ring").bandwidth == pytest.approx(
        2 * found(pod("h100", 1), "ring").bandwidth
    )
    assert found(slow, "nvls").bandwidth == pytest.approx(
        2 * found(pod("h100", 1), "nvls").bandwidth
    )


@pytest.mark.parametrize(
    "machine, size, chosen",
    [
        (pod("h100", 1), 4096, "one-shot "),
        (pod("h100", 1), 256 * 1024, "one-shot "),
        (pod("h100", 1), 4 * MIB, "two-shot "),
        (pod("h100", 1), 256 * MIB, "nvls Simple"),
        (a100(1), 16 * MIB, "ring LL128"),
        (a100(1), 256 * MIB, "ring Simple"),
        (a100(32), 4096, "tree LL"),
        (a100(32), MIB, "tree LL128"),
        (a100(2), 2**30, "ring Simple"),
        (pod("h100", 64), 4096, "tree LL"),
        (pod("h100", 64), 256 * MIB, "nvls-tree Simple"),
        (uniform(8, 2 * US, 1 / GB), 8, "ring LL"),
        (uniform(8, 2 * US, 1 / GB), 256 * MIB, "ring Simple"),
    ],
)
def test_what_is_chosen(machine, size, chosen):
    best = nccl.native(machine, flat(machine), "all_reduce", size)
    assert f"{best.algorithm} {best.protocol}" == chosen
    assert best.in_network == ("nvls" in chosen)


def test_xla_s_kernels_are_for_eight_ranks_of_one_host():
    rack = pod("gb200", 1, 900 * GB, devices=16)
    rack = replace(rack, node=replace(rack.node, hosts=4))
    algorithms = [
        nccl.native(rack, np.arange(16).reshape(-1, n), "all_reduce", 4096).algorithm
        for n in (4, 8, 16)
    ]
    assert algorithms[0] == "one-shot" and "one-shot" not in algorithms[1:]
    assert nccl.native(rack, flat(rack), "all_gather", 4096).algorithm == "ring"


SIZES = sorted({2**k + d for k in range(31) for d in (0, 1)})


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "all_to_all"])
@pytest.mark.parametrize("n", [2, 4, 8, 16, 128])
@pytest.mark.parametrize(
    "model", [a100, b200, lambda nodes: pod("h100", nodes), lambda nodes: pod("", nodes)]
)
def test_more_bytes_never_take_less(model, n, collective):
    machine = model(max(1, n // 8))
    groups = np.arange(machine.devices).reshape(-1, n)
    times = [
        nccl.native(machine, groups, collective, size).seconds
        for size in SIZES[:: 1 if n < 99 else 6]
    ]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(times))


class TestSharing:
    def test_groups_share_the_nics_of_a_node(self):
        machine = pod("h100", 8)
        by_host = flat(machine).reshape(8, 8).T
        one = nccl.native(machine, by_host[:1], "all_reduce", 2**30)
        assert nccl.native(machine, by_host, "all_reduce", 2**30) == one
        assert one.algorithm == "ring"
        assert one.bandwidth == pytest.approx(2**30 * 7 / 4 / (0.92 * 50 * GB))
        fewer = pod("h100", 8, nics=2)
        shared = nccl.native(fewer, by_host, "all_reduce", 2**30)
        assert shared.bandwidth == pytest.approx(4 * one.bandwidth)
        assert nccl.native(fewer, by_host[:1], "all_reduce", 2**30) == one

    def test_a_flat_group_has_them_all(self):
        machine = pod("h100", 8, nic=25 * GB)
        ring = found(machine, "ring")
        assert ring.bandwidth == pytest.approx(512 * MIB * 2 * 63 / 64 / (8 * 25 * GB * 0.92))

    def test_uplinks_are_shared_and_the_order_of_nodes_counts(self):
        racks = Network(rack=4, uplink=1 / (100 * GB), hop=2 * US)
        machine = pod("h100", 8, network=racks)
        ring = found(machine, "ring")
        assert ring.bandwidth == pytest.approx(512 * MIB * 2 * 63 / 64 / (100 * GB * 0.92))
        zigzag = np.arange(64).reshape(2, 4, 8).transpose(1, 0, 2).reshape(1, -1)
        worse = nccl.candidates(machine, zigzag, "all_reduce", 512 * MIB)
        assert worse[2].bandwidth == pytest.approx(4 * ring.bandwidth)


def test_a_generic_machine_by_hand():
    machine = two_level(2, 4, (2 * US, 1 / (25 * GB)), (20 * US, 1 / (12.5 * GB)), nics=1)
    ring = found(machine, "ring", size=MIB)
    # 14 hops, two of them between nodes; 0.8 of the links allow 20 GB/s, 0.92 of the NIC 11.5.
    assert ring.latency == pytest.approx((8.4 + 12 * 3.4 + 2 * 20) * US)
    assert ring.bandwidth == pytest.approx(MIB * 14 / 8 / (11.5 * GB))
    assert found(machine, "ring", "LL", size=MIB).latency == pytest.approx(
        (6.6 + 12 * 2 + 2 * 20) * US
    )
    tree = found(machine, "tree", size=MIB)
    assert tree.latency == pytest.approx((8.4 + 2 * (3 * 4 + 20)) * US)
    assert tree.bandwidth == pytest.approx(MIB / (0.46 * 11.5 * GB * 0.5))


def pcie_box(nodes):
    graph = nx.DiGraph()
    graph.add_node("switch", kind="switch")
    graph.add_node("nic0", kind="nic", index=0)
    for i in range(4):
        graph.add_node(f"gpu{i}", kind="gpu", index=i)
        wire(graph, f"gpu{i}", "switch", "pcie", 24 * GB, US)
    wire(graph, "nic0", "switch", "pcie", 24 * GB, US)
    wire(graph, "nic0", OUTSIDE, "net", 50 * GB, 5 * US)
    return Machine("pcie", node(graph, "pcie"), nodes, Network(), gpu="h100")


def test_a_ring_leaves_a_node_by_its_last_device():
    machine = pcie_box(2)
    names = {
        (c.algorithm, c.protocol)
        for c in nccl.candidates(machine, flat(machine), "all_reduce", MIB)
    }
    assert names == {(a, p) for a in ("ring", "tree") for p in ("LL", "Simple")}
    ring = found(machine, "ring", size=MIB)
    assert ring.bandwidth == pytest.approx(MIB * 14 / 8 / (24 * GB))
    assert ring.latency == pytest.approx((8.4 + 12 * 5.7 + 2 * 14) * US)
    assert nccl.constants(machine).gpu == ""


def test_rings_of_several_hosts_use_both_ways_between_sockets():
    """Two sockets with a NIC each: the ring of one host crosses once each way, two rings share them."""
    graph = nx.DiGraph()
    for s in range(2):
        graph.add_node(f"cpu{s}", kind="cpu")
        graph.add_node(f"nic{s}", kind="nic", index=s)
        wire(graph, f"nic{s}", f"cpu{s}", "pcie", 24 * GB, US)
        wire(graph, f"nic{s}", OUTSIDE, "net", 50 * GB, 5 * US)
        for i in range(2):
            graph.add_node(f"gpu{2 * s + i}", kind="gpu", index=2 * s + i)
            wire(graph, f"gpu{2 * s + i}", f"cpu{s}", "pcie", 24 * GB, US)
    wire(graph, "cpu0", "cpu1", "socket", 8 * GB, 2 * US)
    for nodes in (1, 2, 4):
        machine = Machine("sockets", node(graph, "sockets"), nodes, Network())
        n = 4 * nodes
        ring = found(machine, "ring", size=MIB)
        rate = 8 * GB if nodes == 1 else 16 * GB
        assert ring.bandwidth == pytest.approx(MIB * 2 * (n - 1) / n / rate)


@pytest.mark.parametrize("words", ["link=12GB/s", "link=16GB/s net=400Gb/s", "net=400Gb/s", ""])
def test_more_nics_are_hardly_ever_slower(words):
    """Rings go over all of them, which costs up to a quarter where switches are the bottleneck."""
    found = []
    for nics in (1, 2, 4, 8):
        own = read(f"pcie-8:2 {words} nics={nics}")
        found.append(nccl.native(own, flat(own), "all_reduce", 256 * MIB).seconds)
    assert all(b <= 1.25 * a for a, b in pairwise(found))
    assert min(found[1:]) <= found[0]


def test_the_order_of_ranks_within_a_node_is_nccls_own_business():
    machine = pod("h100", 2)
    shuffled = flat(machine).reshape(2, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].reshape(1, 16)
    assert nccl.native(machine, shuffled, "all_reduce", MIB) == nccl.native(
        machine, flat(machine), "all_reduce", MIB
    )


def test_direct_messages_are_those_of_all_pairs():
    rng = np.random.default_rng(0)
    machine = pod("h100", 8, nics=4, network=Network(rack=2, uplink=1e-11))
    for groups in (
        flat(machine),
        rng.permutation(64).reshape(4, 16),
        rng.permutation(64)[:15].reshape(3, 5),
    ):
        pairs = [(a, b) for row in groups.tolist() for a in row for b in row if a != b]
        paths = machine.paths(*np.array(pairs).T)
        load, posted = rings.direct(rings.cells(machine, groups))
        np.testing.assert_array_equal(load, machine.crossed(paths, np.ones(len(pairs))))
        far = [a for a, b in pairs if machine.node_of(a) != machine.node_of(b)]
        assert posted == max(far.count(a) for a in groups.reshape(-1))


def test_all_to_all_is_as_quick_as_its_busiest_link():
    machine = pod("h100", 8)
    own = nccl.native(machine, flat(machine), "all_to_all", 64 * MIB)
    assert (own.algorithm, own.protocol) == ("p2p", "Simple")
    assert own.bandwidth == pytest.approx(64 * MIB * 56 / 64 / (50 * GB * 0.92))
    assert own.latency == pytest.approx((8.4 + 14 + 56) * US)


def test_what_is_lowered_is_priced():
    machine = pod("h100", 2)

    def price(name):
        return nccl.native(machine, flat(machine), name, MIB)

    assert price("reduce") == price("broadcast") == price("all_reduce")
    assert price("scatter") == price("reduce_scatter") and price("gather") == price("all_gather")
    assert nccl.native(machine, flat(machine).T, "all_reduce", MIB).seconds == 0


@pytest.mark.parametrize(
    "groups, collective, size, said",
    [
        ([[0, 1]], "allreduce", 1, "Did you mean all_reduce"),
        ([[0, 1]], "all_reduce", 0, "0 bytes"),
        ([[0, 1]], "all_reduce", float("nan"), "nan bytes"),
        ([0, 1], "all_reduce", 1, r"\[groups, n\]"),
        ([[0, 8]], "all_reduce", 1, "device 8, but .* 0 to 7"),
        ([[-1, 0]], "all_reduce", 1, "device -1"),
        ([[0, 1], [1, 2]], "all_reduce", 1, "two groups"),
    ],
)
def test_what_has_no_price(groups, collective, size, said):
    with pytest.raises(MachineError, match=said):
        nccl.native(pod("h100", 1), np.array(groups), collective, size)
