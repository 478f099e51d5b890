"""Lines of a job with the time at which they came."""

import io
import time

from rich.console import Console

from collc.runtime.launch.logs import Logs


class Record(io.TextIOBase):
    """What is written to it, line by line; ``lines``: the time of the monotonic clock, and the line."""

    def __init__(self) -> None:
        self.lines: list[tuple[float, str]] = []

    def write(self, text: str) -> int:
        now = time.monotonic()
        self.lines += [(now, line) for line in text.splitlines()]
        return len(text)

    def logs(self) -> Logs:
        """For a job that is to be recorded here."""
        console = Console(file=self, width=1000, color_system=None)  # pyright: ignore
        return Logs(console, console)

    def between(self, begin: float, end: float) -> list[tuple[float, str]]:
        """Seconds after the beginning, and lines."""
        return [(at - begin, line) for at, line in self.lines if begin <= at < end]
