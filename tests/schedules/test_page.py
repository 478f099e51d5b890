"""docs/schedules.md: it has all schedules, and its tables say what the certificates do."""

import re
from pathlib import Path

import pytest

import collc
from collc.analysis.certificate import share
from collc.language.algebra import Schedule
from collc.language.leaves import Family
from collc.language.library import contents, modules
from collc.language.parse import parse

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"
COLLECTIVES = {
    "All-reduce": {"all_reduce"},
    "Reduce-scatter and all-gather": {"reduce_scatter", "all_gather"},
    "With a root": {"reduce", "broadcast", "scatter", "gather"},
    "All-to-all": {"all_to_all"},
}


def rows() -> list[tuple[str, str, list[str]]]:
    """(heading, schedule, cells) of every table."""
    found, heading = [], ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif row := re.fullmatch(r"\| `(.+?)` \| (.*) \|", line):
            found.append((heading, row[1], [cell.strip() for cell in row[2].split("|")]))
    return found


@pytest.mark.parametrize("heading, text, cells", rows(), ids=[text for _, text, _ in rows()])
def test_a_row_says_what_its_certificate_does(heading, text, cells):
    schedule = parse(text)
    sizes = {"host": 2, "gpu": 4} if schedule.axes else {"n": 8}
    c = collc.verify(schedule, **sizes)
    bits = {None: "unknown", False: "no", True: "yes" if c.narrow else "wide"}[c.consistent]
    sent = "–" if c.sent is None else share(c.sent)
    assert cells[:4] == [str(c.steps), str(c.rounds), sent, bits]
    assert cells[4]
    assert schedule.collective.name in COLLECTIVES[heading]


def test_every_schedule_has_a_row():
    named = {text.partition("(")[0] for _, text, _ in rows()}
    known = {
        value.name
        for module in modules().values()
        for value in contents(module).values()
        if isinstance(value, Schedule | Family)
    }
    assert named == known
    text = PAGE.read_text(encoding="utf-8").partition("## Family by family")[2]
    assert all(f"`{name}`" in text for name in modules())
