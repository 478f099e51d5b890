"""What ``collc compile`` is asked for, and which of its options have an effect."""

from collections.abc import Iterable
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
class Request:
    """The step and the options of its compilation, as the command line writes them.

    ``split``, ``donate``: names of arguments. ``shapes``: the name of their factory. ``batch_size``,
    ``seq``: of a model, examples on each GPU and tokens that an example predicts.
    """

    step: str
    plan: str | None = None
    against: Against | None = None
    xla: tuple[str, ...] = ()
    split: tuple[str, ...] | None = None  # None: batch
    donate: tuple[str, ...] = ()
    shapes: str | None = None
    batch_size: int | None = None
    seq: int | None = None

    @property
    def model(self) -> bool:
        """Whether the step is a model's by name."""
        return ":" in self.step and not self.step.rpartition(":")[0].endswith(".py")

    def check(self) -> None:
        """Raises DataError for an option that would have no effect, StepError for what is no step."""
        if self.model:
            from collc.training.lm.abstract import FAMILIES

            family, _, name = self.step.rpartition(":")
            if family not in FAMILIES:
                raise DataError(
                    f"there is no model {family!r}: {', '.join(FAMILIES)} is one. A step of a file is "
                    f"named with its ending, as {family}.py:{name}."
                )
            _refuse(
                (("--split", self.split), ("--donate", self.donate), ("--shapes", self.shapes)),
                f"the step of a model, {self.step}, which says itself what is its batch and what is "
                "donated",
            )
        else:
            named(self.step)
            _refuse(
                (("--batch-size", self.batch_size), ("--seq", self.seq)),
                "the step of a file, whose factory makes the shapes",
            )
        if self.split and self.plan is None:
            raise DataError(
                "--split has no effect without --plan: the shapes of a plain step say themselves how "
                "they are sharded. Drop it, or give a plan."
            )
        if self.against is Against.NATIVE and self.plan is None:
            raise DataError(
                "--against native has no effect without --plan: the step is XLA's own already. "
                "Say --against blueconnect, or give a plan."
            )
        if self.against is Against.BLUECONNECT and any(BLUECONNECT in each for each in self.xla):
            raise DataError(f"--against blueconnect sets {BLUECONNECT}. Drop it from --xla.")


def _refuse(options: Iterable[tuple[str, object]], on: str) -> None:
    for option, value in options:
        if value:
            raise DataError(f"{option} has no effect on {on}. Drop it.")


def names(option: str, text: str) -> tuple[str, ...]:
    """The names of ``a,b``. Raises DataError."""
    found = tuple(name.strip() for name in text.split(","))
    for name in found:
        if not name.isidentifier():
            raise DataError(f"{option} {text}: {name!r} is no name. Write them as {option} a,b.")
    return found


def factory(text: str) -> str:
    """The one name that ``--shapes`` gives. Raises DataError."""
    if not text.isidentifier():
        raise DataError(
            f"--shapes {text}: name one factory, a function of the step's file, as --shapes my_shapes."
        )
    return text
