"""How a process ends, whatever it hangs in: nothing here waits without a limit."""

import atexit
import os
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import NoReturn

STDERR = 2  # not sys.stderr, whose lock another thread may hold
FRAMES = 30  # of a stack, the innermost ones
OWN = "collc-"  # begins the names of collc's own threads


def say(text: str) -> None:
    """Text to this process's own log."""
    data = text.encode(errors="replace")
    with suppress(OSError):
        while data:
            data = data[os.write(STDERR, data) :]


def stacks() -> dict[str, str]:
    """Where each thread is, by its name, the main one first and the innermost frames last.

    Without lines of source: they may lie on the file system that is the cause.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = {}
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        name = names.get(ident, str(ident))
        if not name.startswith(OWN):
            found[name] = _lines(frame)
    return found


def _lines(frame: FrameType | None) -> str:
    lines = []
    while frame is not None and len(lines) < FRAMES:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_qualname}\n')
        frame = frame.f_back
    return "".join(reversed(lines))


def within(seconds: float, code: int) -> None:
    """End this process after that time, even if the log cannot be written."""

    def end() -> None:
        time.sleep(seconds)
        os._exit(code)

    threading.Thread(target=end, name="collc-end", daemon=True).start()


def leave(code: int) -> NoReturn:
    """End this process now. What Python runs at its end would wait for processes that are gone."""
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    flush.join(1.0)
    os._exit(code)


def leave_at_exit(code: int) -> None:
    """Let this process end as Python does until jax would wait for the others, then ``leave``."""
    atexit.register(leave, code)  # the last that is registered is the first that is called


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
