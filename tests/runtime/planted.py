"""A host whose files and environment are a test's own, and what is found there."""

from collections.abc import Mapping
from pathlib import Path

from collc.runtime.doctor.devices import Probe
from collc.runtime.doctor.finding import Finding, Level
from collc.runtime.doctor.host import Host

CPU, GPU = ("cpu", "cpu"), ("gpu", "NVIDIA H100")
ON_CPU, ON_GPU = Probe((CPU,)), Probe((GPU,))
PORT = "/sys/class/infiniband/{}/ports/1"


def host(root: Path, files: Mapping[str, object] | None = None, **environment: str) -> Host:
    for name, text in (files or {}).items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return Host(environment, root)


def gpus(n: int) -> dict[str, object]:
    return {f"/proc/driver/nvidia/gpus/0000:{i:02x}:00.0/information": "" for i in range(n)}


def port(device: str = "mlx5_0", rate: str = "400 Gb/sec (4X NDR)", **changed) -> dict[str, object]:
    """A port that is well, with the counters that every driver has, and a state or counters changed."""
    folder = PORT.format(device)
    files = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": rate}
    files |= {name: changed.pop(name) for name in list(changed) if name in files}
    own = {"counters/symbol_error": 0, "counters/port_xmit_data": 123456}
    own |= {"hw_counters/out_of_sequence": 0, "hw_counters/lifespan": 10}
    for name, n in changed.items():
        own[f"counters/{name}" if f"counters/{name}" in own else f"hw_counters/{name}"] = n
    return {f"{folder}/{name}": text for name, text in {**files, **own}.items()}


def only(findings: list[Finding], level: str, *words: str) -> None:
    """One finding of that level, with these words in what it says or in its remedy."""
    assert [f.level for f in findings] == [level], findings
    text = f"{findings[0].found} {findings[0].remedy}"
    assert all(word in text for word in words), text


def well(findings: list[Finding]) -> None:
    assert {f.level for f in findings} == {Level.OK}, findings
