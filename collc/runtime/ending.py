"""How a process ends, whatever it hangs in: nothing here waits without a limit, but `say` for a log
that nobody reads.
"""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import FrameType, TracebackType
from typing import NoReturn

STDERR = 2  # not sys.stderr, whose lock another thread may hold
FRAMES = 30  # of a stack, the innermost ones
OWN = "collc-"  # begins the names of collc's own threads
AFTER_S = 2.0  # for which the coordinator outlives the others, whom jax aborts without it


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

    threading.Thread(target=end, name=f"{OWN}end", daemon=True).start()


def leave(code: int) -> NoReturn:
    """End this process now. What Python runs at its end would wait for processes that are gone."""
    _flush()
    os._exit(code)


def leave_at_exit(code: int) -> None:
    """Let this process end as Python does until jax would wait for the others, then ``leave``."""
    atexit.register(leave, code)  # the last that is registered is the first that is called


def leave_where_failed(waits: Callable[[], bool], after_s: float = 0.0) -> None:
    """Let this process, where an exception that nobody caught ends it, ``leave`` with code 1; after
    KeyboardInterrupt by SIGINT, as Python would.

    Else jax would wait at exit for the others, and they for this process. Exit handlers that are
    registered later run, those from before do not, jax's among them. ``waits``: asked at exit,
    whether jax would. ``after_s``: seconds that this process stays.
    """
    failures = _uncaught()

    def end() -> None:
        if not failures or not waits():
            return
        time.sleep(after_s)
        if issubclass(failures[-1], KeyboardInterrupt):  # ends by the signal, as Python would
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            _flush()
            os.kill(os.getpid(), signal.SIGINT)
        leave(1)

    atexit.register(end)


@cache  # sys.excepthook is replaced once
def _uncaught() -> list[type[BaseException]]:
    """The exceptions that nobody caught: filled from now on. They are printed as before."""
    found: list[type[BaseException]] = []
    usual = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not hasattr(sys, "ps1"):  # at a prompt, one ends nothing
            found.append(kind)
        usual(kind, error, trace)

    sys.excepthook = hook
    return found


def _flush() -> None:
    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()

    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    thread.join(1.0)  # nobody may read
