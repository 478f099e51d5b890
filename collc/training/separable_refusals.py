"""What is said of an optimizer that looks beyond a shard: which transformation, and its line."""

import os
import re
from typing import NoReturn

import optax

from collc.errors import StepError
from collc.training.check.values import Where

# The function within a transformation of optax, after the transformation's own name.
_UPDATE = re.compile(r"(?!with_extra_args)(\w+)\.(?:<locals>\.)?update\w*(?:\.<locals>.*)?")
_INSTEAD = {
    "clip_by_global_norm": "collc.clip_by_global_norm",
    "apply_if_finite": "collc.skip_nonfinite",
}


def refuse(where: Where | None, parts: int, found: str = "") -> NoReturn:
    """Raises StepError for the equation at ``where``, or what was ``found``, over so many shards."""
    name = where.eqn.primitive.name if where else "the update"
    who, line = _transformation(where)
    what = found or name
    raise StepError(
        f"{who or 'the optimizer'}: {what} over a parameter that is cut in {parts} shards "
        f"would see one shard only{f' ({line})' if line else ''}. {remedy(who)}"
    )


def remedy(who: str = "") -> str:
    """What to do instead of a transformation, or of what one keeps at this path."""
    if "found_nan" in who.split("/"):
        return (
            "Drop optax.zero_nans: a server leaves out what is not finite, and counts it; or take "
            "strategy.all_reduce for these parameters."
        )
    own = _INSTEAD.get(who.removeprefix("optax."))
    return f"Take {f'{own}, or ' if own else ''}strategy.all_reduce for these parameters."


def _transformation(where: Where | None) -> tuple[str, str]:
    """The innermost transformation, "optax.adafactor" or "" for the user's own, and its line."""
    if where is None:
        return "", ""
    home = os.path.dirname(optax.__file__) + os.sep
    line = str(where)
    traceback = getattr(where.eqn.source_info, "traceback", None)
    for frame in traceback.frames if traceback else ():
        at = f"{os.path.basename(frame.file_name)}:{frame.line_num}"
        if line.startswith(f"{at} in "):
            return "", line
        update = _UPDATE.fullmatch(frame.function_name)
        if update and frame.file_name.startswith(home):
            return f"optax.{update[1]}", at
    return ("", line) if where.outer is None else _transformation(where.outer)
