"""A finding: what a check has found, how bad it is, and what to do about it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from collc.errors import CollcError


class Level(StrEnum):
    """``warning``: slow, or likely to fail. ``error``: a run would fail, or be wrong."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """``remedy``: what to do. Only where all is well it may be empty."""

    check: str
    level: Level
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.level != Level.OK and not self.remedy:
            raise ValueError(f"{self.check}: a {self.level} needs a remedy")


Said = tuple[str, Finding]  # the host, and what was found there


def ok(check: str, found: str) -> Finding:
    """All is well."""
    return Finding(check, Level.OK, found)


def note(check: str, found: str, remedy: str) -> Finding:
    """Worth knowing; a run would be well all the same."""
    return Finding(check, Level.NOTE, found, remedy)


def warning(check: str, found: str, remedy: str) -> Finding:
    """Slow, or likely to fail."""
    return Finding(check, Level.WARNING, found, remedy)


def error(check: str, found: str, remedy: str) -> Finding:
    """A run would fail, or be wrong."""
    return Finding(check, Level.ERROR, found, remedy)


def listed(names: Sequence[str], most: int = 8) -> str:
    """The names in one line, long ones shortened.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(map(short, names[:most]))}{more}"


def short(text: str, most: int = 200) -> str:
    """A text of a variable or a file, cut where it is longer than a reader needs.

    >>> short("cuda", most=6), short("a" * 5000, most=6)
    ('cuda', 'aaaaaa... (5,000 characters)')
    """
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def count(n: int, noun: str) -> str:
    """So many of something.

    >>> count(1, "task"), count(2000, "task"), count(2, "process")
    ('1 task', '2,000 tasks', '2 processes')
    """
    ending = "es" if noun.endswith("s") else "s"
    return f"{n:,} {noun}{ending * (n != 1)}"


def message(problem: BaseException) -> str:
    """What an exception says, its lines in one, with its type where that is not collc's own.

    >>> message(CollcError("two differ:\\n  flags\\n  versions\\n\\nDo. Then")), message(OSError("gone"))
    ('two differ: flags; versions; Do. Then', 'OSError: gone')
    """
    lines = [" ".join(line.split()) for line in str(problem).splitlines() if line.strip()]
    # A line that ends a sentence, or leads to the next one, needs no mark of its own.
    text = "".join(f"{a} " if a[-1] in ".:;,!?" else f"{a}; " for a in lines[:-1])
    text += lines[-1] if lines else ""
    return text if isinstance(problem, CollcError) else f"{type(problem).__name__}: {text}"
