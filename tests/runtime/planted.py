"""A host whose files and environment are a test's own, and what is found there."""

from collections.abc import Mapping
from pathlib import Path

from collc.runtime.doctor.devices import Probe
from collc.runtime.doctor.finding import Finding, Level
from collc.runtime.doctor.host import Host

CPU, GPU = ("cpu", "cpu"), ("gpu", "NVIDIA H100")
ON_CPU, ON_GPU = Probe((CPU,)), Probe((GPU,))


def host(root: Path, files: Mapping[str, object] | None = None, **environment: str) -> Host:
    for name, text in (files or {}).items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return Host(environment, root)


def gpus(n: int) -> dict[str, object]:
    return {f"/proc/driver/nvidia/gpus/0000:{i:02x}:00.0/information": "" for i in range(n)}


def only(findings: list[Finding], level: str, *words: str) -> None:
    """One finding of that level, with these words in what it says or in its remedy."""
    assert [f.level for f in findings] == [level], findings
    text = f"{findings[0].found} {findings[0].remedy}"
    assert all(word in text for word in words), text


def well(findings: list[Finding]) -> None:
    assert {f.level for f in findings} == {Level.OK}, findings
