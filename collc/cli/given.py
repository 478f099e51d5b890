"""What ``collc compile`` is given, and which of its options have an effect."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from collc.cli.steps import named
from collc.errors import DataError

BLUECONNECT = "xla_gpu_all_reduce_blueconnect_num_devices_per_host"


class Against(StrEnum):
    """What a step is set beside."""

    NATIVE = "native"
    BLUECONNECT = "blueconnect"


@dataclass(frozen=True)
class Given:
    """What was asked for.

    ``options``: the names that each of --batch, --donate and --shapes gives. ``sizes``: "batch" and
    "seq" of a model.
    """

    step: str
    plan: str | None
    against: Against | None
    xla: Sequence[str]
    options: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int | None]

    @property
    def model(self) -> bool:
        """Whether the step is a model's by name."""
        return ":" in self.step and not self.step.rpartition(":")[0].endswith(".py")

    def check(self) -> None:
        """Raises DataError for an option that would have no effect, StepError for what is no step."""
        if not self.model:
            named(self.step)
        for option in self.options if self.model else ():
            raise DataError(
                f"{option} has no effect on the step of a model, {self.step}, which says itself what "
                "is its batch and what is donated. Drop it."
            )
        for name, value in self.sizes.items():
            if value is not None and not self.model:
                option = {"batch": "--batch-size"}.get(name, f"--{name}")
                raise DataError(
                    f"{option} has no effect on the step of a file, whose factory makes the shapes. "
                    "Drop it."
                )
        if "--batch" in self.options and self.plan is None:
            raise DataError(
                "--batch has no effect without --plan: the shapes of a plain step say themselves how "
                "they are sharded. Drop it, or give a plan."
            )
        if self.against is Against.NATIVE and self.plan is None:
            raise DataError(
                "--against native has no effect without --plan: the step is XLA's own already. "
                "Say --against blueconnect, or give a plan."
            )
        if self.against is Against.BLUECONNECT and any(BLUECONNECT in each for each in self.xla):
            raise DataError(f"--against blueconnect sets {BLUECONNECT}. Drop it from --xla.")


def names(option: str, text: str) -> tuple[str, ...]:
    """The names of ``a,b``. Raises DataError."""
    found = tuple(name.strip() for name in text.split(","))
    for name in found:
        if not name.isidentifier():
            raise DataError(f"{option} {text}: {name!r} is no name. Write them as {option} a,b.")
    if option == "--shapes" and len(found) > 1:
        raise DataError(f"--shapes {text}: name one factory.")
    return found
