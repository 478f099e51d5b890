"""Golden prints: the shortest true thing, for every schedule of the library."""

import math
from pathlib import Path

import pytest
from collc.schedules import pairwise, ring, server, tree

import collc
from collc.language import printing
from collc.language.expand import expand
from collc.language.library import load
from collc.language.parse import parse

zoo = load(Path(__file__).parents[1] / "zoo.py")
PRINTS = {
    "ring": [("ring.all_reduce @ gpu", {"gpu": 4}), ("ring.all_reduce @ gpu", {"gpu": 5})],
    "tree": [
        ("tree.all_reduce @ gpu", {"gpu": 4}),
        ("tree.all_reduce @ gpu", {"gpu": 7}),
        ("tree.double_all_reduce @ gpu", {"gpu": 8}),
        ("tree.double_all_reduce @ gpu", {"gpu": 5}),
    ],
    "server": [
        ("server.star @ gpu", {"gpu": 4}),
        ("server.shards(2) @ gpu", {"gpu": 4}),
        ("server.shards(4) @ gpu", {"gpu": 4}),
    ],
    "pairwise": [
        ("pairwise.all_to_all @ gpu", {"gpu": 4}),
        ('pairwise.two_level("host", "gpu")', {"host": 2, "gpu": 3}),
    ],
    "hierarchical": [('hierarchical("host", "gpu")', {"host": 4, "gpu": 4})],
    "native": [
        ("native.all_reduce @ gpu", {"gpu": 4}),
        ("ring.reduce_scatter @ gpu >> native.all_reduce @ host >> ring.all_gather @ gpu",
         {"host": 2, "gpu": 4}),
    ],
    "operators": [
        ("(ring.reduce_scatter @ x >> ring.all_reduce @ y >> ring.all_gather @ x"
         " | ring.reduce_scatter @ y >> ring.all_reduce @ x >> ring.all_gather @ y)",
         {"x": 2, "y": 2}),
        ("ring.all_reduce.relabel(shift=1).reversed() @ (x, y)", {"x": 2, "y": 2}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", PRINTS)
def test_golden(name, golden):
    """A certificate, then the program of each leaf."""
    shown = []
    for text, sizes in PRINTS[name]:
        s = parse(text)
        shown.append(str(collc.verify(s, **sizes)))
        for leaf in s.leaves():
            shown.append(f"  {leaf}")
            n = math.prod(sizes[axis] for axis in leaf.axes)
            steps = [] if leaf.native else printing.lines(expand(leaf, n))
            shown += [f"  {line}" for line in steps]
        shown.append("")
    golden(f"{name}.txt", "\n".join(shown))


def test_relative_where_all_do_the_same():
    assert printing.lines(expand(ring.all_gather, 4)) == [
        "   0  copy c[g]  g -> g+1",
        "   1  copy c[g-1]  g -> g+1",
        "   2  copy c[g+2]  g -> g+1",
    ]
    assert printing.lines(expand(pairwise.all_to_all, 3)) == [
        "   0  copy c[g, g+1]  g -> g+1",
        "   1  copy c[g, g-1]  g -> g-1",
    ]
    assert printing.lines(expand(zoo.direct, 3)) == [
        "   0  add c[g-1]  g -> g-1    add c[g+1]  g -> g+1"
    ]


def test_edges_elsewhere():
    assert printing.lines(expand(tree.reduce, 4)) == [
        "   0  add c[0]  1 -> 2    add c[0]  3 -> 2",
        "   1  add c[0]  2 -> 0",
    ]
    # A pair of ranks that swap is relative, but not a mere part of it.
    assert printing.lines(expand(tree.reduce, 2)) == ["   0  add c[0]  1 -> 0"]


def test_long_steps_are_cut():
    (line,) = printing.lines(expand(server.push, 100))
    assert line.endswith("add c[0]  16 -> 0    ... 83 more")


def test_where_a_step_failed_is_marked():
    program = expand(ring.all_gather, 6)
    assert printing.around(program, 3).splitlines() == [
        "     1  copy c[g-1]  g -> g+1",
        "     2  copy c[g-2]  g -> g+1",
        ">    3  copy c[g+3]  g -> g+1",
        "     4  copy c[g+2]  g -> g+1",
    ]


def test_text_keeps_names_and_adds_only_the_brackets_it_needs():
    for text in [
        "tree.all_reduce @ gpu",
        "(tree.all_reduce | ring.all_reduce) @ gpu",
        "(ring.reduce_scatter | ring.reduce_scatter) >> ring.all_gather",
        "ring.reduce_scatter >> ring.all_gather | tree.all_reduce",
        "(ring.all_reduce @ gpu).reversed()",
    ]:
        assert str(parse(text)) == text
        assert printing.text(parse(f"(({text}))")) == text
