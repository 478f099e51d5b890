"""What hosts write, line by line, the host's name before each."""

import codecs
import re
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

LONGEST = 16_384  # characters of a line; what is longer is shown in pieces
PATIENCE_S = 1.0  # after which the beginning of a line is shown without its end
STYLES = ("cyan", "magenta", "yellow", "green", "blue", "bright_cyan", "bright_magenta")
_COLOUR = r"\x1b\[[0-9;:]*m"
_CONTROL = re.compile(rf"{_COLOUR}|[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


class Lines:
    """Cuts what one stream brings into lines, whatever it brings.

    Bytes that are no UTF-8 are shown as ``\\xff``. A carriage return begins the line anew, as on a
    terminal, so that progress bars show where they are. Nothing else is left out.

    >>> lines = Lines()
    >>> lines.feed(b"one\\ntw", 0.0), lines.feed(b"o\\xff\\r\\n 5%\\r10%", 0.1), lines.late(1.2)
    (['one'], ['two\\\\xff'], ['10%'])
    """

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("backslashreplace").decode
        self._rest = ""
        self._since = 0.0  # when the rest began
        self._begun = False  # the beginning of this line has been shown

    def feed(self, data: bytes, now: float, end: bool = False) -> list[str]:
        """The lines that ``data`` completes; at the ``end`` also one without an end. ``now`` in s."""
        if not self._rest:
            self._since = now
        *whole, rest = (self._rest + self._decode(data, end)).split("\n")
        found: list[str] = []
        for line in whole:
            self._take(_visible(line), found)
            self._begun = False
        # A carriage return at the end may yet become the end of a line.
        self._rest = _visible(rest) + "\r" * rest.endswith("\r")
        if whole:
            self._since = now
        if len(self._rest) > LONGEST:
            cut = len(self._rest) // LONGEST * LONGEST
            self._take(self._rest[:cut], found)
            self._rest = self._rest[cut:]
        if end:
            found += self.late(float("inf"))
        return found

    def late(self, now: float) -> list[str]:
        """The beginning of a line whose end has not come in time."""
        found: list[str] = []
        if self._rest.strip("\r") and now - self._since >= PATIENCE_S:
            self._take(_visible(self._rest), found)
            self._rest = ""
        return found

    def _take(self, line: str, found: list[str]) -> None:
        if line or not self._begun:  # an end that comes alone is no line
            found += [line[i : i + LONGEST] for i in range(0, len(line), LONGEST)] or [""]
        self._begun = True


def _visible(line: str) -> str:
    """What a terminal shows of a line with carriage returns: what follows the last one."""
    return line.rstrip("\r").rpartition("\r")[2]


class Logs:
    """Where a job writes: lines of hosts to ``out`` and ``err`` as they came, its own to ``err``.

    Colours are for terminals, unless NO_COLOR is set. What cannot be written any more is dropped, and
    ``broken`` says why: hosts must not be blocked by a reader who has left.
    """

    def __init__(self, out: Console | None = None, err: Console | None = None) -> None:
        self.out = out or Console(highlight=False)
        self.err = err or Console(stderr=True, highlight=False)
        self.broken: OSError | None = None
        self._last = self.out
        self._prefixes: dict[tuple[str, bool], str] = {}
        self._coloured = {
            console: console.color_system is not None and not console.no_color
            for console in (self.out, self.err)
        }

    def name(self, hosts: Sequence[str]) -> None:
        """Tells the hosts whose lines will come: their prefixes are equally wide."""
        width = max(map(len, hosts))
        for i, host in enumerate(hosts):
            text = Text(f"{host:<{width}} | ", STYLES[i % len(STYLES)])
            for error, console in ((False, self.out), (True, self.err)):
                with console.capture() as captured:
                    console.print(text, end="", soft_wrap=True)
                self._prefixes[host, error] = captured.get()

    def line(self, host: str, text: str, error: bool) -> None:
        """A line that a host wrote, to stderr if ``error``."""
        console = self.err if error else self.out
        coloured = self._coloured[console]
        self._write(console, f"{self._prefixes[host, error]}{shown(text, coloured)}\n")

    def say(self, text: str, style: str = "bold", quoted: Sequence[str] = ()) -> None:
        """Something about the job itself, and lines of a host below it."""
        with self.err.capture() as captured:
            self.err.print(Text.assemble(("collc launch: ", "bold"), (text, style)), soft_wrap=True)
        lines = "".join(f"    {shown(line, self._coloured[self.err])}\n" for line in quoted)
        self._write(self.err, captured.get() + lines)
        self.flush()

    def flush(self) -> None:
        """Hands on what has been written."""
        if self.broken is None:
            try:
                self._last.file.flush()
            except OSError as error:
                self.broken = error

    def _write(self, console: Console, text: str) -> None:
        if console is not self._last:
            self.flush()  # on a terminal both are one: the order stays
            self._last = console
        if self.broken is None:
            try:
                console.file.write(text)
            except OSError as error:
                self.broken = error


def shown(line: str, coloured: bool = False) -> str:
    r"""The line with nothing in it that moves a cursor; its own colours only where there are some.

    >>> shown("a\x1b[31mb\x1b[2Jc\x07")
    'ab\\x1b[2Jc\\x07'
    """

    def safe(match: re.Match[str]) -> str:
        found = match[0]
        if len(found) > 1:
            return found if coloured else ""
        return found.encode("unicode_escape").decode()

    text = _CONTROL.sub(safe, line)
    return f"{text}\x1b[0m" if coloured and "\x1b[" in text else text
