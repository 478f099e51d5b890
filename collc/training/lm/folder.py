"""The folder of a run: who may write into it, and what a resumed run has to agree with.

config.json   the config and the corpus's digest      metrics.jsonl   a line a step
plan.txt      the plan with its schedules' digests    summary.json    how it ended
checkpoints/  see checkpoint.py                       .lock           held while a process writes
"""

import difflib
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from collc.errors import CheckpointError, DataError, PlanError
from collc.training.checkpoints import checkpoint
from collc.training.checkpoints.checkpoint import Checkpoint
from collc.training.checkpoints.files import unwritable, write_text
from collc.training.fitting.outputs import CHECKPOINTS, LOCK, METRICS, locked
from collc.training.lm.config import CONFIG, TrainConfig, resumed

PLAN, SUMMARY = "plan.txt", "summary.json"


@dataclass(frozen=True)
class RunFolder:
    """A folder that this run may write to, and the checkpoint to go on from, if there is one."""

    path: Path
    checkpoint: Checkpoint | None

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS


def resume_command(path: Path) -> str:
    """What to type to go on with the run in `path`."""
    return f"{shlex.quote(sys.executable)} -m collc train --resume {shlex.quote(str(path))}"


def _fresh_path(demo: bool) -> Path:
    """A folder below runs/ named by the time, that does not exist yet."""
    name = f"runs/{'demo' if demo else 'train'}-{time.strftime('%Y%m%d-%H%M%S')}"
    paths = (Path(name + suffix) for suffix in ("", *(f"-{i}" for i in range(2, 1000))))
    return next(path for path in paths if not path.exists())


def _holds_nothing(path: Path) -> bool:
    """Whether it is empty or has only what a run leaves that finished no step, however it ended."""
    names = {file.name for file in path.iterdir()}
    ours = {name for name in names if name.startswith((f".{PLAN}.", f".{CONFIG}.", f".{METRICS}."))}
    if METRICS in names and (path / METRICS).stat().st_size == 0:
        ours.add(METRICS)
    return not names or (LOCK in names and names <= {LOCK, PLAN, CONFIG, *ours})


def _check_fresh(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file, not a folder. Choose another run folder.")
    if not path.exists() or _holds_nothing(path):
        return
    if (path / CONFIG).exists():
        done = max(checkpoint.steps(path / CHECKPOINTS), default=0)
        raise CheckpointError(
            f"{path} already holds a run ({done} steps in its last checkpoint). Go on with it: "
            f"{resume_command(path)}; or choose a fresh folder."
        )
    raise CheckpointError(f"{path} is not empty and holds no run of collc. Choose a fresh folder.")


@contextmanager
def open_run(
    config: TrainConfig, plan: str, corpus: str, tell: Callable[[str], object] = print
) -> Iterator[RunFolder]:
    """Make the folder of a fresh run, or check that of a resumed one, and keep others out of it.
    `plan` is its text, `corpus` its digest. `tell` hears of damaged checkpoints that were set aside.

    Raises CheckpointError if a fresh run would write over another one, a resumed one would not be
    the same, or another process is at it; PlanError if the plan or one of its schedules differs;
    DataError if the text does.
    """
    if config.resume:
        path = same_run(config)
        with locked(path):
            yield RunFolder(path, _checkpoint(path, plan, corpus, tell))
        return
    path = config.folder or _fresh_path(config.demo)
    try:
        _check_fresh(path)
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error
    with locked(path):
        _check_fresh(path)  # another process may have been quicker
        write_text(path / PLAN, plan)
        saved = {"config": config.to_json(), "corpus": corpus}
        write_text(path / CONFIG, json.dumps(saved, indent=1, allow_nan=False) + "\n")
        yield RunFolder(path, None)


def same_run(config: TrainConfig) -> Path:
    """The folder to resume in. CheckpointError if the config of its run is another one."""
    if config.folder is None:
        known = sorted(
            (path.parent for path in Path("runs").glob(f"*/{CONFIG}")),
            key=lambda path: path.stat().st_mtime,
        )
        newest = f" The newest run here is {known[-1]}." if known else ""
        raise CheckpointError(f"To resume, say which run: its folder is needed.{newest}")
    path, before = config.folder, resumed(config.folder).identity()
    for name, value in config.identity().items():
        if value != before[name]:
            raise CheckpointError(
                f"The run in {path} has {name}={before[name]!r}, but {name}={value!r} was asked "
                "for: that would be another run. Resume without it, or choose a fresh folder."
            )
    return path


def _checkpoint(
    path: Path, plan: str, corpus: str, tell: Callable[[str], object]
) -> Checkpoint | None:
    """The one to go on from, if there is one; it and the folder agree with plan and corpus."""
    try:
        old_plan = (path / PLAN).read_text(encoding="utf-8")
        old_corpus = json.loads((path / CONFIG).read_text(encoding="utf-8"))["corpus"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} is not a whole run folder ({error!r}). Start a fresh run in another one."
        ) from error
    found = checkpoint.find(path / CHECKPOINTS, tell)
    for saved in (old_plan, found and found.notes.get("plan")):
        if saved is not None and saved != plan:
            raise PlanError(
                f"The plan of the run in {path} is not today's: a schedule's file has changed, or "
                "its name means another one. - is the run's, + is today's:\n"
                f"{_difference(str(saved), plan)}\nRestore the schedule, or choose a fresh folder."
            )
    for saved in (old_corpus, found and found.notes.get("corpus")):
        if saved is not None and saved != corpus:
            raise DataError(
                f"The run in {path} was trained on another text (digest {str(saved)[:12]}, here "
                f"{corpus[:12]}): this Python's standard library is another one. Resume with the "
                "Python that began it, or choose a fresh folder."
            )
    if found and found.notes.get("identity") != resumed(path).identity():
        raise CheckpointError(
            f"{found.folder} is of another run than {path / CONFIG}: their configs differ. "
            "Nothing was changed. Put the right checkpoint back, or choose a fresh folder."
        )
    return found


def _difference(old: str, new: str) -> str:
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))
