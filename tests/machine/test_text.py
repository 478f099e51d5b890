"""The text of a machine: what its words mean, what is assumed, what is refused, what is printed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collc.errors import MachineError
from collc.machine.describe import describe
from collc.machine.text import machine
from collc.machine.words import WORDS, split

OWN = "gpus=8 link=25GB/s,3us nics=1 net=100Gb/s,20us hosts=4"


def test_words_mean_what_they_say():
    made = machine(f"{OWN} add=1000GB/s ports=2")
    assert (made.devices, made.nodes, made.node.nics) == (32, 4, 1)
    assert (made.gamma, made.ports, made.gpu) == (1e-12, 2, "")
    ways = made.paths(np.array([0, 0, 9]), np.array([1, 8, 1]))
    assert ways.latency == pytest.approx([3e-6, 20e-6, 20e-6], rel=1e-12)
    slowest = [made.beta[way[way >= 0]].max() for way in ways.links]
    assert slowest == [1 / 25e9, 1 / 12.5e9, 1 / 12.5e9]
    assert made.assumed == ()
    assert set(made.kinds) == {"link", "board", "net"}


def test_what_is_not_said_is_assumed_and_listed():
    made = machine("hosts=2")
    assert made.devices == 16 and made.node.nics == 8
    assert [sentence.split(";")[0] for sentence in made.assumed] == [
        "8 GPUs a host",
        "link: 450 GB/s, 1.5 us, as NVLink of an H100",
        "net: 50 GB/s, 5 us, as InfiniBand NDR",
        "a NIC for each GPU",
        "adding takes no time",
        "one message in flight each way",
    ]
    assert "one host; say hosts=" in machine("gpus=2").assumed
    assert not machine("gpus=2").node.nics


def test_latencies_that_are_not_said():
    made = machine("gpus=2 link=1GB/s hosts=2 net=1GB/s nics=2")
    assert made.node.latency[0, 1] == 1.5e-6 and made.node.out[0] == 5e-6
    assert any("1.5 us of latency" in sentence for sentence in made.assumed)
    changed = machine("dgx-h100:2 net=200Gb/s link=100GB/s,9us")
    assert changed.node.out[0] == 4.5e-6 and changed.node.latency[0, 1] == 9e-6
    assert changed.assumed[0].startswith("where no word says else, ")


def test_a_network_quicker_than_pcie():
    made = machine("pcie-8:2 net=100Gb/s,1us")
    assert made.paths(np.array([0]), np.array([8])).latency[0] == pytest.approx(3.2e-6)
    assert "3.2 us for PCIe alone, more than net= says" in made.assumed


def test_nics_are_shared_or_bundled():
    shared = machine("gpus=8 nics=2 net=10GB/s,5us hosts=2").node
    assert shared.nic.tolist() == [0] * 4 + [1] * 4
    bundled = machine("gpus=2 nics=8 net=10GB/s,5us hosts=2")
    assert bundled.node.nics == 2
    assert 1 / bundled.node.links[bundled.node.leave[0][-1]].beta == pytest.approx(40e9)
    assert "the 4 NICs of a GPU are counted as one of 40 GB/s" in bundled.assumed


def test_a_node_of_several_hosts():
    made = machine("gpus=4 domain=2 link=9GB/s,1us hosts=6 nics=4 net=1GB/s,5us")
    assert (made.nodes, made.node.devices, made.node.hosts, made.devices) == (3, 8, 2, 24)
    assert machine("gb200-nvl72").devices == 72
    half = machine("gb200-nvl72:9")
    assert (half.nodes, half.devices, half.node.hosts) == (1, 36, 9)


def test_one_gpu_a_host():
    made = machine("gpus=1 hosts=4 net=100Gb/s,20us")
    assert made.kinds == ("board", "net") and made.devices == 4


def test_racks_and_rails():
    made = machine("dgx-h100:64 racks=4 uplink=3200Gb/s,2us rails=9us")
    net = made.network
    assert (net.rack, 1 / net.uplink, net.hop, net.across) == (16, 400e9, 2e-6, 9e-6)
    assert machine("infiniband:4 rails").network.across == 1e-6
    assumed = machine("infiniband:4 racks=2 uplink=1GB/s").assumed
    assert "1 us more between racks; say uplink=3200Gb/s,2us" in assumed


@pytest.mark.parametrize(
    "text",
    [
        "dgx-h100:4",
        "dgx-h100",
        "dgx-h100:1",
        OWN,
        "hosts=2",
        "gpus=3",
        "uplink=1GB/s,2us racks=2 hosts=4",
        "infiniband:64 rails racks=4 uplink=3200Gb/s,2us",
        "gb200-nvl72:36 ports=3 add=1GB/s",
        "gpus=4 'link=25 GB/s, 3us'",
    ],
)
def test_the_text_is_read_back(text):
    made = machine(text)
    again = machine(made.text)
    assert machine(made) is made
    assert again.text == made.text and str(made) == made.text
    assert again.assumed == made.assumed and again.network == made.network
    assert (again.gamma, again.ports, again.gpu) == (made.gamma, made.ports, made.gpu)
    assert again.node.links == made.node.links and again.nodes == made.nodes
    assert np.array_equal(again.node.latency, made.node.latency)
    assert np.array_equal(again.node.within, made.node.within)


def test_one_order_of_words():
    assert machine("hosts=2 net=1GB/s,2us gpus=2").text == "gpus=2 net=1GB/s,2us hosts=2"
    assert machine("dgx-h100 add=1GB/s hosts=2").text == "dgx-h100:2 add=1GB/s"


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "the machine is empty"),
        ("  ", "the machine is empty"),
        ("dgx-h100:64 rack=4", "'rack' is no word of a machine. Did you mean racks. Write racks=4"),
        ("dgx-h100:4 8", "'8' is no word of a machine. Known: add, "),
        ("gpus=8 dgx-h100", "'dgx-h100' is no word"),
        ("speed=8", "'speed' is no word"),
        ("gpus=8 gpus=9", "gpus is said twice, 8 and 9"),
        ("dgx-h100:4 hosts=4", ":4 and hosts=4 both say how many hosts"),
        ("gpus", "gpus has no value. Write gpus=8"),
        ("gpus= hosts=2", "gpus has no value"),
        ("dgx-h100:2 rails=", "rails has no value"),
        ("gpus=0", "gpus='0': it has to be a number from 1 to 1,024"),
        ("gpus=8.5", "gpus='8.5': it has to be a number"),
        ("gpus=²", "it has to be a number"),
        ("gpus=99999999999999", "it has to be a number from 1"),
        ("dgx-h100:x", "the number of hosts is 'x': it has to be a number"),
        ("dgx-h100:", "the number of hosts is ''"),
        ("dgx-h100:-1", "the number of hosts is '-1'"),
        ("dgx-h100:0", "the number of hosts is '0'"),
        (":4", "a name is empty"),
        ("dgx-h100+", "a name is empty"),
        ("dgx-h100+h100", "no part is a file"),
        ("h100:4", "h100 is a GPU: dgx-h100 has it"),
        ("dgx-h100:300000", "2,400,000 devices; there can be 1 to 1,048,576"),
        ("gpus=1024 domain=2 hosts=2", "at most 576"),
        ("dgx-h100 gpus=4", "gpus cannot change: dgx-h100 has 8 GPUs a host"),
        ("dgx-h100 domain=4", "domain cannot change"),
        ("gpus=8 nics=3 hosts=2", "8 GPUs and 3 NICs in a host: neither number divides"),
        ("gpus=4 domain=4 hosts=6 nics=4", "6 hosts are no whole number of nodes; a node has 4"),
        ("gpus=4 domain=4 hosts=2", "Say hosts=4"),
        ("gb200-nvl72:20", "20 hosts are no whole number of nodes; a node has 18. Say 18 hosts"),
        ("gpus=1 hosts=2 link=1GB/s", "link has no effect on a node of one GPU"),
        ("link=fast", "link=fast: 'fast' is no bandwidth"),
        ("link=0GB/s", "not positive"),
        ("link=1GB/s,fast", "link=1GB/s,fast: 'fast' is no time"),
        ("link=1GB/s,1us,2us", "3 values. Write link=450GB/s,1us"),
        ("link=1GB/s,", "'' is no time"),
        ("net=1GB/s,-1us hosts=2", "'-1us' is no time"),
        ("add=1us", "'1us' is no bandwidth"),
        ("ports=0", "ports='0'"),
        ("dgx-h100 rails", "rails has no effect on one node"),
        ("dgx-h100 racks=2 uplink=1GB/s", "racks has no effect on one node"),
        ("dgx-h100:4 rails", "dgx-h100 has rails already"),
        ("ethernet:4 rails", "rails need several NICs in a node, not 1"),
        ("dgx-h100:4 rails=fast", "'fast' is no time"),
        ("dgx-h100:4 uplink=1GB/s", "uplink has no effect without racks="),
        ("dgx-h100:64 racks=4", "racks=4 need the bandwidth of their uplinks"),
        ("dgx-h100:64 racks=5 uplink=1GB/s", "64 nodes cannot be in racks=5 alike"),
        ("dgx-h100:4 racks=8 uplink=1GB/s", "racks='8': it has to be a number from 1 to 4"),
        ("dgx-h100:4 racks=1 uplink=1GB/s", "racks is 1, and has no effect"),
        ("'dgx-h100", "No closing quotation"),
        ("x" * 5000, "a text of 5,000 characters is no machine"),
    ],
)
def test_refused(text, says):
    with pytest.raises(MachineError) as e:
        machine(text)
    assert says in str(e.value).replace("?", ".")


def test_not_a_text():
    with pytest.raises(MachineError, match="a machine is a text, not int"):
        machine(8)  # pyright: ignore[reportArgumentType]


def test_every_word_has_an_example_that_is_read():
    for word, example in WORDS.items():
        said = split(example)
        assert said.hosts == 4 if word == "hosts" else list(said.words) == [word]


def test_described():
    assert describe(machine("dgx-h100:64 racks=4 uplink=3200Gb/s,2us")).splitlines() == [
        "dgx-h100:64 racks=4 uplink=3200Gb/s,2us",
        "  devices  512 GPUs, H100: 64 hosts of 8",
        "  nvlink   450 GB/s each way",
        "  net      8 NICs of a node, 50 GB/s each way",
        "  latency  1.5 us from GPU to GPU in a node",
        "           4.5 us from node to node",
        "  rails    a rail for each of 8 NICs; 600 ns more to others",
        "  racks    4 racks of 16 nodes, 400 GB/s up and down; 2 us more between racks",
        "  adding   1.12 TB/s added by a GPU",
        "  ports    7 messages of a GPU in flight at once, each way",
        "  assumed  where no word says else, latencies of NVLink and InfiniBand are typical ones, "
        "not measured",
    ]  # fmt: skip
    text = describe(machine("pcie-8"))
    assert "  latency  2 us to 3.6 us from GPU to GPU in a node" in text
    assert "nodes    2 of 18 hosts, 72 GPUs each" in describe(machine("gb200-nvl72:36"))
    assert "link     1 GB/s each way" in describe(machine("gpus=2 link=1GB/s,1us"))


words = st.sampled_from(sorted(WORDS) + ["dgx-h100", "a/b", "x"])
values = st.one_of(st.text(max_size=8), st.sampled_from(["8", "2", "1GB/s", "1GB/s,1us", "9us"]))
tokens = st.one_of(
    st.tuples(words, values).map("=".join),
    st.text(max_size=12),
    st.tuples(words, values).map(":".join),
)


@given(st.lists(tokens, max_size=6))
@settings(max_examples=60)
def test_any_text_is_a_machine_or_an_error(said):
    try:
        made = machine(" ".join(said))
    except MachineError as e:
        assert str(e)
    else:
        assert machine(made.text).text == made.text
