"""What a host says of itself in files and variables: below a root, so that tests can plant them."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Host:
    """Reads files below ``root``. What is absent or cannot be read is None, never a number."""

    environment: Mapping[str, str]
    root: Path = Path("/")

    def path(self, name: str) -> Path:
        """Where ``/sys/...``, ``/proc/...`` or ``/etc/...`` is."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str | None:
        """What the file holds, without blanks around it."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        """The integer in the file; ``0x`` marks a hexadecimal one."""
        text = self.text(name)
        try:
            return None if text is None else int(text, 0)
        except ValueError:
            return None

    def entries(self, name: str) -> list[str]:
        """The names in a folder, in order; none if it is not there."""
        try:
            return sorted(os.listdir(self.path(name)))
        except OSError:
            return []

    def numbers(self, folder: str) -> dict[str, int]:
        """The integers in a folder's files, by file name."""
        found = {name: self.number(f"{folder}/{name}") for name in self.entries(folder)}
        return {name: value for name, value in found.items() if value is not None}


def asked(environment: Mapping[str, str], name: str) -> bool:
    """Whether a variable switches something on.

    >>> asked({"A": "1"}, "A"), asked({"A": "false"}, "A"), asked({}, "A")
    (True, False, False)
    """
    return environment.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


def integer(text: str | None) -> int | None:
    """The number that a text begins with.

    >>> integer("8(x2)"), integer("many"), integer(None)
    (8, None, None)
    """
    digits = re.match(r"[0-9]{1,20}", text or "")
    return int(digits[0]) if digits else None
