"""Files and a GPU model together: cloud.xml+h100, topo.xml, topo.txt+a100, cloud.xml+topo.txt."""

from collections.abc import Sequence
from dataclasses import dataclass

from collc.errors import MachineError
from collc.machine import speeds
from collc.machine.catalog import Model, by_sm, model
from collc.machine.graph import wire
from collc.machine.readers import matrix, nearness, topology_xml
from collc.machine.readers.found import NVSWITCH, Found, Nic, load
from collc.machine.readers.matrix import NEARNESS, Matrix
from collc.machine.shape import evenly


@dataclass(frozen=True)
class Sources:
    """What the parts of a text are: ``text`` has them in one order, whatever the user's was."""

    text: str
    found: Found
    model: Model | None


def is_file(part: str) -> bool:
    """Whether a part of a text is a file and not a name."""
    return "/" in part or "." in part


def read(parts: Sequence[str]) -> Sources:
    """The node of one file, or of an XML and a matrix, with or without a GPU model.

    Raises MachineError where a file is wrong, two of a kind are given, or one adds nothing.
    """
    for part in parts:
        if parts.count(part) > 1:
            raise MachineError(f"{'+'.join(parts)}: {part} is there twice. Leave one out.")
    files = {part: load(part) for part in parts if is_file(part)}
    xmls = [part for part, data in files.items() if data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"<"]
    matrices = [part for part in files if part not in xmls]
    models = [part for part in parts if not is_file(part)]
    for what, of in (("XML files", xmls), ("matrices", matrices), ("GPU models", models)):
        if len(of) > 1:
            raise MachineError(f"{'+'.join(parts)}: two {what}. One node has one of each at most.")
    gpu = model(models[0]) if models else None
    table = matrix.parse(matrices[0], files[matrices[0]]) if matrices else None
    if xmls:
        found = _whole(topology_xml.read(xmls[0], files[xmls[0]]), table, gpu)
    else:
        assert table
        found = nearness.read(table)
    text = "+".join([*xmls, *matrices, *models])
    return Sources(text, found, _fits(found, gpu, text))


def _whole(xml: Found, table: Matrix | None, gpu: Model | None) -> Found:
    """An XML, with what it lacks from a matrix or a model."""
    if not xml.gpus:
        raise MachineError(
            f"{xml.file}: there is no GPU: no <gpu>, and no pci of class 0x03. Dump it on a host "
            "with GPUs, or take a matrix of nvidia-smi topo -m."
        )
    if table:
        _from_matrix(xml, table)
    elif xml.bare and not gpu:
        raise MachineError(
            f"{xml.file}: places of {len(xml.gpus)} GPUs, but no <gpu>. Name the model, as in "
            f"{xml.file}+h100, or give a matrix, as in {xml.file}+topo.txt."
        )
    elif gpu and not xml.nvlinks and len(xml.gpus) > 1:
        # NCCL asks the driver for NVLinks that a file does not have; so do clouds' files leave them out.
        xml.nvlinks = {(name, NVSWITCH): gpu.nvlinks for name in xml.gpus}
        each = f"{gpu.nvlinks} NVLinks of each {gpu.name} to an NVSwitch are assumed"
        xml.notes.add(0, f"{each}; the file has none")
    elif not xml.nvlinks and len(xml.gpus) > 1:
        xml.notes.add(0, f"no GPU has an nvlink; if they have, name the model: {xml.file}+h100")
    return xml


def _from_matrix(xml: Found, table: Matrix) -> None:
    both = f"{xml.file} and {table.file}"
    if len(table.gpus) != len(xml.gpus):
        raise MachineError(
            f"{both}: {len(xml.gpus)} GPUs and {len(table.gpus)}. They have to be of one host."
        )
    other = nearness.read(table)
    names = dict(zip(other.gpus, xml.gpus))
    used = ["the GPUs"] if xml.bare else []
    if not xml.nvlinks and other.nvlinks:
        ends = {(names.get(a, a), names.get(b, b)): n for (a, b), n in other.nvlinks.items()}
        xml.nvlinks, xml.rate = ends, None
        used.append("the NVLinks")
    if not xml.nics and other.nics:
        for nic in other.nics:
            _attach(xml, nic, _beside(xml, table, int(nic[3:])))
            xml.nics[nic] = other.nics[nic]
        used.append("the NICs")
    if not used:
        raise MachineError(f"{both}: the matrix adds nothing to the XML. Leave it out.")
    xml.notes.add(0, f"of {table.file} only {' and '.join(used)} are taken")


def _beside(xml: Found, table: Matrix, nic: int) -> str:
    """Where a NIC of a matrix is: the switch of the nearest GPU, or its CPU if it is farther."""
    row = table.cells[table.devices.index(table.nics[nic])]
    near = {gpu: NEARNESS.get(row[table.devices.index(gpu)], 5) for gpu in table.gpus}
    nearest = min(near, key=lambda gpu: near[gpu])
    at = above(xml, xml.gpus[table.gpus.index(nearest)])
    while near[nearest] > NEARNESS["PXB"] and xml.graph.nodes[at]["kind"] != "cpu":
        at = above(xml, at)
    return at


def above(found: Found, name: str) -> str:
    """What a device or a switch is wired to on the way to its CPU."""
    return next(iter(found.graph.successors(name)))


def _attach(found: Found, nic: str, at: str) -> None:
    found.graph.add_node(nic, kind="nic")
    wire(found.graph, nic, at, "pcie", 0.0, speeds.PCIE_HOP)  # the model has the bandwidth


def added_nics(found: Found, count: int) -> None:
    """NICs beside the GPUs of a file that has none. Raises MachineError where it has."""
    if found.nics:
        raise MachineError(
            f"{found.file} has {len(found.nics)} NICs already: nics= has no effect. Leave it out."
        )
    gpus, here = len(found.gpus), count * found.hosts
    try:
        evenly(gpus // found.hosts, count)
    except MachineError as e:
        raise MachineError(f"{found.file}: {e}") from e
    for i in range(here):
        _attach(found, f"nic{i}", above(found, found.gpus[i * gpus // here]))
        found.nics[f"nic{i}"] = Nic(None)


def _fits(found: Found, gpu: Model | None, text: str) -> Model | None:
    """The GPU model: the one that is named, or the one that its compute capability tells."""
    if gpu and found.sm and gpu.sm != found.sm:
        raise MachineError(
            f"{text}: {gpu.name} has sm {gpu.sm}, but the GPUs of {found.file} have {found.sm}. "
            "Name theirs, or none."
        )
    if gpu or found.sm is None:
        return gpu
    like = by_sm(found.sm)
    if like:
        what = f"sm {found.sm} is taken to be {like.name}"
        found.notes.add(0, f"{what}; name another as in {text}+{like.name}")
    return like
