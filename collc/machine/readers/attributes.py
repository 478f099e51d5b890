"""What the attributes of NCCL's elements mean, each with what is assumed where it does not say."""

import re

from collc.machine import speeds
from collc.machine.readers.elements import Element
from collc.machine.readers.found import Notes, shown

GPU, NIC, NVSWITCH, BRIDGE = "0x03", "0x02", "0x0680", "0x068001"  # how classes of PCI begin
_BUSID = re.compile(r"([0-9a-f]{1,8}):([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-9a-f])", re.I | re.A)
_GTS = re.compile(r"(-?[0-9]{1,4}(?:\.[0-9]{1,4})?)\s*GT/s", re.ASCII)
LARGEST = 2**31 - 1  # of a number


def busid(element: Element, name: str) -> str:
    """A place on the PCI bus, written as Linux does. Raises MachineError."""
    text = element.text(name)
    found = _BUSID.fullmatch(text)
    if not found:
        raise element.fault(f"{name}={shown(text)}", "It has to be hexadecimal, as 0000:07:00.0.")
    domain, bus, device = (int(part, 16) for part in found.groups()[:3])
    return f"{domain:04x}:{bus:02x}:{device:02x}.{found[4].lower()}"


def pcie(pci: Element, notes: Notes) -> float:
    """Bytes a second of an element's wire to what is above it."""
    width = 0
    if pci.attributes.get("link_width", "").strip():
        width = pci.integer("link_width", 0, 32)
    if not width:
        notes.add(pci.line, "link_width is 0 or not said; 16 is assumed, as by NCCL")
    said = pci.attributes.get("link_speed", "").strip()
    found = _GTS.match(said)
    gts = float(found[1]) if found else None
    if gts is not None and gts <= 0:
        raise pci.fault(f"link_speed={shown(said)}", 'It has to be positive, as "16.0 GT/s PCIe".')
    if gts is None or not speeds.known_lane(gts):
        notes.add(pci.line, f"link_speed={shown(said)} is unknown; 8 GT/s is assumed, as by NCCL")
    return speeds.pcie(gts, width or speeds.UNKNOWN_WIDTH)


def socket(cpu: Element, notes: Notes) -> float:
    """Bytes a second from a CPU to another one."""
    of = cpu.attributes
    family, model = (
        cpu.integer(name, 0, LARGEST) if name in of else 0 for name in ("familyid", "modelid")
    )
    rate = speeds.between_sockets(of.get("arch", ""), of.get("vendor", ""), family, model)
    if rate is None:
        notes.add(cpu.line, "the kind of CPU is unknown; 10 GB/s between sockets are assumed")
    return rate or speeds.UNKNOWN_SOCKET


def net(element: Element, notes: Notes) -> float:
    """Bytes a second of a port of a NIC."""
    if element.attributes.get("speed", "-1").strip() == "-1":
        notes.add(element.line, "the driver knows no speed; 10 Gb/s are assumed, as by NCCL")
        return speeds.UNSAID_NET
    return element.integer("speed", 1, 10**8) * 1e6 / 8  # Mbit/s


def latency(element: Element) -> float | None:
    """Seconds from a port of a NIC to another NIC; None where it is not said, or 0 as mostly."""
    text = element.attributes.get("latency", "").strip() or "0"
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text, re.ASCII):
        raise element.fault(f"latency={shown(text)}", "It has to be a number of microseconds.")
    return float(text) * 1e-6 or None


def network(names: str, kind: str = "") -> str:
    """What network a NIC is on, a key of ``speeds.NET``, as far as its names and class of PCI tell."""
    if "rdmap" in names or "efa" in names:
        return "efa"
    if names.startswith(("eth", "en", "ib", "bond")):  # a socket's: IP over whatever it is
        return "tcp"
    return "roce" if kind.startswith("0x0200") else "infiniband"
