"""What a training run is: every number that decides its result, in one value that JSON can hold."""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collc.analysis.mesh import parse_mesh
from collc.errors import CheckpointError, CollcError, DataError, MeshError

if TYPE_CHECKING:
    import jax

CONFIG = "config.json"


@dataclass(frozen=True)
class TrainConfig:
    """A run of `collc train`; the defaults get below the bigram entropy in minutes on two cores.

    Two runs with equal `identity()` on the same corpus, machine and jax version give the same bits.
    """

    mesh: str = "host=2,gpu=4"
    schedules: Mapping[str, str] = field(default_factory=lambda: {"gpu": "ring", "host": "tree"})
    model: str = "small"  # a name in collc.models.transformer.SIZES
    batch: int = 32  # examples of a step, over all devices
    seq: int = 128  # bytes that an example predicts
    steps: int = 1500
    lr: float = 4e-3  # the peak, after a linear warm-up and before a cosine down to a twentieth
    weight_decay: float = 0.05
    seed: int = 0
    # What follows does not change what is learned.
    folder: Path | None = None  # of the run; None: a fresh one below runs/
    resume: bool = False
    demo: bool = False
    save_every: int = 250
    evaluate_every: int = 250
    evaluation_batches: int = 64  # the most that a validation reads; the final one: four times that
    side_by_side: int = 20  # steps run both ways at the end; 0: none

    def __post_init__(self) -> None:
        for name in ("batch", "seq", "steps", "save_every", "evaluate_every", "evaluation_batches"):
            if getattr(self, name) < 1:
                raise DataError(f"{name} must be at least 1, but is {getattr(self, name)}.")
        if self.side_by_side < 0 or self.seed < 0:
            raise DataError("side_by_side and seed must not be negative.")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise DataError(f"lr must be a positive number, but is {self.lr}.")

    def identity(self) -> dict[str, Any]:
        """The fields that decide what is learned; a resumed run must agree in all of them."""
        names = ("mesh", "model", "batch", "seq", "steps", "lr", "weight_decay", "seed")
        return {
            **{name: getattr(self, name) for name in names},
            "schedules": dict(self.schedules),
        }

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON can hold them; `from_json` is the inverse."""
        folder = None if self.folder is None else str(self.folder)
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "schedules": dict(self.schedules), "folder": folder}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "TrainConfig":
        known = {field.name for field in dataclasses.fields(cls)}
        given = {name: value for name, value in fields.items() if name in known}
        folder = given.get("folder")
        return cls(**{**given, "folder": None if folder is None else Path(folder)})


def demo(**given: Any) -> TrainConfig:
    """The run of `make demo`: a smaller model, fewer steps. `given` fields replace its own."""
    fields = dict(
        model="mini",
        steps=400,
        lr=6e-3,
        save_every=100,
        evaluate_every=100,
        evaluation_batches=16,
        demo=True,
    )
    return TrainConfig(**{**fields, **given})


def resumed(folder: str | Path, **given: Any) -> TrainConfig:
    """The config to resume the run in `folder` with, and the fields that the caller gives on top.

    Training refuses those that would change what is learned. Raises CheckpointError if the folder
    holds no run.
    """
    folder = Path(folder)
    try:
        config = TrainConfig.from_json(
            json.loads((folder / CONFIG).read_text(encoding="utf-8"))["config"]
        )
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} holds no run to resume: it has no {CONFIG}. Check the folder's name."
        ) from error
    except (OSError, ValueError, KeyError, TypeError, CollcError) as error:
        raise CheckpointError(
            f"{folder / CONFIG} is not the config of a run ({error!r}). Start a fresh run."
        ) from error
    return dataclasses.replace(config, **{**given, "folder": folder, "resume": True})


def make_mesh(text: str) -> "jax.sharding.Mesh":
    """The mesh of a run over jax's first devices. Raises MeshError if there are too few."""
    import jax

    shape = parse_mesh(text)
    needed, devices = math.prod(shape.values()), jax.devices()
    if needed > len(devices):
        raise MeshError(
            f"The mesh {text} needs {needed} devices, but jax has {len(devices)} "
            f"({devices[0].platform}). Virtual CPU devices are made by setting JAX_PLATFORMS=cpu "
            f"and XLA_FLAGS=--xla_force_host_platform_device_count={needed} before jax is "
            "imported; or choose a smaller mesh."
        )
    auto = (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.make_mesh(
        tuple(shape.values()), tuple(shape), axis_types=auto, devices=devices[:needed]
    )
