"""What `collc doctor` reads in counters of RDMA, TCP, interfaces and PCIe: each planted under a root."""

from dataclasses import replace

import pytest

from collc.runtime.doctor import network, pcie, rdma
from collc.runtime.doctor.devices import Probe
from collc.runtime.doctor.examine import Facts, examine
from collc.runtime.doctor.finding import Level
from collc.runtime.doctor.growth import counters, grown
from collc.runtime.doctor.limits import Limits

from .planted import host, only, port

CARD = "/sys/bus/pci/devices/{}"


def interface(name: str = "eth0", speed: int = 25_000, **changed) -> dict[str, object]:
    """An interface that is up, and its counters; what is changed is a counter, but state and duplex."""
    own: dict[str, object] = {"rx_packets": 1_000_000, "tx_packets": 1_000_000, "rx_errors": 0}
    own |= {"tx_errors": 0, "rx_dropped": 0, "tx_dropped": 0, "rx_crc_errors": 0}
    folder = f"/sys/class/net/{name}"
    top = {"operstate": changed.pop("state", "up"), "duplex": changed.pop("duplex", "full")}
    files = {f"{folder}/{key}": text for key, text in {**top, "speed": speed}.items()}
    return files | {f"{folder}/statistics/{key}": n for key, n in {**own, **changed}.items()}


def card(kind: str = "0x030200", address: str = "0000:3b:00.0", **changed) -> dict[str, object]:
    """A GPU, or a network card with 0x020000; what is changed is a link's file or an AER total."""
    own = {"class": kind, "vendor": "0x10de" if kind.startswith("0x03") else "0x15b3"}
    own |= {"current_link_speed": "32.0 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe"}
    own |= {"current_link_width": "16", "max_link_width": "16"}
    totals = {"fatal": 0, "nonfatal": 0, "correctable": 0}
    totals |= {name: changed.pop(name) for name in list(changed) if name in totals}
    words = {"fatal": "FATAL", "nonfatal": "NONFATAL", "correctable": "COR"}
    for name, n in totals.items():
        own[f"aer_dev_{name}"] = f"Undefined 0\nDLP {n}\nTOTAL_ERR_{words[name]} {n}"
    return {f"{CARD.format(address)}/{name}": text for name, text in {**own, **changed}.items()}


def snmp(sent: int, again: int) -> dict[str, object]:
    text = f"Ip: A\nIp: 1\nTcp: MaxConn OutSegs RetransSegs\nTcp: -1 {sent} {again}\nUdp: A\nUdp: 1"
    return {"/proc/net/snmp": text}


def test_what_was_not_read_is_not_called_ok(tmp_path):
    mute = {k: v for k, v in port().items() if not k.endswith("/state")}
    only(rdma.rdma(host(tmp_path / "a", mute)), "note", "does not say its state", "ibstat")
    bare = {k: v for k, v in interface().items() if "statistics" not in k}
    assert network.interfaces(host(tmp_path / "b", bare)) == []
    some = bare | interface("eth1")
    only(network.interfaces(host(tmp_path / "c", some)), "ok", "eth1: no", "no counters at eth0")
    dumb = {k: v for k, v in card().items() if k.endswith(("class", "vendor"))}
    assert pcie.pcie(host(tmp_path / "d", dumb)) == []


def test_the_shares_from_which_on_it_is_a_warning(tmp_path):
    for again, level in ((101, "warning"), (100, "ok")):
        only(network.retransmitted(10_000, again, "now"), level)
    only(network.retransmitted(9_999, 9_000, "now"), "ok")
    for dropped, level in ((1001, "warning"), (1000, "ok")):
        only(network.interfaces(host(tmp_path, interface(tx_dropped=dropped))), level)


def test_which_counters_count():
    """Those of the kernel's and of mlx5's that tell of errors; a new one has to be written here too."""
    assert len(rdma.ERRORS) == 28
    assert set(network.ERRORS) == {
        "rx_errors",
        "tx_errors",
        "rx_crc_errors",
        "rx_frame_errors",
        "tx_carrier_errors",
        "rx_fifo_errors",
        "rx_over_errors",
    }


def test_counters_that_grow_are_errors(tmp_path):
    files = port(symbol_error=12) | interface(rx_errors=3) | card(correctable=1) | snmp(100_000, 0)
    before, sent = counters(host(tmp_path, files)), (100_000, 0)
    assert grown(host(tmp_path), before, sent) == []
    only(
        grown(host(tmp_path, port(symbol_error=15)), before, sent),
        "error",
        "symbol_error 3 more",
        "cable",
    )
    host(tmp_path, port(symbol_error=12) | snmp(120_000, 1000))
    only(grown(host(tmp_path), before, sent), "warning", "5.00%", "while the links", "MTU")


@pytest.mark.parametrize(
    "files, level, words",
    [
        (interface(), "ok", ["eth0", "no errors"]),
        (interface(rx_crc_errors=7), "warning", ["eth0: rx_crc_errors 7", "cable"]),
        (
            interface(rx_dropped=5000),
            "warning",
            ["dropped 5,000 of 1,000,000", "ethtool -G eth0 rx"],
        ),
        # What the card has dropped before the kernel saw it: 600 of each are below the share.
        (interface(rx_dropped=600), "ok", ["no errors"]),
        (interface(rx_missed_errors=600), "ok", ["no errors"]),
        (
            interface(rx_dropped=600, rx_missed_errors=600),
            "warning",
            ["dropped 1,200 of 1,000,000", "ethtool -G eth0 rx"],
        ),
        (interface(rx_fifo_errors=7), "warning", ["eth0: rx_fifo_errors 7", "larger rings"]),
        (interface(rx_over_errors=7), "warning", ["eth0: rx_over_errors 7", "larger rings"]),
        (interface(duplex="half"), "warning", ["half duplex", "autoneg"]),
        (
            interface() | interface("eth1", 1000),
            "note",
            ["1,000 Mb/s: eth1", "NCCL_SOCKET_IFNAME=eth0"],
        ),
    ],
)
def test_interfaces(tmp_path, files, level, words):
    only(network.interfaces(host(tmp_path, files)), level, *words)


def test_chosen_interfaces(tmp_path):
    files = interface() | interface("eth1", 1000) | interface("ib0", state="down", speed=-1)
    chosen = host(tmp_path, files, NCCL_SOCKET_IFNAME="eth")
    only(network.interfaces(chosen), "warning", "unequal", "NCCL_SOCKET_IFNAME=eth0")
    down = host(tmp_path, files, NCCL_SOCKET_IFNAME="=ib0")
    only(network.interfaces(down), "warning", "ib0", "is down", "ip link set ib0 up")
    well = host(tmp_path, files, NCCL_SOCKET_IFNAME="=eth0")
    only(network.interfaces(well), "ok", "eth0")
    assert network.interfaces(host(tmp_path / "none")) == []


def test_tcp(tmp_path):
    only(
        network.tcp(host(tmp_path, snmp(100_000, 2000))),
        "warning",
        "2.00%",
        "100,000",
        "ethtool -S",
    )
    only(network.tcp(host(tmp_path, snmp(100_000, 20))), "ok", "0.02%")
    only(network.tcp(host(tmp_path, snmp(100, 20))), "ok", "20.00%")  # too few to say anything
    files = {"/proc/net/netstat": "TcpExt: A ListenOverflows\nTcpExt: 1 8\nIpExt: B\nIpExt: 2"}
    found = network.tcp(host(tmp_path / "b", files))
    only(found, "warning", "8 connections found", "net.core.somaxconn")
    files = {"/proc/net/netstat": "TcpExt: ListenOverflows\nTcpExt: 1"}
    only(network.tcp(host(tmp_path / "h", files)), "warning", "1 connection found")
    many = {"/proc/net/snmp": "Tcp: PassiveOpens OutSegs RetransSegs\nTcp: 8000 1 0"}
    only(network.tcp(host(tmp_path / "b", many)), "ok", "0.00%")  # 8 of 8000 say nothing
    assert network.tcp(host(tmp_path / "c")) == []
    assert network.segments(host(tmp_path / "e", snmp(-5, -7))) is None
    assert (
        network.segments(host(tmp_path / "f", {"/proc/net/snmp": "Tcp: OutSegs\nTcp: --5"})) is None
    )
    assert pcie.counts(host(tmp_path / "g", card(fatal="9" * 5000)))["GPU 0000:3b:00.0"].keys() == {
        "TOTAL_ERR_NONFATAL",
        "TOTAL_ERR_COR",
    }
    assert network.tcp(host(tmp_path / "d", {"/proc/net/snmp": "Tcp: OutSegs\nnonsense"})) == []


NIC = "0x020700"


@pytest.mark.parametrize(
    "files, level, words",
    [
        (card(), "ok", ["1, no errors counted"]),
        (card(fatal=1), "error", ["GPU 0000:3b:00.0: TOTAL_ERR_FATAL 1", "Do not train", "dmesg"]),
        (card(nonfatal=2), "warning", ["TOTAL_ERR_NONFATAL 2", "Reseat"]),
        (card(NIC, correctable=3), "warning", ["network card", "TOTAL_ERR_COR 3", "Reseat"]),
        (card(current_link_width="8"), "warning", ["8 of its 16 lanes", "lspci"]),
        (card(current_link_speed="2.5 GT/s PCIe"), "note", ["2.5 of its 32 GT/s", "under load"]),
        (card(NIC, current_link_speed="8.0 GT/s PCIe"), "warning", ["8 of its 32 GT/s", "BIOS"]),
    ],
)
def test_pcie(tmp_path, files, level, words):
    only(pcie.pcie(host(tmp_path, files)), level, *words)


def test_cards_without_counters_are_not_called_well(tmp_path):
    without = {name: text for name, text in card().items() if "aer_" not in name}
    only(pcie.pcie(host(tmp_path, without)), "ok", "no error counters at GPU")
    assert pcie.pcie(host(tmp_path / "b", card("0x010802"))) == []  # a disk
    assert pcie.pcie(host(tmp_path / "c")) == []


def test_all_of_a_host(tmp_path):
    """What is absent is said in one line, and nothing about it is ok."""
    packages = {"jax": "0.12.0.1", "jaxlib": "0.12.0.1"}
    limits = Limits(1 << 34, -1, 1 << 20)
    own = Facts((3, 12), packages, Probe((("cpu", "cpu"),)), "n1", ("10.0.0.5",), True, limits)
    bare = examine(host(tmp_path / "bare"), own)
    absent = [f for f in bare if f.level != Level.OK]
    only(absent, "note", "not there", "RDMA", "TCP", "interfaces", "PCIe")
    assert not {"RDMA", "TCP", "interfaces", "PCIe"} & {f.check for f in bare}
    whole = examine(host(tmp_path / "whole", port() | interface() | card() | snmp(10**6, 10)), own)
    assert {f.level for f in whole} == {Level.OK}
    assert {f.check for f in whole} == {
        "devices",
        "python",
        "versions",
        "XLA flags",
        "JAX settings",
        "NCCL settings",
        "scheduler",
        "host name",
        "clock",
        "limits",
        "RDMA",
        "TCP",
        "interfaces",
        "PCIe",
    }
    silent = examine(host(tmp_path / "gpu", {"/proc/driver/nvidia/gpus/0/information": ""}), own)
    assert "NVIDIA's driver" in next(f.found for f in silent if f.check == "absent")
    plugin = {"jax-cuda13-plugin": "0.12.0.1", "jax-cuda13-pjrt": "0.12.0.1"}
    old = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024"
    planted = host(tmp_path / "gpu", {"/proc/driver/nvidia/version": old})
    driven = examine(planted, replace(own, packages={**packages, **plugin}))
    assert Level.ERROR in {f.level for f in driven if f.check == "driver"}
    assert not any("NVIDIA's driver" in f.found for f in driven if f.check == "absent")
    # It names the interface too: NCCL's variables, the scheduler and the counters see one environment.
    slurm = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "NCCL_SOCKET_IFNAME": "bond0"}
    planted = examine(host(tmp_path / "whole", **slurm), own)
    assert {f.check for f in planted if f.level == Level.ERROR} == {"NCCL settings"}
    assert {f.check for f in planted if f.level == Level.WARNING} == {"scheduler"}
