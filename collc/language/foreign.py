"""Words on what code of schedule files raises and returns, which may be of any kind and length.

KeyboardInterrupt is nobody's error: what runs such code catches every other BaseException.
"""

import os
from types import TracebackType
from typing import Any

from collc import errors
from collc.errors import CollcError, ScheduleError

LONGEST = 300  # characters of a text that is not ours


def said(e: BaseException) -> str:
    """``ValueError: out of luck``, on one line and not for ever.

    >>> said(KeyError("\\x1b[31m\\nred"))
    "KeyError: '\\\\x1b[31m\\\\nred'"
    >>> said(ValueError("  two\\n lines\\x07" + "." * 999))[:40]
    'ValueError: two lines ..................'
    """
    try:
        text = str(e)
    except Exception:
        text = "(its own text cannot be made)"
    return _line(f"{type(e).__name__}: {text}").rstrip(": ")


def shown(value: Any) -> str:
    """The value's repr, on one line and not for ever; its type where it has none."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return _line(text)


def reworded(e: CollcError, message: str) -> CollcError:
    """An error of the same class, where that is one of ours and so takes a message."""
    cls = type(e) if type(e).__module__ == errors.__name__ else ScheduleError
    return cls(message)


def short(file: str) -> str:
    """The file relative to the working directory, where it lies below one that exists."""
    try:
        relative = os.path.relpath(file) if file else ""
    except (OSError, ValueError):  # deleted, or on another drive
        return file
    return file if relative.startswith("..") else relative


def line_in(file: str, e: BaseException) -> int:
    """The deepest line of the file in the traceback, 0 where there is none."""
    found, tb = 0, e.__traceback__
    while isinstance(tb, TracebackType):
        if tb.tb_frame.f_code.co_filename == file:
            found = tb.tb_lineno
        tb = tb.tb_next
    return found


def _line(text: str) -> str:
    # Cut twice: what is dropped need not be read.
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * LONGEST]).split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."
