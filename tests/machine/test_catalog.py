"""Named machines and GPU models: their numbers, and files that are wrong."""

import numpy as np
import pytest

from collc.errors import MachineError
from collc.machine import catalog
from collc.machine.catalog import CATALOGUE, by_sm, catalogue, find, model, models
from collc.machine.text import machine

# Bytes a second: of a GPU's link, of a GPU's way to the network; GPUs and hosts of a node.
NUMBERS = {
    "dgx-a100": (300e9, 25e9, 8, 1),
    "dgx-h100": (450e9, 50e9, 8, 1),
    "hgx-b200": (900e9, 50e9, 8, 1),
    "gb200-nvl72": (900e9, 50e9, 72, 18),
    "p5": (450e9, 50e9, 8, 1),
    "pcie-8": (24e9, 12.5e9, 8, 1),
    "ethernet": (450e9, 12.5e9, 8, 1),
    "roce": (450e9, 50e9, 8, 1),
    "infiniband": (450e9, 50e9, 8, 1),
}
# Of one GPU's whole way to another node, in microseconds: what is typical of the network.
TYPICAL = {"p5": (15, 20), "ethernet": (20, 50), "roce": (5, 8), "pcie-8": (5, 8)}


def test_all_are_there():
    assert set(catalogue()) == set(NUMBERS)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name):
    link, net, gpus, hosts = NUMBERS[name]
    made = machine(f"{name}:{2 * hosts}")
    assert (made.nodes, made.node.devices, made.node.hosts) == (2, gpus, hosts)
    ways = made.paths(np.array([0, 0]), np.array([1, gpus]))
    near, far = (1 / made.beta[way[way >= 0]].max() for way in ways.links)
    assert near == pytest.approx(link, rel=1e-12)
    assert far == pytest.approx(net, rel=1e-12)
    least, most = TYPICAL.get(name, (3, 5))
    assert 1 <= ways.latency[0] * 1e6 <= 2
    assert least <= ways.latency[1] * 1e6 <= most
    assert made.assumed and machine(made.text).text == made.text


def test_rails_and_ports():
    for name in catalogue():
        made, nvlink = machine(name), name != "pcie-8"
        assert made.ports == (made.node.devices - 1 if nvlink else 1)
        assert made.network.rails == (name not in ("p5", "pcie-8", "ethernet", "infiniband"))
    assert machine("ethernet").node.nics == 1
    assert machine("p5").assumed[-1] == "the 4 NICs of a GPU are counted as one of 50 GB/s"


def test_adding_is_three_accesses_of_memory():
    assert machine("dgx-h100").gamma == 3 / 3350e9
    assert machine("dgx-a100").gpu == "a100"
    assert machine("pcie-8").gpu == "" and machine("pcie-8").gamma == 3 / 768e9


def test_pcie_ways_go_over_switches_and_sockets():
    node = machine("pcie-8").node

    def way(a, b):
        return [node.links[i].name for i in node.within[a, b] if i >= 0]

    assert way(0, 1) == ["gpu0 -> switch0", "switch0 -> gpu1"]
    assert way(0, 2)[1:3] == ["switch0 -> cpu0", "cpu0 -> switch1"]
    assert way(0, 7) == [
        *("gpu0 -> switch0", "switch0 -> cpu0", "cpu0 -> cpu1"),
        *("cpu1 -> switch3", "switch3 -> gpu7"),
    ]
    assert node.nic.tolist() == [0] * 4 + [1] * 4
    assert node.latency[0, [1, 2, 7]] == pytest.approx([2e-6, 2.6e-6, 3.6e-6])


def test_models_are_those_that_programs_are_compiled_for():
    """Their memory is in two catalogues, for two purposes: the numbers agree within 5 %."""
    target = pytest.importorskip("collc.receipts.pods.target")
    for name in models():
        known = {"gb200": "gb200-nvl72"}.get(name, name)
        assert model(name).memory == pytest.approx(target.find(known).memory_bandwidth, rel=0.05)
        assert model(name).nvlinks == target.find(known).active_links
    assert model("a100").nvlinks * model("a100").nvlink == 300e9
    assert model("b200").nvlinks * model("b200").nvlink == 900e9


def test_what_a_compute_capability_tells():
    """Of several models of one the usual one; peaks are dense, in bfloat16."""
    named = {sm: found and found.name for sm in (75, 80, 90, 100) for found in [by_sm(sm)]}
    assert named == {75: None, 80: "a100", 90: "h100", 100: "b200"}
    peaks = {"a100": 312, "h100": 989, "h200": 989, "b200": 2250, "gb200": 2500}
    assert {name: model(name).peak / 1e12 for name in models()} == peaks


@pytest.mark.parametrize(
    "name, says",
    [
        ("h100", "h100 is a GPU: dgx-h100 has it"),
        ("gb200", "gb200 is a GPU: gb200-nvl72 has it"),
        ("dgx-h10", "Did you mean dgx-h100"),
        ("", "there is no machine ''"),
    ],
)
def test_unknown_names(name, says):
    with pytest.raises(MachineError, match=says):
        find(name)
    with pytest.raises(MachineError, match=r"no GPU model 'h10'\. Did you mean h100"):
        model("h10")


def written(tmp_path, change):
    text = change((CATALOGUE / "dgx-h100.toml").read_text())
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def test_a_file_of_ones_own(tmp_path):
    path = written(tmp_path, lambda text: text.replace("nics = 8", "nics = 4"))
    made = machine(f"{path}:2")
    assert made.node.nics == 4 and made.devices == 16
    assert machine(made.text).text == made.text


TREE = 'sockets = 3\nswitches = 1\nsocket = "16GB/s,1us"'


@pytest.mark.parametrize(
    "old, new, says",
    [
        ("nics = 8", "nicks = 8", "no field 'nicks'. Did you mean nics"),
        ("nics = 8", "", r"nics missing\. Add what dgx-h100.toml"),
        ("nics = 8", "nics = 0", "nics has to be from 1 to 1024, not 0"),
        ("nics = 8", 'nics = "8"', "nics has to be int, not '8'"),
        ("nics = 8", "nics = 3", "neither number divides"),
        ("nics = 8", "nics = true", "nics has to be int, not True"),
        ("450GB/s,1.5us", "450GB/s", "link says no latency"),
        ("450GB/s,1.5us", "fast,1us", "'fast' is no bandwidth"),
        ('gpu = "h100"', 'gpu = "h10"', "no GPU model 'h10'"),
        ('gpu = "h100"', 'gpu = ""', "say gpu"),
        ("gpus = 8", "gpus = 8\nsockets = 2", r"come together\. Say all"),
        ("gpus = 8", f"gpus = 8\n{TREE}", r"by 3 sockets x 1 switches\. Say a multiple of 3"),
        ("domain = 1", f"domain = 2\n{TREE}", "Say domain = 1"),
        ("domain = 1", "domain = 100", "at most 576"),
        ("nics", "= =", "not TOML"),
    ],
)
def test_files_that_are_wrong(tmp_path, old, new, says):
    path = written(tmp_path, lambda text: text.replace(old, new, 1))
    with pytest.raises(MachineError, match=says) as e:
        find(path)
    assert "mine.toml" in str(e.value)


def test_a_file_that_is_missing():
    with pytest.raises(MachineError, match=r"machine file no\.toml"):
        machine("no.toml:2")
    assert catalog.find("dgx-h100") is catalog.find("dgx-h100")
