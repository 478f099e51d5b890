"""What processes tell each other: where each one is. Through JAX's own key-value service."""

import json
from dataclasses import asdict, dataclass
from typing import Any

RUNNING, DONE, FAILED, ENDING = "running", "done", "failed", "ending"


@dataclass(frozen=True)
class Beat:
    """Where a process is, as it says itself.

    sent: grows with each, so that a new one is told from the last. moved: how often it told of
    progress. why: of one that failed, or that is ending the job, and then ``culprits``, the processes
    to blame.
    """

    host: str
    pid: int
    sent: int = 0
    moved: int = 0
    step: int = 0
    phase: str = "start"
    state: str = RUNNING
    why: str = ""
    culprits: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"step {self.step} ({self.phase})"

    def text(self) -> str:
        """As it lies in the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str) -> "Beat":
        """From the store."""
        found = json.loads(text)
        return Beat(**{**found, "culprits": tuple(found["culprits"])})


class Store:
    """The beats and stacks of one watch, where all processes of a job can read them.

    Any call may wait for ever: JAX sets no limit, and the coordinator may be stopped.
    """

    def __init__(self, client: Any, watch: int) -> None:
        self._client, self._prefix = client, f"collc/watchdog/{watch}"

    def publish(self, process: int, beat: Beat) -> None:
        """In the place of the process's last beat."""
        self._put(f"beats/{process}", beat.text())

    def beats(self) -> dict[int, Beat]:
        """The last beat of each process that has come."""
        return {process: Beat.read(text) for process, text in self._all("beats").items()}

    def leave_stack(self, process: int, stack: str) -> None:
        """For the log of the process that reports."""
        self._put(f"stacks/{process}", stack)

    def stacks(self) -> dict[int, str]:
        """Of each process that left one."""
        return self._all("stacks")

    def _put(self, key: str, text: str) -> None:
        self._client.key_value_set(f"{self._prefix}/{key}", text, allow_overwrite=True)

    def _all(self, kind: str) -> dict[int, str]:
        found = self._client.key_value_dir_get(f"{self._prefix}/{kind}/")
        return {int(key.rsplit("/", 1)[1]): text for key, text in found}
