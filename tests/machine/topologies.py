"""Topology files for tests: those in files/, small ones, and what one asks of the machines read."""

from pathlib import Path

import pytest

from collc.errors import MachineError
from collc.machine.text import machine

FILES = Path(__file__).with_name("files")
NAMES = sorted(path.name for path in FILES.iterdir())


def rates(made):
    """Bytes a second of each class of link, each once."""
    found = {}
    for link in made.node.links:
        found.setdefault(link.kind, set()).add(round(1 / link.beta))
    return {kind: sorted(of) for kind, of in found.items()}


def way(made, a, b):
    return [made.node.links[i].name for i in made.node.within[a, b] if i >= 0]


def out(made, a):
    return [made.node.links[i].name for i in made.node.leave[a] if i >= 0]


def latency(made, a, b):
    return round(float(made.node.latency[a, b]) * 1e6, 3)


def assumes(made, *sentences):
    return all(any(s in found for found in made.assumed) for s in sentences)


HEAD = '<system version="1"><cpu numaid="0" arch="x86_64" vendor="AuthenticAMD">'
PCI = '<pci busid="0000:0{0}:00.0" class="0x030200" link_speed="16 GT/s" link_width="16">'
GPUS = "".join(f'{PCI.format(i)}<gpu dev="{i}" sm="80">{{{i}}}</gpu></pci>' for i in range(2))
LINK = '<nvlink target="0000:0{}:00.0" count="{}" tclass="0x030200"/>'
PAIR = HEAD + GPUS.format(LINK.format(1, 4), LINK.format(0, 4)) + "</cpu></system>"


def written(tmp_path, text, name="topo.xml"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def without(tmp_path, name, old, new):
    return written(tmp_path, (FILES / name).read_text().replace(old, new))


def refused(tmp_path, text, *says, name="topo.xml", also=""):
    with pytest.raises(MachineError) as e:
        machine(written(tmp_path, text, name) + also)
    for part in says:
        assert part in str(e.value)
    assert name in str(e.value)
