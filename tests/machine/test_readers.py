"""Topology files: exact numbers, routes by name, and what is assumed."""

import numpy as np
import pytest

from collc.errors import MachineError
from collc.machine import speeds
from collc.machine.text import machine

from .topologies import (
    FILES,
    GPUS,
    NAMES,
    PAIR,
    assumes,
    latency,
    out,
    rates,
    way,
    without,
    written,
)


@pytest.fixture(autouse=True)
def there(monkeypatch):
    """The files are named as a user beside them would."""
    monkeypatch.chdir(FILES)


def test_dgx_a100():
    made = machine("dgx-a100.xml:2")
    assert (made.devices, made.nodes, made.gpu, made.ports) == (16, 2, "a100", 7)
    assert rates(made) == {
        "pcie": [24_000_000_000],
        "socket": [16_000_000_000],  # AMD
        "nvlink": [240_000_000_000],  # six NVSwitches as one, 2 x 20 GB/s to each
        "net": [25_000_000_000, 37_500_000_000],  # two ports of one NIC together
    }
    assert way(made, 0, 7) == ["gpu0 -> nvswitch", "nvswitch -> gpu7"]
    assert out(made, 2) == [
        *("gpu2 -> pci 0000:42:00.0", "pci 0000:42:00.0 -> nic2", "nic2 -> network"),
    ]
    assert made.node.nic.tolist() == list(range(8))  # never the storage NIC, the ninth
    assert made.gamma == 3 / 2039e9


def test_dgx_h100():
    made = machine("dgx-h100.xml+h100:4")
    assert rates(made) == {
        "pcie": [48_000_000_000],
        "socket": [22_000_000_000],  # Sapphire Rapids
        "nvlink": [370_800_000_000],
        "net": [50_000_000_000],
    }
    assert latency(made, 0, 5) == 1.5
    assert made.assumed == (
        "dgx-h100.xml: the network is taken to be infiniband, 2 us from NIC to NIC; say net=",
    )
    whole = made.paths(np.array([0]), np.array([8])).latency[0]
    assert whole == pytest.approx(4.6e-6)


def test_pcie_8():
    made = machine("pcie-8.xml")
    assert (made.gpu, made.gamma, made.ports) == ("", 0.0, 1)
    assert rates(made) == {
        "pcie": [24_000_000_000],
        "socket": [16_000_000_000],
        "net": [12_500_000_000],
    }
    assert way(made, 0, 1) == ["gpu0 -> pci 0000:20:00.0", "pci 0000:20:00.0 -> gpu1"]
    assert way(made, 1, 6) == [
        *("gpu1 -> pci 0000:20:00.0", "pci 0000:20:00.0 -> cpu0", "cpu0 -> cpu1"),
        *("cpu1 -> pci 0000:c0:00.0", "pci 0000:c0:00.0 -> gpu6"),
    ]
    assert [latency(made, 0, b) for b in (1, 2, 4)] == [2.0, 2.6, 3.6]
    assert made.node.nic.tolist() == [0] * 4 + [1] * 4
    assert assumes(made, "the GPU model is not known: adding takes no time")


def test_a_cloud_with_a_model():
    made = machine("cloud.xml+h100:4")
    assert rates(made)["nvlink"] == [450_000_000_000]  # the model's, not NCCL's
    assert rates(made)["net"] == [50_000_000_000]  # four beside each GPU
    assert made.node.nics == 8 and made.gpu == "h100" and made.ports == 7
    assert assumes(
        made,
        "cloud.xml line 4 (and 39 more): link_width is 0 or not said; 16 is assumed",
        "cloud.xml line 4 (and 39 more): link_speed='' is unknown; 8 GT/s is assumed",
        "18 NVLinks of each h100 to an NVSwitch are assumed; the file has none",
        "NICs of 100 Gb/s are assumed",
        "4 NICs beside one GPU are counted as one",
        "taken to be roce",
    )
    faster = machine("cloud.xml+h100:4 net=200Gb/s,9us")
    assert rates(faster)["net"] == [100_000_000_000]
    assert faster.paths(np.array([0]), np.array([8])).latency[0] == pytest.approx(9e-6)
    assert not assumes(faster, "NICs of 100 Gb/s")


def test_gpus_without_nvlinks_have_those_of_their_model(tmp_path):
    """A cloud's file may have <gpu> and leave the NVLinks to the driver."""
    xml = without(tmp_path, "dgx-h100.xml", '<nvlink target="fffffff:ff:ff.0" count="18"', "<c2c")
    made = machine(f"{xml}+h100")
    assert rates(made)["nvlink"] == [450_000_000_000]
    assert assumes(made, "18 NVLinks of each h100 to an NVSwitch are assumed")
    alone = machine(xml)
    assert "nvlink" not in rates(alone) and assumes(alone, "no GPU has an nvlink; if they have")


def test_a_virtual_machine():
    made = machine("vm.xml:2")
    assert rates(made)["nvlink"] == [370_800_000_000]
    assert rates(made)["pcie"] == [12_000_000_000, 12_500_000_000]
    assert out(made, 3) == ["gpu3 -> cpu-1", "cpu-1 -> nic0", "nic0 -> network"]
    assert assumes(made, "the network is taken to be tcp, 27 us")


def test_a_matrix_with_nvlinks():
    made = machine("dgx-h100.txt+h100:2")
    assert rates(made) == {
        "pcie": [48_000_000_000],
        "nvlink": [450_000_000_000],
        "socket": [10_000_000_000],
        "net": [12_500_000_000],
    }
    assert way(made, 0, 7) == ["gpu0 -> nvswitch", "nvswitch -> gpu7"]
    assert made.node.nic.tolist() == list(range(8))
    assert out(made, 3) == ["gpu3 -> pci3", "pci3 -> nic3", "nic3 -> network"]
    bare = machine("dgx-h100.txt")
    assert rates(bare)["pcie"] == [12_000_000_000] and bare.gpu == ""
    assert assumes(bare, "PCIe 3.0 x16, 12 GB/s, is assumed", "25 GB/s a NVLink are assumed")
    assert assumes(bare, "10 GB/s between sockets", "the GPU model is not known")


def test_a_matrix_of_pcie():
    made = machine("pcie.txt+a100")
    assert [latency(made, 0, b) for b in range(1, 6)] == [2.0, 2.6, 2.6, 2.9, 4.2]
    assert way(made, 0, 1) == ["gpu0 -> pci0", "pci0 -> gpu1"]
    assert way(made, 0, 2) == ["gpu0 -> pci0", "pci0 -> pcis0", "pcis0 -> pci1", "pci1 -> gpu2"]
    assert way(made, 3, 4) == ["gpu3 -> bridge0", "bridge0 -> cpu0", "cpu0 -> gpu4"]
    assert way(made, 4, 5) == ["gpu4 -> cpu0", "cpu0 -> cpu1", "cpu1 -> bridge1", "bridge1 -> gpu5"]
    assert made.node.nic.tolist() == [0, 0, 0, 0, 0, 1]
    assert rates(made)["pcie"] == [24_000_000_000]
    assert assumes(made, "taken to be tcp", "taken to be infiniband")  # eno1, mlx5_0


def test_a_cloud_with_a_matrix():
    made = machine("cloud.xml+dgx-h100.txt")
    assert rates(made)["nvlink"] == [450_000_000_000]
    assert assumes(made, "of dgx-h100.txt only the GPUs and the NVLinks are taken")
    with_model = machine("h200+dgx-h100.txt+cloud.xml:2")
    assert with_model.text == "cloud.xml+dgx-h100.txt+h200:2"
    assert (with_model.gpu, with_model.gamma) == ("h100", 3 / 4800e9)


def test_nics_of_a_matrix_go_where_they_are_near(tmp_path):
    xml = without(tmp_path, "dgx-h100.xml", "nic>", "nothing>")
    made = machine(f"{xml}+dgx-h100.txt:2")
    assert out(made, 1) == [
        "gpu1 -> pci 0000:26:00.0",
        "pci 0000:26:00.0 -> nic1",
        "nic1 -> network",
    ]
    assert assumes(made, "only the NICs are taken", "is unknown; left out")


def test_nics_by_word(tmp_path):
    xml = without(tmp_path, "dgx-h100.xml", "nic>", "nothing>")
    made = machine(f"{xml}:2 nics=4 net=400Gb/s,5us")
    assert np.bincount(made.node.nic).tolist() == [2, 2, 2, 2]
    with pytest.raises(MachineError, match="has no NIC: net= has no effect"):
        machine(f"{xml}:2 net=400Gb/s")
    with pytest.raises(MachineError, match="no NIC leads out"):
        machine(f"{xml}:2")
    with pytest.raises(MachineError, match=r"topo\.xml: 8 GPUs and 3 NICs in a host: neither"):
        machine(f"{xml} nics=3")
    with pytest.raises(MachineError, match=r"dgx-h100.xml has 8 NICs already: nics= has no effect"):
        machine("dgx-h100.xml nics=8")


@pytest.mark.parametrize("order", ["cloud.xml+h100", "h100+cloud.xml"])
def test_the_order_of_parts_does_not_matter(order):
    made, again = machine(order), machine("cloud.xml+h100")
    assert made.text == again.text == "cloud.xml+h100"
    assert made.node.links == again.node.links and made.assumed == again.assumed


@pytest.mark.parametrize("name", NAMES)
def test_read_back(name):
    made = machine(f"{name}+h100:2" if name == "cloud.xml" else f"{name}:2")
    again = machine(made.text)
    assert again.text == made.text and again.assumed == made.assumed
    assert again.node.links == made.node.links
    assert np.array_equal(again.node.latency, made.node.latency)


def test_a_name_with_blanks(tmp_path):
    path = tmp_path / "my topo.xml"
    path.write_bytes((FILES / "vm.xml").read_bytes())
    made = machine(f"'{path}:2'")
    assert made.nodes == 2 and machine(made.text).text == made.text


def test_nvlinks_between_two_gpus(tmp_path):
    made = machine(written(tmp_path, PAIR))
    assert way(made, 0, 1) == ["gpu0 -> gpu1"] and made.ports == 1
    assert rates(made)["nvlink"] == [80_000_000_000]
    assert latency(made, 0, 1) == 1.2


def test_several_hosts_of_one_domain(tmp_path):
    """An NVLink domain of two hosts, dumped as one: the same busids and devs in each."""
    cpu = '<cpu numaid="0" host_hash="{}" arch="arm64">'
    hidden = '<nvlink target="fffffff:ff:ff.0" count="18" tclass="0x068000"/>'
    nic = '<nic><net name="mlx5_0" dev="0" speed="400000"/></nic>'
    gpus = GPUS.format(hidden, hidden).replace('sm="80"', 'sm="100"')
    text = "".join(cpu.format(h) + gpus + nic + "</cpu>" for h in ("0xa", "0xb"))
    path = written(tmp_path, f"<system>{text}</system>")
    made = machine(f"{path}:4")
    assert (made.nodes, made.node.hosts, made.node.devices, made.gpu) == (2, 2, 4, "b200")
    assert way(made, 1, 2) == ["host0/gpu1 -> nvswitch", "nvswitch -> host1/gpu0"]
    assert rates(made)["nvlink"] == [721_800_000_000]
    assert made.node.nic.tolist() == [0, 0, 1, 1]
    with pytest.raises(MachineError, match="3 hosts are no whole number of nodes; a node has 2"):
        machine(f"{path}:3")


def test_a_socket_s_nic_is_near_to_both_cpus(tmp_path):
    nic = '<nic><net name="eth0" dev="0" speed="10000"/></nic></cpu>'
    text = PAIR.replace("</cpu>", nic + '<cpu numaid="1" arch="x86_64">' + nic)
    made = machine(written(tmp_path, text))
    assert made.node.nics == 1
    assert assumes(made, "line 1: the kind of CPU is unknown; 10 GB/s between sockets")


def test_more_that_is_assumed(tmp_path):
    text = PAIR.replace(' sm="80"', "").replace("<gpu", "<c2c/><what/><gpu", 1)
    text = text.replace("</cpu>", '<nic><net name="eth0" dev="0" speed="-1"/></nic></cpu>')
    text = text.replace('dev="1"', 'dev="3"')
    made = machine(written(tmp_path, text))
    assert assumes(
        made,
        "<what> in <pci> is unknown; left out",
        "sm is not said; 20 GB/s a NVLink are assumed",
        "the driver knows no speed; 10 Gb/s are assumed",
        "there is no gpu dev 1, 2",
    )
    assert not assumes(made, "c2c")
    assert rates(made)["net"] == [1_250_000_000]


def test_a_latency_that_is_said(tmp_path):
    nic = '<nic><net name="mlx5_0" dev="0" speed="10000" latency="7.5"/></nic></cpu>'
    made = machine(written(tmp_path, PAIR.replace("</cpu>", nic)) + ":2")
    assert made.paths(np.array([0]), np.array([2])).latency[0] == pytest.approx(10.1e-6)
    assert not assumes(made, "the network is taken to be")


def test_places_beside_gpus_are_left_out(tmp_path):
    place = '<pci busid="0:9:0.0" class="{}" link_speed="" link_width=""/>'
    nic = '<nic><net name="a" dev="0" speed="1000"/></nic></cpu>'
    text = PAIR.replace("</cpu>", place.format("0x030200") + nic)
    assert assumes(machine(written(tmp_path, text)), "of class 0x030200 without <gpu>; left out")
    text = PAIR.replace("</cpu>", place.format("0x020000") + nic)
    assert assumes(machine(written(tmp_path, text)), "of class 0x020000 without <nic>; left out")
    text = PAIR.replace("</cpu>", place.format("0x010802") + nic)  # a disk
    assert not assumes(machine(written(tmp_path, text)), "left out")


def test_a_mesh_of_nvlinks_in_a_matrix(tmp_path):
    rows = ["GPU0 X NV4 NV4 NV4", "GPU1 NV4 X NV4 NV4", "GPU2 NV4 NV4 X NV4", "GPU3 NV4 NV4 NV4 X"]
    header = "  GPU0  GPU1  GPU2  GPU3\n"
    made = machine(written(tmp_path, header + "\n".join(rows), "topo.txt"))
    assert way(made, 0, 3) == ["gpu0 -> gpu3"] and made.ports == 1
    assert rates(made)["nvlink"] == [100_000_000_000]
    switched = "\n".join(rows).replace("NV4", "NV12")
    made = machine(written(tmp_path, header + switched, "topo.txt") + "+b200")
    assert way(made, 0, 3) == ["gpu0 -> nvswitch", "nvswitch -> gpu3"] and made.ports == 3
    assert rates(made)["nvlink"] == [600_000_000_000]


def test_a_matrix_that_contradicts_itself(tmp_path):
    text = "\tGPU0\tGPU1\tGPU2\nGPU0\tX\tPIX\tSYS\nGPU1\tPIX\tX\tPIX\nGPU2\tSYS\tPIX\tX\n"
    made = machine(written(tmp_path, text, "topo.txt"))
    says = "topo.txt line 4: GPU2 to GPU0 is SYS, but by way of a third device it is PIX"
    assert assumes(made, says)


def test_speeds_are_nccl_s():
    lanes = {2.5: 15, 5.0: 30, 8.0: 60, 16.0: 120, 32.0: 240, 64.0: 480}
    for gts, lane in lanes.items():
        assert speeds.pcie(gts, 16) == 16 * lane / 80 * 1e9
    assert speeds.pcie(10.0, 4) == speeds.pcie(None, 4) == 3e9
    rates = {60: 18, 70: 20, 75: 20, 80: 20, 86: 12, 89: 20, 90: 20.6, 100: 40.1, 120: 40.1}
    assert {sm: speeds.nvlink(sm) / 1e9 for sm in rates} == rates
    assert speeds.nvlink(None) == speeds.nvlink(52) == 20e9
    between = speeds.between_sockets
    assert between("x86_64", "AuthenticAMD", 175, 1) == 16e9
    assert [between("x86_64", "GenuineIntel", 6, m) for m in (79, 85, 143)] == [6e9, 10e9, 22e9]
    assert between("arm64", "", 0, 0) == 6e9 and between("x86_64", "Other", 1, 1) is None
