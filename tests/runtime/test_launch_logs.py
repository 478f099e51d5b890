"""Lines of hosts: cut, kept together, coloured for terminals."""

import io
import os

import pytest
from rich.console import Console

from collc.runtime.launch.job import Host, Job
from collc.runtime.launch.logs import LONGEST, Lines, Logs

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs process groups")


@pytest.mark.parametrize(
    "pieces, found",
    [
        ([b"a\nb\r\n\nc"], ["a", "b", "", "c"]),
        ([b"\xe2\x82", b"\xac\n"], ["€"]),
        ([b"\xff\x00\xfe\n"], [r"\xff" + "\0" + r"\xfe"]),
        ([b"\xe2\x82"], [r"\xe2\x82"]),
        ([b"\r 5%", b"\r10%\r", b"\r15%\r", b"\n"], ["15%"]),
        ([b"one\r", b"\ntwo"], ["one", "two"]),
        ([b"x" * LONGEST, b"x" * LONGEST + b"yy", b"y\n"], ["x" * LONGEST] * 2 + ["yyy"]),
        ([b"z" * (2 * LONGEST) + b"\nw\n"], ["z" * LONGEST] * 2 + ["w"]),
    ],
)
def test_lines(pieces, found):
    lines = Lines()
    assert [x for data in pieces for x in lines.feed(data, 0.0)] + lines.feed(b"", 0, True) == found


def test_the_beginning_of_a_line_is_not_kept_back():
    lines = Lines()
    assert lines.feed(b"done\nwaiting ... ", 1.0) == ["done"]
    assert lines.late(1.9) == [] and lines.late(2.0) == ["waiting ... "] and lines.late(9.0) == []
    assert lines.feed(b"\n", 10.0) == [], "only the end of what has been shown"
    assert lines.feed(b"\n", 10.0) == [""]


def test_colours_are_for_terminals(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    script = r"printf '\033[31mred\033[0m \033[2Jgone\n'"
    monkeypatch.setenv("TERM", "xterm-256color")
    texts = []
    for options in ({}, {"force_terminal": True}, {"force_terminal": True, "no_color": True}):
        console = Console(file=io.StringIO(), **options)
        Job(("sh", "-c", script), (Host("h0"),)).run(Logs(console, console))
        texts.append(console.file.getvalue())
    plain = "h0 | red \\x1b[2Jgone\n"
    assert texts == [
        plain,
        "\x1b[36mh0 | \x1b[0m\x1b[31mred\x1b[0m \\x1b[2Jgone\x1b[0m\n",
        plain,
    ]
