"""The profiler's trace file: found in its folder, and read with all that can be wrong with it.

It is Chrome's trace event JSON, which the profiler writes gzipped beside an .xplane.pb of the same.
"""

import gzip
import json
import math
import re
import zlib
from pathlib import Path
from typing import Any

from collc.errors import DataError

MOST_BYTES = 512 << 20  # unzipped; the million events that XLA keeps at most are about half of it
MOST_EVENTS = 1_000_000  # what XLA cuts the JSON to, unless its environment says otherwise
ENDING = ".trace.json.gz"
_RECORD = "Record one with jax.profiler.trace(folder), and leave it before the program ends."
_TIME = re.compile(r"\d{4}(_\d\d){5}")  # the profiler's name of a run: when it began


def located(path: Path) -> Path:
    """The trace file that is meant: a file itself, or that of the newest run in a profiler's folder.

    Raises DataError where there is none, or where it cannot be told which one.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist. {_RECORD}")
    if not path.is_dir():
        return path
    found: list[Path] = []
    for pattern in (f"plugins/profile/*/*{ENDING}", f"*{ENDING}", f"*/*{ENDING}"):
        found = found or sorted(path.glob(pattern))
    if not found:
        raise DataError(f"{path} holds no profile, plugins/profile/RUN/HOST{ENDING}. {_RECORD}")
    names = {file.parent.name for file in found}
    if len(names) > 1 and not all(_TIME.fullmatch(name) for name in names):
        raise DataError(
            f"{path} holds the runs {', '.join(sorted(names))}, whose names do not say which is the "
            "newest. Name the folder of one."
        )
    newest = [file for file in found if file.parent.name == max(names)]
    if len(newest) > 1:
        raise DataError(
            f"{newest[0].parent} holds the traces of {len(newest)} hosts, whose clocks differ. Name "
            f"the file of one: {', '.join(file.name for file in newest)}."
        )
    return newest[0]


def events(file: Path) -> list[dict[str, Any]]:
    """The events of a .json or .json.gz file, with "ts" and "dur" checked in those that have a length.

    Raises DataError for a file that is empty, truncated, too large, no JSON, or no trace.
    """
    try:
        found = json.loads(_unzipped(file))
    except (ValueError, RecursionError) as e:
        raise DataError(
            f"{file} is not JSON, or only the beginning of it: {e}. Copy it again, or {_or_record()}"
        ) from None
    listed = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(listed, list):
        raise DataError(
            f"{file} is JSON, but no trace: it has no list of traceEvents. Name what "
            f"jax.profiler.trace wrote, HOST{ENDING}."
        )
    kept = [_checked(file, number, event) for number, event in enumerate(listed) if event != {}]
    if sum(event.get("ph") != "M" for event in kept) == MOST_EVENTS:
        raise DataError(
            f"{file} has {MOST_EVENTS:,} events, to which XLA cuts a trace: its end is missing. Record "
            "fewer steps, or without Python (python_tracer_level = 0 in jax.profiler.ProfileOptions)."
        )
    return kept


def _unzipped(file: Path) -> bytes:
    """What the file says, at most MOST_BYTES."""
    try:
        with file.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            content = (gzip.GzipFile(fileobj=raw) if zipped else raw).read(MOST_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise DataError(
            f"{file} is truncated or damaged: {e}. Copy it again, or {_or_record()}"
        ) from None
    except OSError as e:
        raise DataError(f"{file} cannot be read: {e.strerror}.") from None
    if len(content) > MOST_BYTES:
        raise DataError(
            f"{file} has more than {MOST_BYTES >> 20} MiB unzipped, more than XLA writes. Record fewer "
            "steps."
        )
    if not content.strip():
        raise DataError(f"{file} is empty. {_RECORD}")
    return content


def _checked(file: Path, number: int, event: Any) -> dict[str, Any]:
    if not isinstance(event, dict) or not isinstance(event.get("args", {}), dict):
        raise DataError(f"{file}: event {number} of traceEvents is no object: {str(event)[:100]}")
    if event.get("ph") == "X":
        start, length = event.get("ts"), event.get("dur", 0)
        if not (_is_time(start) and _is_time(length) and length >= 0):
            raise DataError(
                f"{file}: event {number} of traceEvents, {str(event.get('name'))[:100]}, has no time: "
                f"ts is {start!r} and dur {length!r}. Numbers of microseconds are needed."
            )
    return event


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _or_record() -> str:
    return _RECORD[0].lower() + _RECORD[1:]
