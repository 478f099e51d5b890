"""NCCL's topology XML, as NCCL_TOPO_DUMP_FILE writes it and clouds ship it.

system > cpu > pci, nested, > gpu > nvlink;  pci or cpu > nic > net
"""

import networkx as nx

from collc.errors import MachineError
from collc.machine import speeds
from collc.machine.graph import wire
from collc.machine.readers import attributes, nvlinks
from collc.machine.readers.elements import Element, parse
from collc.machine.readers.found import Found, Nic, Notes
from collc.machine.readers.nvlinks import Place

# What an element may hold that matters here; and what NCCL writes that does not.
_HOLDS = {
    "system": {"cpu"},
    "cpu": {"pci", "nic"},
    "pci": {"pci", "gpu", "nic"},
    "gpu": {"nvlink"},
    "nic": {"net"},
}
_MOST = 256  # GPUs, and NICs
_MOST_SWITCHES, _MOST_CPUS = 512, 32  # of a node, and of a host
_BESIDE = {"c2c", "pcilink", "xgmi", "gin", "rma"}


def read(file: str, data: bytes) -> Found:
    """The node of a file. Raises MachineError, with line and element."""
    root = parse(file, data)
    if root.name != "system":
        raise root.fault("the outermost element", "It has to be <system>, as NCCL writes it.")
    reader = _Reader(file, root)
    for cpu in reader.inside(root):
        reader.cpu(cpu)
    reader.sockets()
    found = reader.ordered()
    nvlinks.connect(found, reader.gpus)
    return found


class _Reader:
    """Enters element by element into a graph what matters: GPUs, NICs, and what is above them."""

    def __init__(self, file: str, root: Element) -> None:
        self.found = Found(file, Notes(file))
        everything = list(_below(root))
        self.full = any(e.name == "gpu" for e in everything)  # else places of GPUs will do
        self.networked = any(e.name == "net" for e in everything)
        hosts = [e.attributes.get("host_hash", "") for e in everything if e.name == "cpu"]
        self.hosts = list(dict.fromkeys(hosts))
        self.seen: dict[tuple[str, str, object], int] = {}  # host, what, which: its line
        self.cpus: dict[str, list[tuple[str, Element]]] = {}
        self.gpus: list[Place] = []
        self.switches = 0
        self.order: dict[str, tuple[int, int, str]] = {}  # of GPUs and NICs: host, dev, busid
        self.nets: dict[tuple[str, int], tuple[str, dict[str, str]]] = {}

    def inside(self, parent: Element) -> list[Element]:
        """The children that matter; of those that nobody knows it is said that they do not."""
        known = _HOLDS.get(parent.name, set())
        for child in parent.children:
            if child.name not in known | _BESIDE:
                what = f"<{child.name[:40]}> in <{parent.name}> is unknown; left out"
                self.found.notes.add(child.line, what)
        return [child for child in parent.children if child.name in known]

    def _once(self, element: Element, host: str, what: str, which: object) -> None:
        key = (host, what, which)
        if key in self.seen:
            also = f"{what} {which} is also in line {self.seen[key]}"
            raise element.fault(also, "Each may be there once.")
        self.seen[key] = element.line

    def _name(self, host: str, name: str) -> str:
        return f"host{self.hosts.index(host)}/{name}" if len(self.hosts) > 1 else name

    def cpu(self, cpu: Element) -> None:
        host = cpu.attributes.get("host_hash", "")
        numa = cpu.integer("numaid", -1, attributes.LARGEST)
        self._once(cpu, host, "numaid", numa)
        name = self._name(host, f"cpu{numa}")
        children = self.inside(cpu)
        if any(child.name == "nic" or self._useful(child) for child in children):
            self.found.graph.add_node(name, kind="cpu")
            cpus = self.cpus.setdefault(host, [])
            cpus.append((name, cpu))
            if len(cpus) > _MOST_CPUS:
                raise cpu.fault(f"more than {_MOST_CPUS} CPUs", "A host has fewer NUMA nodes.")
        for child in children:
            if child.name == "nic":
                self._nic(child, child, name, host, None)
            else:
                self._pci(child, name, host)

    def _useful(self, pci: Element) -> bool:
        """Whether a GPU or a NIC is in it."""
        below = any(self._useful(child) for child in pci.children if child.name == "pci")
        return below or self._is(pci, "gpu") or self._is(pci, "nic")

    def _is(self, pci: Element, what: str) -> bool:
        """Whether it holds a GPU or a NIC, or, in a file that has none, is a place for one."""
        if any(child.name == what for child in pci.children):
            return True
        whole = self.full if what == "gpu" else self.networked
        begins = attributes.GPU if what == "gpu" else attributes.NIC
        return not whole and pci.attributes.get("class", "").startswith(begins)

    def _pci(self, pci: Element, above: str, host: str) -> None:
        busid = attributes.busid(pci, "busid")
        self._once(pci, host, "busid", busid)
        children = self.inside(pci)
        name = above
        if self._is(pci, "gpu"):
            bandwidth = attributes.pcie(pci, self.found.notes)
            for gpu in [child for child in children if child.name == "gpu"] or [pci]:
                self._gpu(gpu, busid, above, host, bandwidth)
        elif self._is(pci, "nic"):
            bandwidth = attributes.pcie(pci, self.found.notes)
            for nic in [child for child in children if child.name == "nic"] or [pci]:
                self._nic(nic, pci, above, host, bandwidth)
        elif self._useful(pci):
            name = self._name(host, f"pci {busid}")
            bandwidth = attributes.pcie(pci, self.found.notes)
            self.found.graph.add_node(name, kind="switch")
            self.switches += 1
            if self.switches > _MOST_SWITCHES:
                many = f"more than {_MOST_SWITCHES} PCIe switches"
                raise pci.fault(many, "A file of one node is needed.")
            wire(self.found.graph, name, above, "pcie", bandwidth, speeds.PCIE_HOP)
        elif pci.attributes.get("class", "").startswith((attributes.GPU, attributes.NIC)):
            lacks = "gpu" if pci.attributes["class"].startswith(attributes.GPU) else "nic"
            what = f"of class {pci.attributes['class'][:8]} without <{lacks}>; left out, as by NCCL"
            self.found.notes.add(pci.line, what)
        for child in children:
            if child.name == "pci":
                self._pci(child, name, host)

    def _gpu(self, gpu: Element, busid: str, above: str, host: str, bandwidth: float) -> None:
        if len(self.gpus) == _MOST:
            raise gpu.fault(f"more than {_MOST} GPUs", "A file of one node is needed.")
        dev = 0
        if gpu.name == "gpu":
            dev = gpu.integer("dev", 0, attributes.LARGEST)
            self._once(gpu, host, "gpu dev", dev)
            if "sm" in gpu.attributes:
                sm = gpu.integer("sm", 1, 999)
                if self.found.sm not in (None, sm):
                    other = f"sm {sm}, where another GPU has {self.found.sm}"
                    raise gpu.fault(other, "All have to be of one model.")
                self.found.sm = sm
            self.inside(gpu)
        name = self._name(host, f"gpu{dev}" if self.full else f"gpu at {busid}")
        self.gpus.append(Place(name, host, busid, gpu))
        self.order[name] = (self.hosts.index(host), dev, busid)
        self.found.graph.add_node(name, kind="gpu")
        wire(self.found.graph, name, above, "pcie", bandwidth, speeds.PCIE_TO_GPU)

    def _nic(
        self, nic: Element, pci: Element, above: str, host: str, bandwidth: float | None
    ) -> None:
        graph, notes = self.found.graph, self.found.notes
        nets = [net for net in self.inside(nic) if nic.name == "nic" and net.name == "net"]
        nets = [net for net in nets if net.attributes.get("net") != "0"]  # fused into another
        if len(self.found.nics) == _MOST:
            raise nic.fault(f"more than {_MOST} NICs", "A file of one node is needed.")
        if not nets and self.networked:
            notes.add(nic.line, "a NIC without <net>; left out, as by NCCL")
            return
        devs = [net.integer("dev", 0, attributes.LARGEST) for net in nets]
        for dev, net in zip(devs, nets):
            name, known = self.nets.get((host, dev), ("", {}))
            if known == net.attributes and bandwidth is None and len(nets) == 1:
                # The NIC of a socket is listed under each CPU: it is one, near to all.
                speed = self.found.nics[name].bandwidth or speeds.UNKNOWN_NET
                wire(graph, name, above, "pcie", speed, speeds.PCIE_HOP)
                return
            self._once(net, host, "net dev", dev)
        rates = [attributes.net(net, notes) for net in nets]
        name = f"nic at {nic.line}.{len(self.found.nics)}"
        for dev, net in zip(devs, nets):
            self.nets[host, dev] = (name, net.attributes)
        names = " ".join(net.attributes.get("name", "").lower() for net in nets)
        kind = attributes.network(names, pci.attributes.get("class", ""))
        late = [said for net in nets if (said := attributes.latency(net))]
        made = Nic(sum(rates) or None, kind, max(late, default=None))
        self.found.nics[name] = made
        self.order[name] = (self.hosts.index(host), min(devs, default=0), f"{len(self.order):9}")
        graph.add_node(name, kind="nic")
        speed = bandwidth or made.bandwidth or speeds.UNKNOWN_NET
        wire(graph, name, above, "pcie", speed, speeds.PCIE_HOP)

    def sockets(self) -> None:
        """Joins the CPUs of a host, each with each other one."""
        for cpus in self.cpus.values():
            rates = [attributes.socket(cpu, self.found.notes) for _, cpu in cpus if len(cpus) > 1]
            for i, rate in enumerate(rates):
                for other, _ in cpus[:i]:
                    a, b = other, cpus[i][0]
                    wire(self.found.graph, a, b, "socket", rate, speeds.SOCKET_HOP)

    def ordered(self) -> Found:
        """GPUs and NICs host by host, by dev; places of GPUs as they are on the bus."""
        found = self.found
        gpus = sorted((place.name for place in self.gpus), key=lambda name: self.order[name])
        nics = sorted(found.nics, key=lambda name: self.order[name])
        names = {nic: f"nic{i}" for i, nic in enumerate(nics)}
        if not self.full:
            names |= {gpu: f"gpu{i}" for i, gpu in enumerate(gpus)}
        found.graph = nx.relabel_nodes(found.graph, names)
        found.gpus = [names.get(gpu, gpu) for gpu in gpus]
        found.nics = {names[nic]: found.nics[nic] for nic in nics}
        found.bare = not self.full
        if found.bare:
            self.gpus = []  # they have no NVLinks
        self._hosts(gpus)
        return found

    def _hosts(self, gpus: list[str]) -> None:
        devs: dict[int, list[int]] = {}
        for gpu in gpus:
            host, dev, _ = self.order[gpu]
            devs.setdefault(host, []).append(dev)
        counts = sorted(len(of) for of in devs.values())
        if counts and counts[0] != counts[-1]:
            raise MachineError(
                f"{self.found.file}: a host with {counts[0]} GPUs and one with {counts[-1]}. All "
                "hosts of a node need as many; <gpu> is missing somewhere."
            )
        self.found.hosts = len(devs) or 1
        for of in devs.values() if self.full else ():
            missing = [dev for dev in range(min(max(of), 2 * _MOST)) if dev not in of]
            if missing:
                numbers = ", ".join(map(str, missing[:8])) + ("..." if missing[8:] else "")
                self.found.notes.add(0, f"there is no gpu dev {numbers}; the node has none, then")


def _below(element: Element) -> list[Element]:
    return [element] + [e for child in element.children for e in _below(child)]
