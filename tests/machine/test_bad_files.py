"""Topology files that are wrong: what is said of each; and whatever is in one, it ends soon."""

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collc.errors import MachineError
from collc.machine.readers.elements import DEEPEST, MOST
from collc.machine.readers.found import LARGEST
from collc.machine.text import machine

from .topologies import FILES, HEAD, LINK, NAMES, PAIR, PCI, refused, written


@pytest.fixture(autouse=True)
def there(monkeypatch):
    """The files are named as a user beside them would."""
    monkeypatch.chdir(FILES)


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "is empty. NCCL_TOPO_DUMP_FILE="),
        (" \n ", "is empty"),
        ("<system>", "line 1: the file ends, but "),
        (PAIR[:-20], "It is truncated"),
        (PAIR[:200], "It is truncated"),
        ("<system><cpu></system>", "not XML: mismatched tag"),
        ("<system/><system/>", "not XML: junk after document element"),
        ("<a>&x;</a>", "not XML: undefined entity"),
        (b"<a>\xff</a>", "not XML"),
        (b"<a>\0</a>", "not XML"),
        ('<?xml version="1.0" encoding="rot13"?><a/>', "line 1: not XML: "),
        ("<graphs/>", "<graphs>: the outermost element. It has to be <system>"),
        ("<system/>", "there is no GPU: no <gpu>"),
        (HEAD + "</cpu></system>", "there is no GPU"),
        ("<!DOCTYPE a [<!ENTITY b 'c'>]><a/>", "line 1: a DTD or an entity"),
        ('<!DOCTYPE topology SYSTEM "hwloc2.dtd"><topology/>', "It is hwloc's; NCCL's is needed"),
        ("<!DOCTYPE system SYSTEM 'a.dtd'>\n<system/>", "a DTD or an entity"),
        ("<system>" + "<cpu>" * DEEPEST, f"nested {DEEPEST + 1} deep"),
        ("<system>" + "<cpu/>" * MOST, "more than 20,000 elements"),
        (b"<" + b" " * LARGEST, "more than 16 MiB"),
    ],
)
def test_no_topology(tmp_path, text, says):
    refused(tmp_path, text, says)


def test_entities_do_not_blow_up(tmp_path):
    names = "abcdefghij"
    bomb = "".join(f"<!ENTITY {b} '{f'&{a};' * 10}'>" for a, b in pairwise(names))
    text = f"<!DOCTYPE system [<!ENTITY a 'aaaaaaaaaa'>{bomb}]>\n<system>&j;</system>"
    refused(tmp_path, text, "line 1: a DTD or an entity, which a topology has no use for")


@pytest.mark.parametrize(
    "old, new, says",
    [
        ('numaid="0"', "", "<cpu>: numaid is missing. It needs one, as in numaid="),
        ('numaid="0"', 'numaid=""', "<cpu>: numaid is empty"),
        ('numaid="0"', 'numaid="a"', "<cpu>: numaid='a'. It has to be an integer from -1"),
        ('numaid="0"', 'numaid="-2"', "<cpu>: numaid='-2'"),
        ('link_width="16"', 'link_width="-1"', "<pci>: link_width='-1'. It has to be an integer"),
        ('link_width="16"', 'link_width="99"', "from 0 to 32"),
        ('"16 GT/s"', '"0 GT/s"', "<pci>: link_speed='0 GT/s'. It has to be positive"),
        ('"16 GT/s"', '"-8.0 GT/s PCIe"', "<pci>: link_speed='-8.0 GT/s PCIe'"),
        (
            'busid="0000:01:00.0"',
            'busid="0000:00:00.0"',
            "<pci>: busid 0000:00:00.0 is also in line 1",
        ),
        ('busid="0000:01:00.0"', "", "<pci>: busid is missing"),
        ('busid="0000:01:00.0"', 'busid="here"', "<pci>: busid='here'. It has to be hexadecimal"),
        ('dev="1"', 'dev="0"', "<gpu>: gpu dev 0 is also in line 1. Each may be there once"),
        ('dev="1"', "", "<gpu>: dev is missing"),
        ('dev="1"', 'dev="-1"', "<gpu>: dev='-1'"),
        ('dev="1" sm="80"', 'dev="1" sm="90"', "<gpu>: sm 90, where another GPU has 80"),
        ('dev="1" sm="80"', 'dev="1" sm="x"', "<gpu>: sm='x'"),
        ('target="0000:01:00.0"', 'target="0000:00:00.0"', "is this GPU itself. It needs another"),
        ('target="0000:01:00.0"', 'target="0000:07:00.0"', "<nvlink>: target 0000:07:00.0, where"),
        ('target="0000:01:00.0"', "", "<nvlink>: target is missing"),
        ('target="0000:01:00.0"', 'target="0"', "<nvlink>: target='0'"),
        ('count="4"', 'count="0"', "<nvlink>: count='0'. It has to be an integer from 1"),
        ('count="4"', 'count="-4"', "<nvlink>: count='-4'"),
        ('count="4"', 'count="2"', "<gpu>: 2 nvlinks to gpu1, and 4 back. A wire has two ends"),
        (LINK.format(1, 4), "", "<gpu>: 4 nvlinks to gpu0, and 0 back"),
        (LINK.format(1, 4), 2 * LINK.format(1, 4), "<nvlink>: a second nvlink to 0000:01:00.0"),
        ('"AuthenticAMD"', '"GenuineIntel" familyid="x"', "no error with one socket"),
        ("<gpu", "<GPU", "mismatched tag"),
    ],
)
def test_wrong_elements(tmp_path, old, new, says):
    assert old in PAIR
    if says.startswith("no error"):
        assert machine(written(tmp_path, PAIR.replace(old, new, 1))).devices == 2
        return
    refused(tmp_path, PAIR.replace(old, new, 1), says, "line 1")


NIC = '<nic><net name="a" dev="0" speed="1000"/></nic>'


@pytest.mark.parametrize(
    "nics, says",
    [
        (NIC.replace("1000", "0"), "<net>: speed='0'. It has to be an integer from 1"),
        (NIC.replace("1000", "-5"), "<net>: speed='-5'"),
        (NIC.replace("1000", "fast"), "<net>: speed='fast'"),
        (NIC.replace(' dev="0"', ""), "<net>: dev is missing"),
        (NIC.replace("speed", 'latency="-1" speed'), "<net>: latency='-1'. It has to be a number"),
        (NIC + NIC.replace('"a"', '"b"'), "<net>: net dev 0 is also in line 1"),
        (f"</cpu><cpu numaid='0'>{NIC}", "<cpu>: numaid 0 is also in line 1"),
    ],
)
def test_wrong_nics(tmp_path, nics, says):
    refused(tmp_path, PAIR.replace("</cpu>", nics + "</cpu>"), says)


def test_lines_are_those_of_the_file(tmp_path):
    text = (FILES / "dgx-h100.xml").read_text()
    line = next(i for i, row in enumerate(text.splitlines(), 1) if 'gpu dev="5"' in row)
    refused(tmp_path, text.replace('gpu dev="5"', 'gpu dev="4"'), f"line {line}, <gpu>: gpu dev 4")


def test_hosts_of_unlike_size(tmp_path):
    second = f"<cpu numaid='0' host_hash='1'>{PCI.format(5)}<gpu dev='0' sm='80'/></pci></cpu>"
    text = PAIR.replace("</system>", second + "</system>")
    refused(tmp_path, text, "a host with 1 GPUs and one with 2. All hosts of a node need as many")


def test_gpus_that_nothing_joins(tmp_path):
    """Two hosts without NVLink between them are no node."""
    cpu = f"<cpu numaid='0' host_hash='{{}}'>{PCI.format(5)}<gpu dev='0' sm='80'/></pci></cpu>"
    text = f"<system>{cpu.format(1)}{cpu.format(2)}</system>"
    refused(tmp_path, text, "no link leads from host0/gpu0 to host1/gpu0")


MATRIX = (
    "\tGPU0\tGPU1\tNIC0\tCPU Affinity\n"
    "GPU0\t X \tPIX\tSYS\t0-7\n"
    "GPU1\tPIX\t X \tSYS\t0-7\n"
    "NIC0\tSYS\tSYS\t X \n"
)


@pytest.mark.parametrize(
    "old, new, says",
    [
        ("GPU0\tGPU1\tNIC0", "", "no line has the header GPU0 GPU1"),
        ("PIX", "PXX", "line 2, column 10: GPU0 to GPU1 is 'PXX'. Did you mean PXB or PIX?"),
        ("PIX", "NV0", "line 2, column 10: GPU0 to GPU1 is 'NV0'"),
        ("PIX", "PXB", "line 3, column 6: GPU1 to GPU0 is PIX, but GPU0 to GPU1 is PXB in line 2, col"),
        ("SYS", "NV4", "line 2, column 14: GPU0 to NIC0 is NV4. Only GPUs have NVLinks"),
        ("PIX", "X", "line 2, column 10: GPU0 to GPU1 is 'X'. X stands for a device and itself"),
        (" X ", "SYS", "line 2, column 6: GPU0 to GPU0 is 'SYS'"),
        ("NIC0\tSYS\tSYS\t X \n", "", "no row of NIC0. It may be truncated"),
        ("\tSYS\t X \n", "", "line 4, column 6: NIC0 has 1 of 3 entries. It may be truncated"),
        ("GPU1\tPIX", "GPU0\tPIX", "line 3, column 1: a second row of GPU0"),
        ("GPU1\tNIC0", "GPU0\tNIC0", "line 1: GPU0 is twice in the header"),
        ("PIX", "\x1b[4mPIY\x1b[0m", "GPU0 to GPU1 is 'PIY'. Did you mean"),
    ],
)  # fmt: skip
def test_wrong_matrices(tmp_path, old, new, says):
    assert old in MATRIX
    refused(tmp_path, MATRIX.replace(old, new, 1), says, name="topo.txt")


def test_no_matrix(tmp_path):
    refused(tmp_path, b"\xff\xfe\x00", "byte 0 is not UTF-8", name="topo.txt")
    refused(tmp_path, "", "is empty", name="topo.txt")
    many = "\t" + "\t".join(f"GPU{i}" for i in range(200))
    refused(tmp_path, many, "line 1: 200 devices. At most 64 are read", name="topo.txt")


@pytest.mark.parametrize(
    "text, says",
    [
        ("cloud.xml", "cloud.xml: places of 8 GPUs, but no <gpu>. Name the model, as in cloud.xml+h100"),
        ("cloud.xml+h10", "there is no GPU model 'h10'. Did you mean h100"),
        ("cloud.xml+h100+a100", "two GPU models"),
        ("cloud.xml+vm.xml", "two XML files"),
        ("pcie.txt+dgx-h100.txt", "two matrices"),
        ("vm.xml+vm.xml", "vm.xml is there twice"),
        ("vm.xml+a100", "a100 has sm 80, but the GPUs of vm.xml have 90"),
        ("vm.xml+dgx-h100.txt", "vm.xml and dgx-h100.txt: 4 GPUs and 8. They have to be of one host"),
        ("dgx-h100.xml+dgx-h100.txt", "the matrix adds nothing to the XML"),
        ("vm.xml+dgx-h100", "there is no GPU model 'dgx-h100'"),
        ("none.xml", "none.xml: there is no such file"),
        ("./:2", "there is no such file"),
        ("vm.xml gpus=4", "gpus cannot change: the file says what a host has"),
        ("vm.xml link=1GB/s", "link cannot change"),
        ("vm.xml:2 rails", "rails need several NICs in a node, not 1"),
    ],
)  # fmt: skip
def test_parts_that_do_not_go_together(text, says):
    with pytest.raises(MachineError) as e:
        machine(text)
    assert says in str(e.value)


# Whatever is in a file, it is a machine or an error, and soon.


def survives(path, data, also):
    path.write_bytes(data)
    start = time.process_time()
    try:
        made = machine(f"{path}{also}")
    except MachineError as e:
        assert str(e)
    else:
        assert machine(made.text).assumed == made.assumed
    assert time.process_time() - start < 2  # both readings


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch")


@given(st.binary(max_size=300), st.sampled_from(["", "<", "<system>", "\tGPU0\tGPU1\n"]))
@settings(max_examples=100)
def test_any_bytes(scratch, data, start):
    survives(scratch / "any.topo", start.encode() + data, "")


pieces = st.sampled_from(
    [
        b"",
        b"-1",
        b"0",
        b"99999999999",
        b"</pci>",
        b"<pci>",
        b'"',
        b"X",
        b"NV4",
        b"\t",
        b"\n",
        b"GPU0",
    ]
)


@given(st.data())
@settings(max_examples=150)
def test_any_mutation(scratch, data):
    name = data.draw(st.sampled_from(NAMES))
    text = (FILES / name).read_bytes()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        upto = at + data.draw(st.sampled_from([0, 1, 2, 5, 40, 400]))
        new = data.draw(st.one_of(pieces, st.binary(max_size=3), st.just(text[at:upto] * 2)))
        text = text[:at] + new + text[upto:]
    survives(scratch / "some.topo", text, data.draw(st.sampled_from(["", "+h100", ":2"])))


@given(st.data())
@settings(max_examples=150)
def test_any_attribute(scratch, data):
    """Values alone are changed: the file stays XML."""
    name = data.draw(st.sampled_from([name for name in NAMES if name.endswith(".xml")]))
    parts = (FILES / name).read_text().split('"')
    for _ in range(data.draw(st.integers(1, 3))):
        i = 2 * data.draw(st.integers(0, (len(parts) - 3) // 2)) + 1
        other = parts[2 * data.draw(st.integers(0, (len(parts) - 3) // 2)) + 1]
        parts[i] = data.draw(st.sampled_from([other, "", "0", "-1", "1", "0x1", "99999999", "é"]))
    also = data.draw(st.sampled_from(["", "+h100", "+a100:2", ":2"]))
    survives(scratch / "attributes.topo", '"'.join(parts).encode(), also)
