"""Schedules by name, from packages and from files; files that are broken point to the line."""

import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

import collc
from collc import language as cl
from collc.errors import ProofError, ScheduleError
from collc.language import library
from collc.language.library import contents, find, load, lookup, modules
from collc.schedules import ring, server

GOOD = '''
"""A ring that goes down."""
import numpy as np
from collc import language as cl
from collc.language import copy, ranks
from collc.schedules import ring, server

@cl.all_gather
def gather_down(n):
    c = ranks(n)
    for t in range(n - 1):
        yield copy(c, (c - t) % n, (c - t - 1) % n)

@cl.order
def backwards(n):
    return np.arange(n)[::-1]

two_way = ring.all_gather | gather_down
mine = server.shards(3)
same = ring.all_gather
turned = gather_down.relabel(order=backwards)
'''


@pytest.fixture
def file(tmp_path):
    def write(source, name="down.py"):
        path = tmp_path / name
        path.write_text(source)
        return path

    return write


def test_names():
    assert lookup("ring.all_reduce") is ring.all_reduce
    assert lookup("hierarchical").name == "hierarchical"
    assert find("ring.all_reduce @ gpu") == ring.all_reduce @ "gpu"
    assert set(modules()) >= {"ring", "tree", "hierarchical", "pairwise", "server", "native"}
    assert list(contents(modules()["ring"])) == [
        "reduce_scatter", "all_gather", "all_reduce",
        "two_way_reduce_scatter", "two_way_all_gather", "two_way_all_reduce", "rings",
    ]  # fmt: skip
    # What a module imports is not its own.
    assert list(contents(modules()["hierarchical"])) == ["hierarchical"]
    for name, words in [
        ("rings.all_reduce", "no schedule module 'rings'. Did you mean ring"),
        ("ring.allreduce", "no schedule 'ring.allreduce'. Did you mean ring.all_reduce"),
        ("", "no schedule module ''"),
    ]:
        with pytest.raises(ScheduleError) as caught:
            lookup(name)
        assert words in str(caught.value)


def test_every_schedule_is_named_after_its_place():
    for short, module in modules().items():
        for attribute, value in contents(module).items():
            assert value.name == (short if attribute == short else f"{short}.{attribute}")
            assert value.__doc__


def test_a_file(file):
    path = file(GOOD)
    assert str(find(f"{path}:two_way")) == "down.two_way"
    assert (
        collc.verify(find(f"{path}:two_way"), n=5).sent == collc.verify(ring.all_gather, n=5).sent
    )
    assert collc.verify(find(f"{path}:turned"), n=4).steps == 3
    assert find(f"{path}:mine") == server.shards(3)
    assert find(f"{path}:same") is ring.all_gather
    assert "down" not in sys.modules
    assert list(contents(load(path))) == ["gather_down", "backwards", "two_way", "turned"]


def test_expressions_of_a_file(file):
    more = "@cl.family\ndef turned_by(k):\n    return gather_down.relabel(shift=10 // k)\n"
    path = file(GOOD + more)
    for text, printed in {
        "turned_by(5) @ gpu": "down.turned_by(5) @ gpu",
        "ring.reduce_scatter >> two_way": "ring.reduce_scatter >> down.two_way",
        "gather_down.relabel(order=backwards)": "down.gather_down.relabel(order=down.backwards)",
        "ring.all_gather": "ring.all_gather",
        "hierarchical('x', 'y')": 'hierarchical("x", "y")',
    }.items():
        found = find(f"{path}:{text}")
        assert str(found) == printed and found == find(f"{path}:({text})")
    assert collc.verify(find(f"{path}:ring.reduce_scatter >> two_way"), n=3).steps == 4
    for text, words in {
        "turned_by": "down.turned_by has parameters",
        "turned_by(0)": f"down.turned_by(0), {path}:24: ZeroDivisionError: ",
        "np": "it defines no schedule 'np'",
        "ring.nope": "there is no schedule 'ring.nope'",
        "two_way >>": "cannot read the schedule 'two_way >>'",
    }.items():
        with pytest.raises(ScheduleError) as caught:
            find(f"{path}:{text}")
        assert str(caught.value).startswith(f"{path}: ") and words in str(caught.value)


def test_lines_of_a_file_with_a_relative_path(file, monkeypatch):
    monkeypatch.chdir(file("\n1 / 0\n").parent)
    with pytest.raises(ScheduleError, match=r"^down\.py:2: ZeroDivisionError"):
        find("down.py:x")
    for source in ("down.txt:x", "down.py"):
        with pytest.raises(ScheduleError, match=r"a schedule file ends in \.py"):
            find(source)


def test_a_file_may_bear_any_name(file):
    """numpy.py hides nothing, and ring.py is not taken for the library's ring."""
    import numpy

    load(file("x = 1", "numpy.py"))
    assert sys.modules["numpy"] is numpy
    broken = GOOD.replace("(c - t - 1)", "(c - t - 2)").replace("gather_down", "all_gather")
    path = file(broken, "ring.py")
    assert collc.verify(ring.all_gather, n=4)
    with pytest.raises(ProofError, match="does not hold"):
        collc.verify(find(f"{path}:all_gather"), n=4)
    assert collc.verify(ring.all_gather, n=4)
    # Written again, it is read again.
    path.write_text(broken.replace("(c - t - 2)", "(c - t - 1)"))
    assert collc.verify(find(f"{path}:all_gather"), n=4)


@pytest.mark.parametrize(
    "source, words",
    [
        ("x = 1\n1 / 0\n", ":2: ZeroDivisionError: division by zero"),
        ("x = (\n", ":1: SyntaxError: '(' was never closed"),
        ("import nowhere_at_all\n", ":1: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("\n\nimport sys\nsys.exit(2)\n", ":4: SystemExit: 2"),
        ("\nclass B(BaseException): pass\nraise B(7)\n", ":3: B: 7"),
        ("raise GeneratorExit", ":1: GeneratorExit"),
        ("\nfrom collc import language as cl\ncl.reduce(3)\n", ":3: @reduce decorates"),
        ("\ndef two_way(n): yield\n", "two_way is a function without a decorator. Say above it"),
        ("two_way = 3\n", "two_way is 3, which is no schedule."),
        (GOOD + "bad = gather_down >> gather_down\n", "Drop the second gather."),
        (GOOD + "bad = cl.all_reduce(chunks=0)\n", "chunks is a positive integer, not 0"),
        ("x = 1\n", "it defines no schedule 'two_way'. None are known."),
        (
            GOOD.replace("two_way", "two_ways"),
            "defines no schedule 'two_way'. Did you mean two_ways",
        ),
        (
            GOOD.replace("two_way", "_").replace("backwards", "two_way"),
            "is an order, not a schedule",
        ),
    ],
)
def test_broken_files(file, source, words):
    path = file(source)
    with pytest.raises(ScheduleError) as caught:
        find(f"{path}:two_way")
    assert str(path) in str(caught.value) and words in str(caught.value)
    assert "down" not in sys.modules


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(ScheduleError, match="there is no schedule file"):
        find(f"{tmp_path / 'none.py'}:x")
    with pytest.raises(ScheduleError, match="there is no schedule file"):
        find(f"{tmp_path}.py:x")
    path = tmp_path / "bytes.py"
    path.write_bytes(b"\x80\x81")
    with pytest.raises(ScheduleError, match="SyntaxError"):
        find(f"{path}:x")


def test_packages_bring_their_own(monkeypatch):
    theirs = ModuleType("their_package.theirs")
    theirs.both = ring.all_gather | ring.all_gather
    entry = EntryPoint("theirs", "their_package.theirs", "collc.schedules")
    monkeypatch.setattr(EntryPoint, "load", lambda self: theirs)
    monkeypatch.setattr(library.importlib.metadata, "entry_points", lambda group: [entry])
    modules.cache_clear()
    try:
        s = collc.parse("theirs.both @ gpu")
        assert s == (ring.all_gather | ring.all_gather) @ "gpu"
        assert str(s) == "theirs.both @ gpu" and collc.parse(str(s)) == s
        clash = EntryPoint("ring", "their_package.theirs", "collc.schedules")
        monkeypatch.setattr(library.importlib.metadata, "entry_points", lambda group: [clash])
        modules.cache_clear()
        with pytest.raises(ScheduleError, match="has the name of another schedule module"):
            lookup("ring.all_reduce")
    finally:
        monkeypatch.undo()
        modules.cache_clear()
    assert lookup("ring.all_reduce") is ring.all_reduce


def test_closures_have_no_name_but_work():
    @cl.all_gather
    def inner(n):
        c = cl.ranks(n)
        for t in range(1, n):
            yield cl.copy(c, c, (c + t) % n)

    assert inner.name is None and str(inner) == "<inner>"
    assert collc.verify(inner, n=3).steps == 2
    assert inner == inner and inner != ring.all_gather
