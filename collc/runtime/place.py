"""What ``collc launch`` tells each process by its environment, and what their exit codes mean."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from collc.errors import PlanError

# The exit code of a process whose watchdog ended the job: EX_TEMPFAIL, a supervisor may restart it.
RESTART = 75


@dataclass(frozen=True)
class Place:
    """A process among those of a job. ``restarts``: how often the job was started anew before."""

    coordinator: str  # address:port
    processes: int
    process: int
    host: str
    restarts: int = 0

    def environment(self) -> dict[str, str]:
        """The variables that say this."""
        return {_variable(field.name): str(getattr(self, field.name)) for field in fields(self)}


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Where this process is, None if ``collc launch`` did not start it.

    Raises PlanError for variables that say it in part, or no numbers where numbers should be.
    """
    given = {f.name: environment.get(_variable(f.name)) for f in fields(Place)}
    if not any(given.values()):
        return None
    try:
        return Place(
            str(given["coordinator"] or _missing("coordinator")),
            int(given["processes"] or _missing("processes")),
            int(given["process"] or _missing("process")),
            str(given["host"] or _missing("host")),
            int(given["restarts"] or 0),
        )
    except ValueError as error:
        raise PlanError(
            f"the environment has variables of collc launch that cannot be ({error}). Start the "
            "processes by collc launch, or unset all that begin with COLLC_ but COLLC_CACHE."
        ) from error


def _variable(name: str) -> str:
    return f"COLLC_{name.upper()}"


def _missing(name: str) -> str:
    raise ValueError(f"{_variable(name)} is not set")
