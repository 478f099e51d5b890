"""From what files say to the graph of a node: bandwidths and latencies on all its links."""

import networkx as nx

from collc.errors import MachineError
from collc.machine import speeds
from collc.machine.catalog import Model
from collc.machine.graph import OUTSIDE, wire
from collc.machine.readers.found import NVSWITCH, Found
from collc.machine.shape import Wire, spoke
from collc.machine.topology import NETWORK
from collc.machine.units import seconds


def build(found: Found, gpu: Model | None, net: Wire | None) -> "nx.DiGraph[str]":
    """The graph; ``net`` is what every NIC has, whatever the file says."""
    if net and not found.nics:
        raise MachineError(
            f"{found.file} has no NIC: net= has no effect. Say nics= too, how many there are."
        )
    _pcie(found, gpu)
    _nvlinks(found, gpu)
    _nics(found, net)
    for i, name in enumerate(found.gpus):
        found.graph.nodes[name]["index"] = i
    return found.graph


def switched(found: Found) -> bool:
    """Whether one NVSwitch joins all GPUs."""
    return len(found.gpus) > 1 and all((gpu, NVSWITCH) in found.nvlinks for gpu in found.gpus)


def _pcie(found: Found, gpu: Model | None) -> None:
    """The bandwidth of PCIe where only the model has it."""
    open_ends = [e for e in found.graph.edges if not found.graph.edges[e]["bandwidth"]]
    for end in open_ends:
        bandwidth = gpu.pcie if gpu else speeds.pcie(None, speeds.UNKNOWN_WIDTH)
        found.graph.edges[end]["bandwidth"] = bandwidth
    if open_ends and not gpu:
        found.notes.add(0, "PCIe 3.0 x16, 12 GB/s, is assumed; a GPU model would tell, as in +h100")


def _nvlinks(found: Found, gpu: Model | None) -> None:
    rate = found.rate or (gpu.nvlink if gpu else speeds.UNKNOWN_NVLINK)
    if found.nvlinks and not found.rate and not gpu:
        found.notes.add(0, "25 GB/s a NVLink are assumed; a GPU model would tell, as in +h100")
    for (a, b), count in found.nvlinks.items():
        to_switch = b.startswith(NVSWITCH)
        late = speeds.NVLINK_TO_SWITCH if to_switch else speeds.NVLINK_TO_PEER
        if to_switch:
            found.graph.add_node(b, kind="switch")
            wire(found.graph, a, b, "nvlink", count * rate, late)
        else:  # each end is counted on its own
            found.graph.add_edge(a, b, kind="nvlink", bandwidth=count * rate, latency=late)


def _nics(found: Found, net: Wire | None) -> None:
    """The ends of NICs at the network, those that only one GPU uses as one."""
    for nic in found.nics.values():
        if net:
            nic.bandwidth = net.bandwidth
        elif nic.bandwidth is None:
            nic.bandwidth = speeds.UNKNOWN_NET
            found.notes.add(0, "NICs of 100 Gb/s are assumed where no speed is said; say net=")
    _bundle(found)
    for i, (name, nic) in enumerate(found.nics.items()):
        found.graph.nodes[name]["index"] = i
        late = nic.latency or speeds.NET[nic.kind]
        if net and net.latency is not None:  # the whole way, when the NIC is beside the GPU
            late = max(0.0, net.latency - speeds.PCIE_ENDS)
            if net.latency < speeds.PCIE_ENDS:
                found.notes.add(
                    0, f"{seconds(speeds.PCIE_ENDS)} for PCIe alone, more than net= says"
                )
        elif nic.latency is None:
            what = f"{nic.kind}, {late * 1e6:.0f} us from NIC to NIC"
            found.notes.add(0, f"the network is taken to be {what}; say net=")
        assert nic.bandwidth is not None
        spoke(found.graph, name, OUTSIDE, NETWORK, nic.bandwidth, late)


def _bundle(found: Found) -> None:
    """Of the NICs at a switch the share of a GPU there becomes one NIC, with the bandwidth of all."""
    graph = found.graph
    for switch in [v for v, data in graph.nodes(data=True) if data["kind"] == "switch"]:
        there = set(graph.successors(switch))
        gpus = [gpu for gpu in found.gpus if gpu in there and not switch.startswith(NVSWITCH)]
        nics = [nic for nic in found.nics if nic in there]
        alike = len({found.nics[nic].bandwidth for nic in nics}) == 1
        share = len(nics) // len(gpus) if gpus else 0
        if share < 2 or len(nics) % len(gpus) or not alike:
            continue
        for i, nic in enumerate(nics):
            if i % share:
                graph.remove_node(nic)
                del found.nics[nic]
                continue
            found.nics[nic].bandwidth = share * (found.nics[nic].bandwidth or 0.0)
            for end in ((nic, switch), (switch, nic)):
                graph.edges[end]["bandwidth"] *= share
        found.notes.add(0, f"{share} NICs beside one GPU are counted as one of all their bandwidth")
