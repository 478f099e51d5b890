"""A machine by a line of text: dgx-h100:4, topo.xml:2, or gpus=8 link=450GB/s,1us hosts=4.

What the text may say is in ``collc.machine.words``; what it does not say is assumed, and said.
"""

from collections.abc import Sequence
from dataclasses import replace

from collc.errors import MachineError
from collc.machine import catalog
from collc.machine.graph import node
from collc.machine.readers import merge
from collc.machine.readers.build import build, switched
from collc.machine.shape import Shape, Wire, draw
from collc.machine.topology import Machine, Network, Node
from collc.machine.units import bandwidth, parse_bandwidth, parse_time, seconds
from collc.machine.words import WORDS, Said, split

# What a machine of one's own is like where it does not say: an H100's NVLink, NDR InfiniBand.
_GPUS, _LINK, _NET = 8, Wire(450e9, 1.5e-6), Wire(50e9, 5e-6)
_ACROSS, _HOP = 1e-6, 1e-6  # seconds more from rail to rail, and between racks
_MOST = 1024  # GPUs, NICs, hosts of a node


def machine(text: str | Machine) -> Machine:
    """The machine of a text: a name or files, or words. A Machine is returned as it is.

    What is assumed is listed in ``Machine.assumed``. Raises MachineError, naming word, file and line.

    >>> machine("dgx-h100:4").devices, machine("gpus=4 link=25GB/s,3us hosts=2 net=1GB/s,9us").devices
    (32, 8)
    """
    if isinstance(text, Machine):
        return text
    said = split(text)
    if not said.parts:
        return _own(said)
    if len(said.parts) == 1 and said.parts[0].endswith(".toml"):
        return _named(said)
    if any(merge.is_file(part) for part in said.parts):
        return _from_files(said)
    if len(said.parts) > 1:
        raise MachineError(
            f"{'+'.join(said.parts)}: no part is a file. A name stands alone, as in dgx-h100:4; "
            "+ adds a GPU model or a matrix to a file, as in topo.xml+h100."
        )
    return _named(said)


def _own(said: Said) -> Machine:
    """By words alone."""
    assumed: list[str] = []
    gpus = said.number("gpus", _MOST)
    if gpus is None:
        gpus = _GPUS
        assumed.append(f"{gpus} GPUs a host; say gpus=")
    domain = said.number("domain", _MOST) or 1
    hosts = said.hosts
    if hosts is None:
        hosts = domain
        assumed.append("one host; say hosts=" if domain == 1 else f"{domain} hosts; say hosts=")
    if hosts < domain:
        raise MachineError(
            f"domain={domain} hosts in an NVLink domain, but {hosts} hosts. Say hosts={domain}."
        )
    if gpus * domain == 1:
        said.refuse(("link",), "has no effect on a node of one GPU")
    link = said.wire("link")
    if gpus * domain > 1:
        link = _filled("link", link, _LINK, "as NVLink of an H100", assumed)
    nics, net = said.number("nics", _MOST), said.wire("net")
    if hosts > domain or nics or net:
        net = _filled("net", net, _NET, "as InfiniBand NDR", assumed)
        if not nics:
            nics = gpus
            assumed.append(f"a NIC for each GPU; say nics= ({nics} of a host are assumed)")
    shape = Shape(gpus, link or _LINK, "link", nics or 0, net or _NET, domain)
    assumed += shape.assumed
    if "add" not in said.words:
        assumed.append("adding takes no time; say add=, as in add=1000GB/s")
    if "ports" not in said.words:
        assumed.append("one message in flight each way; say ports=")
    whole = node(draw(shape, domain), said.text(""), domain)
    return _machine(said, "", whole, hosts, None, 0.0, 1, "", assumed)


def _filled(word: str, said: Wire | None, default: Wire, why: str, assumed: list[str]) -> Wire:
    """A wire with what it does not say; that goes to ``assumed``."""
    assert default.latency is not None
    if said is None:
        what = f"{bandwidth(default.bandwidth)}, {seconds(default.latency)}"
        assumed.append(f"{word}: {what}, {why}; say {word}=")
        return default
    if said.latency is None:
        assumed.append(f"{word}: {seconds(default.latency)} of latency, {why}; say {WORDS[word]}")
        return replace(said, latency=default.latency)
    return said


def _named(said: Said) -> Machine:
    """By a name of the catalogue, changed by words."""
    name = said.parts[0]
    entry = catalog.find(name)
    said.refuse(("gpus", "domain"), f"cannot change: {name} has {entry.shape.gpus} GPUs a host")
    shape = entry.shape
    for word, of in (("link", shape.link), ("net", shape.net)):
        if wire := said.wire(word):
            wire = wire if wire.latency is not None else replace(wire, latency=of.latency)
            shape = replace(shape, **{word: wire})
    shape = replace(shape, nics=said.number("nics", _MOST) or shape.nics)
    hosts = shape.domain if said.hosts is None else said.hosts
    here = min(hosts, shape.domain)  # a part of a domain is one, too
    text = said.text(name)
    whole = node(draw(shape, here), text, here)
    ports = 1 if shape.tree else max(1, whole.devices - 1)
    else_ = "where no word says else, " if said.words else ""
    assumed = [else_ + sentence for sentence in entry.assumed]
    assumed += shape.assumed
    return _machine(said, name, whole, hosts, entry.rails, entry.gamma, ports, entry.gpu, assumed)


def _from_files(said: Said) -> Machine:
    """By topology files, with a GPU model."""
    said.refuse(("gpus", "domain", "link"), "cannot change: the file says what a host has")
    source = merge.read(said.parts)
    found, gpu = source.found, source.model
    if (nics := said.number("nics", _MOST)) is not None:
        merge.added_nics(found, nics)
    graph = build(found, gpu, said.wire("net"))
    whole = node(graph, source.text, found.hosts)
    if not gpu and "add" not in said.words:
        what = "the GPU model is not known: adding takes no time"
        found.notes.add(0, f"{what}; name it, as in {source.text}+h100, or say add=")
    ports = max(1, whole.devices - 1) if switched(found) else 1
    gamma, constants = (gpu.gamma, gpu.constants) if gpu else (0.0, "")
    hosts = found.hosts if said.hosts is None else said.hosts
    assumed = found.notes.sentences()
    return _machine(said, source.text, whole, hosts, None, gamma, ports, constants, assumed)


def _machine(
    said: Said,
    source: str,
    whole: Node,
    hosts: int,
    rails: float | None,
    gamma: float,
    ports: int,
    gpu: str,
    assumed: Sequence[str],
) -> Machine:
    """So many hosts, in whole nodes, and what words say of the network and of adding."""
    text = said.text(source)
    if hosts % whole.hosts:
        raise MachineError(
            f"{text}: {hosts} hosts are no whole number of nodes; a node has {whole.hosts}. "
            f"Say {hosts // whole.hosts * whole.hosts or whole.hosts} hosts."
        )
    more = list(assumed)
    nodes = hosts // whole.hosts
    return Machine(
        text=text,
        node=whole,
        nodes=nodes,
        network=_network(said, nodes, whole, rails, more),
        gamma=1 / parse_bandwidth(said.words["add"]) if "add" in said.words else gamma,
        ports=said.number("ports", _MOST) or ports,
        gpu=gpu,
        assumed=tuple(more),
    )


def _network(
    said: Said, nodes: int, whole: Node, rails: float | None, assumed: list[str]
) -> Network:
    """Rails and racks."""
    if nodes == 1:
        said.refuse(("rails", "racks", "uplink"), "has no effect on one node: there is no network")
    if "rails" in said.words:
        if whole.nics < 2:
            raise MachineError(f"rails need several NICs in a node, not {whole.nics}. Say nics=.")
        value = said.words["rails"]
        if not value and rails is not None:
            raise MachineError(
                f"{said.parts[0]} has rails already. Leave rails out, or say rails=1us."
            )
        if not value:
            assumed.append(f"{seconds(_ACROSS)} more from rail to rail; say rails=1us")
        rails = parse_time(value) if value else _ACROSS
    racks = said.number("racks", nodes)
    if racks is None:
        said.refuse(("uplink",), "has no effect without racks=")
        return Network(rails=rails is not None, across=rails or 0.0)
    if racks == 1:
        said.refuse(("racks",), "is 1, and has no effect: nothing is between racks")
    uplink = said.wire("uplink")
    if not uplink:
        raise MachineError(
            f"racks={racks} need the bandwidth of their uplinks: uplink=3200Gb/s,2us."
        )
    if nodes % racks:
        raise MachineError(
            f"{nodes} nodes cannot be in racks={racks} alike. Say a number that divides {nodes}."
        )
    if uplink.latency is None:
        assumed.append(f"{seconds(_HOP)} more between racks; say {WORDS['uplink']}")
    return Network(
        rails=rails is not None,
        across=rails or 0.0,
        rack=nodes // racks,
        uplink=1 / uplink.bandwidth,
        hop=_HOP if uplink.latency is None else uplink.latency,
    )
