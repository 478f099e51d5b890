"""What the commands share: options, the mesh, the time limit, printing, and errors."""

import faulthandler
import functools
import json
import os
import re
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from types import FrameType
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from collc.errors import CollcError, MeshError, ScheduleError
from collc.language.algebra import Schedule
from collc.language.foreign import said

SECONDS = 60.0
INTERRUPTED, PIPE_CLOSED = 130, 141  # 128 + the signal, as shells have it

# ---- options ------------------------------------------------------------------------------------

Named = Annotated[
    str,
    typer.Argument(
        metavar="SCHEDULE",
        help="A name (ring.all_reduce), an expression, or either after path/to/file.py:",
        show_default=False,
    ),
]
Mesh = Annotated[
    str,
    typer.Option(
        "--mesh",
        metavar="AXIS=SIZE,...",
        help="The axes and their sizes, outermost first: gpu=8, or host=4,gpu=8.",
        show_default=False,
    ),
]
Machine = Annotated[
    str,
    typer.Option(
        "--machine",
        metavar="MACHINE",
        help="A name with its hosts (dgx-h100:4), a topology file, or numbers: see docs/machines.md.",
        show_default=False,
    ),
]
# metavar: some typers write <bool> there.
Json = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON.")]
Debug = Annotated[bool, typer.Option("--debug", metavar="", help="Show the traceback of an error.")]


def seconds_given(value: float) -> float:
    """A time that can be waited for, in s. Raises BadParameter for others."""
    if not 0 < value <= 1e6:  # also refuses nan
        raise typer.BadParameter(f"{value:g} is not a time: say seconds above 0, up to a million.")
    return value


Timeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        callback=seconds_given,
        help="How long to load and prove: a schedule file may never end.",
    ),
]

# ---- the mesh -----------------------------------------------------------------------------------


def placed(schedule: Schedule, mesh: Mapping[str, int], source: str) -> Schedule:
    """The schedule, on the mesh's axis if it is unplaced. MeshError if there are several."""
    if schedule.axes:
        return schedule
    axis = list(mesh)[-1]
    if len(mesh) == 1:
        return schedule @ axis
    path, colon, text = source.rpartition(".py:")
    one = f"{path}{colon}{text if text.isidentifier() else f'({text})'} @ {axis}"
    raise MeshError(
        f"{schedule} is not placed on an axis, and the mesh has several: {', '.join(mesh)}. "
        f'Say for example: "{one if colon else schedule @ axis}"'
    )


# ---- code of schedule files ---------------------------------------------------------------------

LOOP = "Look for a loop that never ends"
left_behind: list[threading.Thread] = []  # threads that nobody waits for


class _Stop(KeyboardInterrupt):
    """The time is over, for code that catches every Exception; nothing of ours does catch it."""


@contextmanager
def files_run(
    seconds: float, remedy: str = f"{LOOP}, or allow more time with --timeout"
) -> Iterator[None]:
    """The block runs code of files: for no longer than ``seconds``, and it prints to stderr.

    Then ScheduleError is raised in the block. Code that catches that is stopped half a second
    later by what is no Exception; if it catches that too, or never comes back from C, the process
    ends.
    """
    before = threading.enumerate()
    try:
        with redirect_stdout(sys.stderr), _time_limit(seconds, remedy):
            yield
    finally:
        left_behind.extend(t for t in threading.enumerate() if t not in before and not t.daemon)


@contextmanager
def _time_limit(seconds: float, remedy: str) -> Iterator[None]:
    """Where there are no alarms (off the main thread, on Windows) there is no limit."""
    if (
        not hasattr(signal, "setitimer")
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    message = f"stopped after {seconds:g} s, still at work. {remedy}"
    asked = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise _Stop
        asked = True
        raise ScheduleError(message)

    def end() -> None:
        print(f"error: {message}", file=sys.stderr, flush=True)
        os._exit(1)

    old = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)
    last = threading.Timer(seconds + 2, end)
    last.daemon = True
    last.start()
    # C code that does not let go of the interpreter stops that thread too, but not this one.
    faulthandler.dump_traceback_later(seconds + 4, exit=True, file=2)
    try:
        yield
    except _Stop:
        raise ScheduleError(message) from None
    finally:
        faulthandler.cancel_dump_traceback_later()
        last.cancel()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


# ---- printing -----------------------------------------------------------------------------------


class Output(Console):
    """Standard output: as wide as the terminal, or as wide as need be where it is none."""

    def __init__(self) -> None:
        free = not sys.stdout.isatty() and "COLUMNS" not in os.environ
        super().__init__(highlight=False, width=10_000 if free else None)
        self.width = max(self.width, 40)  # below that a table has no room for a letter

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

    def table(self, table: Table, whole: bool = False) -> None:
        """The table, without blanks at the ends of its lines.

        ``whole``: a table of numbers, which are never cut; its lines may be longer than the terminal's.
        """
        width = self.width
        self.width = 10_000 if whole else width
        with self.capture() as captured:
            self.print(table)
        self.width = width
        for row in captured.get().splitlines():
            line = Text.from_ansi(row)
            line.rstrip()
            self.print(line, no_wrap=True, overflow="ignore", crop=False)

    def line(self, text: str = "", style: str = "") -> None:
        """One line of a program or a heading, folded by ``fold``, never cut."""
        for piece in fold(text, self.width):
            self.print(Text(piece, style), no_wrap=True, overflow="ignore", crop=False)


class Report(Console):
    """Standard output of a long job: where the reader leaves, the job is stopped as by Ctrl-C."""

    def on_broken_pipe(self) -> None:
        silence()
        os.kill(os.getpid(), signal.SIGINT)


def fold(line: str, width: int) -> list[str]:
    """The line in pieces of at most ``width`` where it can be, later ones indented.

    Steps are cut between sends, everything else between words.

    >>> fold("   0  add c[0]  0 -> 1    add c[1]  1 -> 2", 30)
    ['   0  add c[0]  0 -> 1', '      add c[1]  1 -> 2']
    """
    if len(line) <= width:
        return [line]
    step = re.match(r"[> ] *\d+  ", line)
    if step:
        indent, found = " " * step.end(), [line[: step.end()]]
        for send in re.split(r" {4}", line[step.end() :]):
            if found[-1].strip() and len(found[-1]) + 4 + len(send) > width:
                found.append(indent + send)
            else:
                found[-1] += send if found[-1] in (indent, line[: step.end()]) else "    " + send
        return found
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(
        line,
        max(width, 20),
        subsequent_indent=f"{indent}  " if indent else "",
        break_long_words=False,
        break_on_hyphens=False,
    )


def print_json(value: Any) -> None:
    """Prints the value as indented JSON; fractions have been made text before."""
    print(json.dumps(value, indent=2))


# ---- errors -------------------------------------------------------------------------------------

P = ParamSpec("P")
_always_debug = False  # --debug before the command


def debug_from_here(on: bool) -> None:
    """What was said before the command's name."""
    global _always_debug
    _always_debug = on


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Decorates a command that has ``debug``: errors become one message on stderr and a status.

    1 for errors, 130 for Ctrl-C, 141 for a reader that has gone. Usage errors (2) are typer's.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        debug = bool(kwargs.get("debug")) or _always_debug
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except CollcError as e:
            raise _fail("error", str(e), debug) from None
        except BrokenPipeError:
            silence()
            raise typer.Exit(PIPE_CLOSED) from None
        except OSError as e:
            silence()  # a disk that is full would be complained of once more at exit
            what = f"{e.strerror or said(e)}{f': {e.filename}' if e.filename else ''}"
            raise _fail("error", f"the system refused to read or write: {what}", debug) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except MemoryError:
            message = "there is not enough memory for that many ranks. Choose a smaller mesh."
            raise _fail("error", message, debug) from None
        except Exception as e:
            if type(e).__module__.split(".")[0] in ("typer", "click"):
                raise
            again = "" if debug else " Rerun with --debug to see where."
            raise _fail("internal error", f"{said(e)}.{again}", debug) from None

    return run


def _fail(kind: str, message: str, debug: bool) -> typer.Exit:
    if debug:
        traceback.print_exc()
    err = Console(stderr=True, highlight=False)
    # A file may have written the text: nothing in it is to move the cursor.
    text = re.sub(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", " ", f"{kind}: {message}")
    first, *rest = text.splitlines() or [f"{kind}:"]
    width = err.width if sys.stderr.isatty() else 1 << 30
    lines = [piece for line in (first, *rest) for piece in fold(line, width)]
    text = Text("\n".join(lines))
    text.stylize("bold red", 0, len(kind) + 1)
    err.print(text, soft_wrap=True)
    return typer.Exit(1)


def silence() -> None:
    """Standard output to nowhere where it cannot be written, so that nobody complains at exit."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return
