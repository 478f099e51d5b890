"""How a host failed, and which of several that fail together made the others fail."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from collc.runtime.place import RESTART

# What a process says that fails because another one did. Gloo's greeting is no such thing.
_ECHO = re.compile(
    r"gloo(?!\] Rank \d+ is connected)|coordination.?(service|agent)|distributed service"
    r"|connection (closed|reset|refused)|socket closed|has not come to|process 0 has not said",
    re.IGNORECASE,
)
# The last line of a watchdog that ends the job, which says why.
_VERDICT = re.compile(rf"collc watchdog: .* ends with code {RESTART}, .*?, since (.*?)\.?$")


@dataclass(frozen=True)
class Failure:
    """A host whose process ended badly. ``code``: its exit code, or minus the signal that killed it.

    ``lines``: the last ones that it wrote, to stdout and stderr, oldest first.
    """

    host: str
    code: int
    lines: tuple[str, ...] = ()

    @property
    def status(self) -> int:
        """The exit code of the job, 128 + the signal where there was one, as shells have it."""
        return self.code if self.code > 0 else 128 - self.code

    @property
    def echo(self) -> bool:
        """Whether it speaks of another host's end."""
        return any(_ECHO.search(line) for line in self.lines)

    @property
    def certain(self) -> bool:
        """Whether no other host can have caused it: a signal killed it, but not JAX's runtime."""
        return self.code < 0 and not (self.code == -signal.SIGABRT and self.echo)

    def __str__(self) -> str:
        if self.code < 0:
            return f"host {self.host} was killed by {name_of(-self.code)}"
        if self.code != RESTART:
            return f"host {self.host} exited with {self.code}"
        found = [said[1] for line in self.lines if (said := _VERDICT.search(line))]
        why = f", since {found[-1]}" if found else ""
        return f"host {self.host} exited with {self.code}: its watchdog ended the job{why}"


def name_of(number: int) -> str:
    """The name of a signal.

    >>> name_of(9), name_of(50)
    ('SIGKILL', 'signal 50')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def cause(failures: Sequence[Failure]) -> Failure:
    """Of failures in the order of time the one that brought the others about, as far as one can tell.

    One killed by a signal comes first, then one that says nothing of others, then any; then a watchdog
    that ended the job, and last whom JAX aborted, since it does that to all when the coordinator ends.
    """

    def rank(failure: Failure) -> int:
        if failure.certain:
            return 0
        if failure.code == RESTART:
            return 3
        if failure.code == -signal.SIGABRT:
            return 4
        return 2 if failure.echo else 1

    return min(failures, key=rank)  # the first of equals
