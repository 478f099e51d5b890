"""What a training run is: every number that decides its result, in one value that JSON can hold."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collc.analysis.mesh import parse_mesh
from collc.errors import CheckpointError, CollcError, DataError

CONFIG = "config.json"


MOST = 2**31 - 2  # of a counter of int32
LIMITS = {
    **dict.fromkeys(("batch", "seq", "steps"), (1, MOST)),
    **dict.fromkeys(("save_every", "evaluate_every", "evaluation_batches"), (1, MOST)),
    "side_by_side": (0, MOST),
    "seed": (0, 2**32 - 1),  # jax takes the lower 32 bits of larger ones
}


def _whole_path(source: str) -> str:
    path, colon, name = source.rpartition(".py:")
    return f"{os.path.abspath(path)}.py:{name}" if colon else source


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
        # Also the types: a config is read from a file that anyone may have edited.
        for name, kind in (("mesh", str), ("model", str), ("resume", bool), ("demo", bool)):
            if not isinstance(value := getattr(self, name), kind):
                raise DataError(f"{name} must be a {kind.__name__}, but is {value!r}.")
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise DataError(f"{name} must be from {least} to {most:,}, but is {value!r}.")
        for name, least in (("lr", math.ulp(0)), ("weight_decay", 0)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not least <= value < math.inf:
                kind = "a positive" if least else "no negative"
                raise DataError(f"{name} must be {kind} number, but is {value!r}.")
        given = self.schedules
        if not isinstance(given, Mapping) or not all(isinstance(x, str) for x in given.values()):
            raise DataError(f"schedules must name one for each axis, but is {given!r}.")
        parse_mesh(self.mesh)
        # By its whole path, a schedule's file is found from any folder that the run is resumed in.
        whole = {axis: _whole_path(source) for axis, source in given.items()}
        object.__setattr__(self, "schedules", whole)

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
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, not the folder of a run. Check its name.")
    try:
        config = TrainConfig.from_json(
            json.loads((folder / CONFIG).read_text(encoding="utf-8"))["config"]
        )
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} holds no run to resume: it has no {CONFIG}. Check the folder's name."
        ) from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, CollcError) as error:
        raise CheckpointError(
            f"{folder / CONFIG} is not the config of a run ({type(error).__name__}: {error}). "
            "Put the right one back, or start a fresh run in another folder."
        ) from error
    return dataclasses.replace(config, **{**given, "folder": folder, "resume": True})
