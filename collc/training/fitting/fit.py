"""`collc.fit`: a step and data, run to the end, with all that a run has to leave behind.

folder/
  metrics.jsonl   a line a step      checkpoints/  see checkpoint.py
  report.json     where time went    tensorboard/  if asked for

A run that fails leaves its report too, and a checkpoint of the steps that it finished.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from collc.errors import CheckpointError, DataError
from collc.planning.agree import TIMEOUT_S
from collc.planning.plan import Plan, check_plan
from collc.runtime.watchdog.watchdog import Watchdog
from collc.training.checkpoints import checkpoint
from collc.training.checkpoints.checkpoint import Checkpoint
from collc.training.checkpoints.files import unwritable, write_text
from collc.training.fitting.carried import Carried
from collc.training.fitting.event import Event as Event
from collc.training.fitting.interrupt import Interrupt
from collc.training.fitting.options import (
    check_kinds,
    check_resize,
    count,
    folder_of,
    options,
    patience,
)
from collc.training.fitting.outputs import CHECKPOINTS, locked, opened
from collc.training.fitting.progress import say
from collc.training.fitting.running import Loop, unwatched
from collc.training.fitting.shares import Profiler, Report, report
from collc.training.fitting.source import Source
from collc.training.fitting.switch import Switch

REPORT = "report.json"


@dataclass(frozen=True)
class Fitted:
    """What a run came to: the state, the steps finished, the metrics of the last one, the report.

    ``report.stopped`` is "" only where all steps were run, else what stopped it before: "SIGINT",
    "SIGTERM" or "callback".
    """

    state: Any
    step: int
    metrics: dict[str, float]
    report: Report


def fit(
    step: Callable[..., Any],
    state: Any,
    data: Callable[[int], Any] | Iterable[Any],
    *,
    steps: int,
    folder: str | Path | None = None,
    evaluate: Callable[..., Any] | None = None,
    evaluate_every: int | None = None,
    save_every: int | None = None,
    keep: int | None = None,
    resume: bool = False,
    resize: Mapping[str, str] | None = None,
    callbacks: Iterable[Callable[[Event], object]] = (),
    max_skipped: int | None = None,
    tokens: int | None = None,
    tensorboard: bool = False,
    profile: int = 3,
    plan: Plan | None = None,
    watchdog: float | None = None,
    console: Console | None = None,
) -> Fitted:
    """Train until ``steps`` steps are finished, those before a resumption among them.

    Args:
      step: jitted, ``step(state, batch) -> (state, metrics)``; or ``step(*modules, batch) -> metrics``
        where the state is an nnx module or a tuple of them, which the step changes. Metrics are a
        scalar loss, or a dict of scalars with the loss as "loss". A ``collc.Switch`` of such.
      data: a function from t to batch t (``feed.batches``), or an iterable. An iterator's position is
        saved if it has ``get_state`` and ``set_state``. It is asked one batch ahead, while the step
        before may still read its own: each batch needs arrays of its own.
      folder: for metrics, checkpoints and the report; without, nothing is written.
      evaluate: of the state (or the modules) a validation loss or dict of scalars, every
        ``evaluate_every`` steps, by default a tenth of all, and at the end. One that Ctrl-C or SIGTERM
        puts off is made up for when the run is resumed.
      save_every: steps from one checkpoint to the next, by default a tenth of all, of which the
        newest ``keep``, 2, are kept. There is one at the end and after Ctrl-C or SIGTERM too.
      resume: go on from the newest checkpoint in ``folder``, or begin where there is none. ``resize``:
        see ``checkpoint.restore``.
      callbacks: called after each step with an `Event`.
      max_skipped: so many steps in a row that are not finite end the run, by default 10, if the state
        counts those that it skips (an integer named ``skipped``, as ``collc.server`` and
        ``collc.skip_nonfinite`` have). Without such a counter, the first loss that is not finite does.
      tokens: in a batch: the bar and the metrics then have tokens a second.
      profile: steps under jax's profiler, for the report.
      plan: batches are split on dimension 0 over its axes; by default the step's, if it names a batch.
        The state is copied to all its devices.
      watchdog: seconds without progress after which the job ends with code 75, see ``Watchdog``; by
        default 600 on several processes, and none on one; ``math.inf`` for none.

    Raises StepError for losses that are not finite, with the step and the last checkpoint; DataError
    for arguments that cannot be, before anything runs, and for data that ends, or does not divide over
    the devices; CheckpointError for a folder that holds another run, and for full disks. What ``step``,
    ``data``, ``evaluate`` and ``callbacks`` raise passes through. Before it does, the steps finished
    are saved, on a single process, and a note on the error says what the last checkpoint is.
    """
    check_kinds(step, plan, console, resume=resume, tensorboard=tensorboard)
    path = folder_of(
        folder, resume, save_every=save_every, keep=keep, resize=resize, tensorboard=tensorboard
    )
    asked = options(
        steps, evaluate, evaluate_every, save_every, keep, callbacks, max_skipped, tokens
    )
    profiled = count("profile", profile, 0)
    seconds = patience(watchdog)
    own, splits = _plan_of(step)
    carried = Carried(state, plan or own)
    check_resize(resize, resume, carried.arrays())
    if max_skipped is not None and carried.skipped() is None:
        raise DataError(
            "max_skipped has no effect: the state has no counter of skipped steps. Use collc.server or "
            "collc.skip_nonfinite, or leave it out."
        )
    source = Source(data, asked.steps)
    profiler = Profiler(profiled, carried.devices())
    first = jax.process_index() == 0
    console = console or Console(quiet=not first)
    if path is not None and first:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(path, error) from error
    lock = locked(path) if path is not None and first else nullcontext()
    watch = Watchdog(seconds) if seconds else nullcontext()
    with Interrupt() as interrupt, lock, watch as watched:
        beat = watched.beat if watched else unwatched
        beat(0, "restore")
        found = _found(path, resume, source, asked.steps, console)
        splitting = plan or (own if splits else None)
        agree_s = max(TIMEOUT_S, 2 * (seconds or 0))  # the watchdog comes first, and knows more
        loop = Loop(step, carried, source, splitting, asked, profiler, beat, agree_s)
        if found:
            loop.resume(found, resize)
        with opened(path, found, console, resume=resume, tensorboard=tensorboard) as outputs:
            try:
                stopped = loop.run(outputs, interrupt)
            except BaseException as error:
                with suppress(CheckpointError):  # the first error is the one to tell
                    _leave(path, _told(loop, type(error).__name__))
                raise
        told = _told(loop, stopped)
        _leave(path, told)
    say(console, str(told))
    return Fitted(carried.state, loop.step, loop.metrics, told)


def _told(loop: Loop, stopped: str) -> Report:
    switch = loop.step_function
    return report(
        loop.timer,
        loop.profiler.result,
        steps=loop.step,
        here=loop.step - loop.start,
        skipped=loop.skipped,
        switches=switch.count if isinstance(switch, Switch) else 0,
        stopped=stopped,
        asked=loop.options.steps,
    )


def _leave(path: Path | None, told: Report) -> None:
    if path is not None and jax.process_index() == 0:
        write_text(path / REPORT, json.dumps(told.to_json(), indent=1, allow_nan=False) + "\n")


def _plan_of(step: Any) -> tuple[Plan | None, bool]:
    """The plan of a decorated step, and whether an argument of it is a batch."""
    if isinstance(step, Switch):
        step = next(iter(step.steps.values()))
    plan = getattr(step, "plan", None)
    if not isinstance(plan, Plan):
        return None, False
    check_plan(plan, "fit")
    return plan, bool(getattr(step, "batch", ()))


def _found(
    path: Path | None, resume: bool, source: Source, steps: int, console: Console
) -> Checkpoint | None:
    """The checkpoint to go on from. Raises CheckpointError where a fresh run finds another one."""
    if path is None:
        return None
    if not resume:
        if done := max(checkpoint.steps(path / CHECKPOINTS), default=0):
            raise CheckpointError(
                f"{path} already holds a run ({done} steps in its last checkpoint). Go on with it by "
                "resume=True, or choose a fresh folder."
            )
        return None
    source.check_resumable()
    found = checkpoint.find(path / CHECKPOINTS, lambda told: say(console, told))
    if found is not None and found.step > steps:
        raise CheckpointError(
            f"{found.folder} has {found.step} steps, but steps is {steps}. Ask for at least as many, or "
            "choose a fresh folder."
        )
    return found
