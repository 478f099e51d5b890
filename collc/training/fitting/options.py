"""What a run is asked for, checked before anything is loaded, written or compiled."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from collc.errors import DataError
from collc.planning.agree import distributed
from collc.planning.plan import Plan
from collc.runtime.patience import seconds
from collc.runtime.watchdog.watchdog import TIMEOUT_S
from collc.training.checkpoints.portable import places, record
from collc.training.checkpoints.resize import rules_for

if TYPE_CHECKING:
    from collc.training.fitting.event import Event

PARTS = 10  # a run saves and evaluates ten times, unless told otherwise


@dataclass(frozen=True)
class Options:
    """What a run was asked for, with its defaults filled in.

    tokens: in a batch; without, speed is in steps. notes: more for each checkpoint to note.
    """

    steps: int
    evaluate: Callable[..., Any] | None
    evaluate_every: int
    save_every: int
    keep: int = 2
    callbacks: tuple[Callable[["Event"], object], ...] = ()
    max_skipped: int = 10
    tokens: int | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


def options(
    steps: Any,
    evaluate: Any,
    evaluate_every: Any,
    save_every: Any,
    keep: Any,
    callbacks: Any,
    max_skipped: Any,
    tokens: Any,
) -> Options:
    """The options of ``fit``'s arguments. Raises DataError for what cannot be, or has no effect."""
    steps = count("steps", steps, 1)
    if evaluate is not None and not callable(evaluate):
        raise DataError(f"evaluate is {evaluate!r}: a function of the state is needed.")
    if evaluate is None and evaluate_every is not None:
        raise DataError("evaluate_every has no effect without evaluate. Give evaluate, or neither.")
    part = max(1, steps // PARTS)
    return Options(
        steps=steps,
        evaluate=evaluate,
        evaluate_every=part if evaluate_every is None else count("evaluate_every", evaluate_every),
        save_every=part if save_every is None else count("save_every", save_every),
        keep=2 if keep is None else count("keep", keep),
        callbacks=_functions(callbacks),
        max_skipped=10 if max_skipped is None else count("max_skipped", max_skipped),
        tokens=None if tokens is None else count("tokens", tokens),
    )


def count(name: str, value: Any, least: int = 1) -> int:
    """A whole number, numpy's too. Raises DataError for others."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise DataError(f"{name} is {value!r}: a whole number from {least} on is needed.")
    return int(value)


def patience(watchdog: Any) -> float | None:
    """Seconds without progress after which the job ends, None for no watchdog.

    Raises DataError for what is no number of seconds above 0.
    """
    if watchdog is None:
        return TIMEOUT_S if distributed() else None
    return None if watchdog == math.inf else seconds("watchdog", watchdog, DataError)


def _functions(callbacks: Any) -> tuple[Any, ...]:
    if not isinstance(callbacks, Iterable):
        raise DataError(f"callbacks is {callbacks!r}: a list of functions of an event is needed.")
    found = tuple(callbacks)
    for callback in found:
        if not callable(callback):
            raise DataError(f"callbacks has {callback!r}: functions of an event are needed.")
    return found


def check_kinds(step: Any, plan: Any, console: Any, **switches: Any) -> None:
    """Raises DataError for arguments of another kind; ``switches`` are True or False."""
    if not callable(step):
        raise DataError(f"step is {step!r}: a jitted function or a collc.Switch is needed.")
    if plan is not None and not isinstance(plan, Plan):
        raise DataError(f"plan is {plan!r}: a plan is needed, see collc.plan.")
    if console is not None and not isinstance(console, Console):
        raise DataError(f"console is {console!r}: a rich.console.Console is needed.")
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise DataError(f"{name} is {value!r}: True or False is needed.")


def folder_of(folder: Any, resume: bool, **others: Any) -> Path | None:
    """The folder, by its whole path. Raises DataError for what has no effect without one."""
    if folder is not None:
        if not isinstance(folder, str | Path) or not str(folder).strip():
            raise DataError(
                f"folder is {folder!r}: the path of a folder is needed, or None to write nothing."
            )
        return Path(folder).absolute()  # a callback may change the working directory
    for name, value in {"resume": resume, **others}.items():
        if value is not None and value is not False:
            raise DataError(
                f"{name} has no effect without a folder. Give folder=..., or leave it out."
            )
    return None


def check_resize(resize: Any, resume: bool, arrays: Any) -> None:
    """Raises DataError or CheckpointError for rules that no checkpoint of this state could need."""
    if resize is None:
        return
    if not isinstance(resize, Mapping):
        raise DataError(
            f'resize is {resize!r}: rules by patterns of paths are needed, as {{"count/*": "sum"}}.'
        )
    if not resume:
        raise DataError("resize has no effect without resume=True.")
    found = {place.path: record(place) for place in places(arrays)}
    rules_for(resize, [path for path, x in found.items() if x.kind == "ranked"], list(found))
