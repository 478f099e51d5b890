"""Machines by numbers: links, routes, contention-free ways, names."""

import networkx as nx
import numpy as np
import pytest

from collc.errors import MachineError
from collc.machine.graph import OUTSIDE, node, wire
from collc.machine.placement import advice, placed
from collc.machine.text import machine
from collc.machine.topology import Link, Machine, Network
from collc.machine.uniform import two_level, uniform


def names(machine: Machine, src: int, dst: int) -> list[str]:
    links = machine.paths(np.array([src]), np.array([dst])).links[0]
    return [machine.name(k) for k in links.tolist() if k >= 0]


def test_ways_within_a_node_and_between():
    machine = two_level(
        4, 4, (1, 2), (10, 20), 2, network=Network(latency=5, rack=2, uplink=7, hop=3)
    )
    assert names(machine, 0, 1) == ["node0/gpu0 -> switch", "node0/switch -> gpu1"]
    assert names(machine, 1, 6) == [
        "node0/gpu1 -> nic0", "node0/nic0 -> network", "node1/network -> nic1", "node1/nic1 -> gpu2",
    ]  # fmt: skip
    assert names(machine, 0, 8)[1:5] == [
        "node0/nic0 -> network", "rack0 up", "rack1 down", "node2/network -> nic0",
    ]  # fmt: skip
    late = machine.paths(np.array([0, 1, 0, 0]), np.array([1, 6, 8, 15])).latency
    assert late.tolist() == [1, 15, 18, 18]
    assert machine.kinds == ("link", "board", "net", "uplink")
    assert machine.racks == 2 and machine.rack_of(np.array([7, 8])).tolist() == [0, 1]


def test_unlike_nics_are_farther_where_there_are_rails():
    machine = two_level(2, 4, (1, 2), (10, 20), network=Network(rails=True, across=4))
    late = machine.paths(np.array([0, 0]), np.array([4, 5])).latency
    assert late.tolist() == [10, 14]


def test_the_quickest_way_then_the_shortest_and_never_through_another_gpu():
    graph: nx.DiGraph = nx.DiGraph()
    for i in range(3):
        graph.add_node(f"gpu{i}", kind="gpu", index=i)
        wire(graph, f"gpu{i}", "pci", "pcie", 10.0, 5.0)
    graph.add_node("pci", kind="switch")
    wire(graph, "gpu0", "gpu1", "nvlink", 100.0, 1.0)
    wire(graph, "gpu1", "gpu2", "nvlink", 100.0, 1.0)
    made = Machine("t", node(graph, "t"), 1, Network())
    assert names(made, 0, 1) == ["node0/gpu0 -> gpu1"]
    assert names(made, 0, 2) == ["node0/gpu0 -> pci", "node0/pci -> gpu2"]


def test_a_device_takes_the_nearest_nic_and_equally_near_ones_in_turn():
    graph: nx.DiGraph = nx.DiGraph()
    for i in range(4):
        graph.add_node(f"gpu{i}", kind="gpu", index=i)
        graph.add_node(f"nic{i}", kind="nic", index=i)
        wire(graph, f"nic{i}", OUTSIDE, "net", 1.0, 1.0)
        wire(graph, f"gpu{i}", f"pci{i // 2}", "pcie", 10.0, 1.0)
        wire(graph, f"nic{i}", f"pci{i // 2}", "pcie", 10.0, 1.0)
    wire(graph, "pci0", "pci1", "socket", 5.0, 3.0)
    assert node(graph, "t").nic.tolist() == [0, 1, 2, 3]


def test_what_cannot_be():
    lonely: nx.DiGraph = nx.DiGraph()
    with pytest.raises(MachineError, match="no GPU"):
        node(lonely, "t")
    for i in range(2):
        lonely.add_node(f"gpu{i}", kind="gpu", index=i)
    with pytest.raises(MachineError, match="no link leads from gpu0 to gpu1"):
        node(lonely, "t")
    with pytest.raises(MachineError, match="not positive"):
        Link("a", "pcie", 0.0)
    with pytest.raises(MachineError, match="uplinks"):
        Network(rack=2)
    alone = uniform(4, 1, 1)
    with pytest.raises(MachineError, match="no NIC leads out"):
        Machine("t", alone.node, 2, Network())
    with pytest.raises(MachineError, match="cannot be in racks of 2"):
        two_level(3, 2, (1, 1), (1, 1), network=Network(rack=2, uplink=1.0))


def test_a_mesh_on_too_small_a_machine_and_wrong_orders():
    machine = two_level(2, 2, (1, 1), (1, 1))
    with pytest.raises(MachineError, match=r"has 4 devices, but the mesh \(gpu=8\) has 8 ranks"):
        placed(machine, {"gpu": 8})
    with pytest.raises(MachineError, match="has to name 4 different ones"):
        placed(machine, {"gpu": 4}, [0, 1, 2, 2])
    with pytest.raises(MachineError, match="has no device 4"):
        placed(machine, {"gpu": 4}, [0, 1, 2, 4])


def test_axes_and_their_classes_of_link():
    machine = two_level(4, 4, (1, 1), (1, 1), network=Network(rack=2, uplink=1.0))
    place = placed(machine, {"rack": 2, "host": 2, "gpu": 4, "one": 1})
    assert place.classes == {"rack": "uplink", "host": "net", "gpu": "link", "one": "none"}


def test_a_mesh_that_crosses_hosts_needlessly_is_pointed_out():
    machine = two_level(4, 8, (1, 1), (1, 1))
    assert advice(placed(machine, {"host": 4, "gpu": 8})) is None
    swapped = advice(placed(machine, {"gpu": 8, "host": 4}))
    assert swapped is not None
    assert (swapped.before, swapped.after) == ({"gpu": 16, "host": 0}, {"gpu": 0, "host": 32})
    assert swapped.axes == ("host", "gpu")
    better = placed(machine, {"gpu": 8, "host": 4}, swapped.devices)
    assert better.classes == {"gpu": "link", "host": "net"}
    assert advice(better) is None
    shuffled = advice(
        placed(machine, {"host": 4, "gpu": 8}, np.arange(32).reshape(8, 4).T.reshape(-1))
    )
    assert shuffled is not None and shuffled.devices == tuple(range(32))
    assert "crosses hosts needlessly" in str(shuffled)


def test_sockets_that_a_mesh_crosses_needlessly_are_pointed_out():
    box = machine("pcie-8")
    assert advice(placed(box, {"gpu": 8})) is None
    bad = advice(placed(box, {"gpu": 8}, [0, 4, 1, 5, 2, 6, 3, 7]))
    assert bad is not None and (bad.before, bad.after) == ({"gpu": 8}, {"gpu": 2})
    assert "crosses sockets needlessly" in str(bad)


@pytest.mark.parametrize(
    "name", ["pcie-8:4", "dgx-h100:2", "dgx-h100:4", "pcie-8", "gb200-nvl72:36"]
)
def test_the_best_order_has_no_better_one_and_the_natural_one_is_not_worse(name):
    on = machine(name)
    g, nodes = on.node.devices, on.nodes
    meshes = [{"host": nodes, "gpu": g}, {"gpu": g, "host": nodes}, {"a": nodes * g // 2, "b": 2}]
    rng = np.random.default_rng(0)
    robin = np.arange(nodes * g).reshape(nodes, g).T.reshape(-1)  # the commonest mistake
    for sizes in meshes:
        orders = [None, robin, rng.permutation(nodes * g), rng.permutation(nodes * g)]
        for order in orders:
            found = advice(placed(on, sizes, order))
            if found is not None:
                assert advice(placed(on, sizes, found.devices)) is None
    assert advice(placed(on, {"host": nodes, "gpu": g})) is None
    if nodes > 1:
        fixed = advice(placed(on, {"host": nodes, "gpu": g}, robin))
        assert fixed is not None and fixed.devices == tuple(range(nodes * g))
