"""What callbacks get after each step, and what they can ask for."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from collc.errors import StepError
from collc.training.fitting.carried import VALIDATION
from collc.training.fitting.switch import Switch

if TYPE_CHECKING:
    from collc.training.fitting.running import Loop


@dataclass
class Started:
    """A step that was started; ``found``: its metrics, once it was waited for."""

    step: int
    began: float
    metrics: dict[str, Any]
    skipped: Any
    switches: int | None
    found: dict[str, float] = field(default_factory=dict)


@dataclass
class Event:
    """What a callback gets after each step.

    step: how many are finished. validation: what ``evaluate`` returned, if it was called after this
    step, else None. On several processes, what process 0 asks for is done on all.
    """

    step: int
    validation: dict[str, float] | None
    _started: Started = field(repr=False)
    _loop: "Loop" = field(repr=False)

    @property
    def state(self) -> Any:
        """The state after this step, while the callback runs; later, that of the last step.

        The next step takes its memory where it donates its arguments: copy what is to stay.
        """
        return self._loop.carried.state

    @property
    def metrics(self) -> dict[str, float]:
        """Of this step, those of ``validation`` among them as validation_... Waits for the step."""
        if not self._started.found:
            self._loop.drain()
        return {**self._started.found, **prefixed(self.validation or {})}

    def switch(self, name: str) -> None:
        """Run that step of a ``Switch`` from the next one on. StepError for a name that it has not."""
        step = self._loop.step_function
        if not isinstance(step, Switch):
            raise StepError(
                f"event.switch({name!r}): the step is no collc.Switch. Give fit one, with each step "
                "under its name."
            )
        self._loop.wish["switch"] = step.check(name)

    def stop(self) -> None:
        """End the run after this step, with a checkpoint."""
        self._loop.wish["stop"] = "callback"


def prefixed(found: dict[str, float]) -> dict[str, float]:
    """What ``evaluate`` returned, by the names under which it stands beside a step's metrics."""
    return {VALIDATION + name: x for name, x in found.items()}
