"""NVLinks of NCCL's topology: who leads where, once it is known where the GPUs are."""

from dataclasses import dataclass

from collc.machine import speeds
from collc.machine.readers import attributes
from collc.machine.readers.elements import Element
from collc.machine.readers.found import NVSWITCH, Found

_HIDDEN = "fffffff:ff:ff.0"  # an NVSwitch that the host does not see
_MOST = 1024


@dataclass(frozen=True)
class Place:
    """Where a GPU is: its name, its host, its place on the bus, its element."""

    name: str
    host: str
    busid: str
    gpu: Element


def connect(found: Found, places: list[Place]) -> None:
    """Enters the NVLinks of all GPUs. Raises MachineError for one that leads nowhere."""
    at = {(place.host, place.busid): place.name for place in places}
    for place in places:
        links = [child for child in place.gpu.children if child.name == "nvlink"]
        seen = set()
        for link in links:
            target = attributes.busid(link, "target")
            if target in seen:
                raise link.fault(f"a second nvlink to {target}", "It needs one, with both counts.")
            seen.add(target)
            to = _end(found, link, target, place.host, at)
            if to == place.name:
                raise link.fault(f"target {target} is this GPU itself", "It needs another one's.")
            if to:
                count = link.integer("count", 1, _MOST)
                found.nvlinks[place.name, to] = found.nvlinks.get((place.name, to), 0) + count
        if links:
            found.rate = speeds.nvlink(found.sm)
            if found.sm is None:
                found.notes.add(place.gpu.line, "sm is not said; 20 GB/s a NVLink are assumed")
    _both_ways(found, places)


def _end(
    found: Found, link: Element, target: str, host: str, at: dict[tuple[str, str], str]
) -> str:
    """The name of what a link leads to; "" for what is left out."""
    kind = link.attributes.get("tclass", "")
    if kind.startswith(attributes.BRIDGE):
        found.notes.add(link.line, "an nvlink to a CPU; left out")
        return ""
    if target == _HIDDEN or kind.startswith(attributes.NVSWITCH):
        return NVSWITCH  # all of them are one, as for NCCL
    if (host, target) not in at:
        there = ", ".join(sorted(busid for of, busid in at if of == host)[:16])
        raise link.fault(f"target {target}, where no GPU is", f"GPUs are at {there}.")
    return at[host, target]


def _both_ways(found: Found, places: list[Place]) -> None:
    gpus = {place.name: place.gpu for place in places}
    for (a, b), count in found.nvlinks.items():
        back = found.nvlinks.get((b, a), 0)
        if b != NVSWITCH and back != count:
            raise gpus[a].fault(f"{count} nvlinks to {b}, and {back} back", "A wire has two ends.")
