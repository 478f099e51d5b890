"""Work of several processes that succeeds on all or fails on all."""

import json
import traceback
from collections.abc import Callable
from typing import TypeVar, cast

from collc.errors import CheckpointError, PlanError
from collc.planning.agree import meet

TIMEOUT_S = 1800  # for a process that waits while another one writes or reads

Result = TypeVar("Result")


def together(
    topic: str, act: Callable[[], Result], failed: Callable[[str], str] | None = None
) -> Result:
    """Do something on each process, and wait for all. What one of them cannot do fails on all.

    ``failed`` words the error; without, it is as it came. Raises CheckpointError.
    """
    result, cause, why = None, None, ""
    try:
        result = act()
    except Exception as error:  # Orbax raises whatever its backends do
        cause, why = error, _reason(error)
        # What Orbax still had to write hangs on these frames, and would say so when Python ends.
        traceback.clear_frames(error.__traceback__)
    try:
        said = meet(topic, json.dumps(why), TIMEOUT_S)
    except PlanError as error:
        cause, why, said = cause or error, why or str(error), {}
    others = {process: json.loads(text) for process, text in said.items()}
    if failed is None and isinstance(cause, CheckpointError):
        raise cause
    word = failed or str
    if cause is not None:
        raise CheckpointError(word(why)) from cause
    for process, text in others.items():
        if text:
            raise CheckpointError(word(f"process {process} says: {text}"))
    return cast(Result, result)


def _reason(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error).rstrip(".")
    # Orbax begins with where in its own files it was.
    return str(error).rpartition('": ')[2].rstrip(".") or type(error).__name__
