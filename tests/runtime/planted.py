"""A host whose files and environment are a test's own."""

from collections.abc import Mapping
from pathlib import Path

from collc.runtime.doctor.host import Host


def host(root: Path, files: Mapping[str, object] | None = None, **environment: str) -> Host:
    for name, text in (files or {}).items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return Host(environment, root)
