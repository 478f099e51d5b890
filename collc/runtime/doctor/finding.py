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
    """The names in one line.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def message(problem: BaseException) -> str:
    """What an exception says, in one line, with its type where that is not collc's own.

    >>> message(CollcError("a\\nb")), message(RuntimeError("gone"))
    ('a b', 'RuntimeError: gone')
    """
    text = " ".join(str(problem).split())
    return text if isinstance(problem, CollcError) else f"{type(problem).__name__}: {text}"
