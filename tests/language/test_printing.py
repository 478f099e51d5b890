"""Golden prints: the shortest true thing, for every schedule of the library."""

import math

import pytest

import collc
from collc.language import printing
from collc.language.expand import expand
from collc.language.library import modules
from collc.language.parse import parse
from collc.schedules import allpairs, pairwise, ring, server, tree

PRINTS = {
    "ring": [
        ("ring.all_reduce @ gpu", {"gpu": 4}),
        ("ring.all_reduce @ gpu", {"gpu": 5}),
        ("ring.two_way_all_reduce @ gpu", {"gpu": 4}),
        ("ring.rings((0, 1, 2, 3), (0, 2, 1, 3)) @ gpu", {"gpu": 4}),
    ],
    "allpairs": [("allpairs.one_shot @ gpu", {"gpu": 4}), ("allpairs.two_shot @ gpu", {"gpu": 3})],
    "binomial": [("binomial.all_reduce @ gpu", {"gpu": 8}), ("binomial.reduce @ gpu", {"gpu": 6})],
    "bruck": [("bruck.all_to_all @ gpu", {"gpu": 4}), ("bruck.all_to_all @ gpu", {"gpu": 5})],
    "chain": [("chain.all_reduce @ gpu", {"gpu": 4})],
    "halving": [
        ("halving.all_reduce @ gpu", {"gpu": 4}),
        ("halving.all_reduce @ gpu", {"gpu": 5}),
    ],
    "doubling": [
        ("doubling.all_reduce @ gpu", {"gpu": 4}),
        ("doubling.all_reduce @ gpu", {"gpu": 5}),
    ],
    "pat": [("pat.all_reduce @ gpu", {"gpu": 8}), ("pat.all_gather @ gpu", {"gpu": 5})],
    "rack": [("rack.all_reduce((0, 2, 4), (1, 3)) @ gpu", {"gpu": 5})],
    "torus": [
        ('torus("x", "y")', {"x": 3, "y": 2}),
        ('torus("x", "y", "z")', {"x": 2, "y": 2, "z": 2}),
    ],
    "tree": [
        ("tree.all_reduce @ gpu", {"gpu": 4}),
        ("tree.all_reduce @ gpu", {"gpu": 7}),
        ("tree.double_all_reduce @ gpu", {"gpu": 8}),
        ("tree.double_all_reduce @ gpu", {"gpu": 5}),
    ],
    "server": [
        ("server.star @ gpu", {"gpu": 4}),
        ("server.scatter @ gpu", {"gpu": 4}),
        ("server.gather @ gpu", {"gpu": 4}),
        ("server.shards(2) @ gpu", {"gpu": 4}),
        ("server.shards(4) @ gpu", {"gpu": 4}),
    ],
    "servers": [
        ("servers.push(2) @ gpu >> servers.pull(2) @ gpu", {"gpu": 4}),
        ("servers.push(3) @ gpu", {"gpu": 3}),
    ],
    "pairwise": [
        ("pairwise.all_to_all @ gpu", {"gpu": 4}),
        ('pairwise.two_level("host", "gpu")', {"host": 2, "gpu": 3}),
    ],
    "hierarchical": [
        ('hierarchical("host", "gpu")', {"host": 4, "gpu": 4}),
        ('hierarchical("pod", "host", "gpu")', {"pod": 2, "host": 2, "gpu": 2}),
    ],
    "native": [
        ("native.all_reduce @ gpu", {"gpu": 4}),
        ("native.all_reduce @ (host, gpu)", {"host": 2, "gpu": 4}),
        ("ring.reduce_scatter @ gpu >> native.all_reduce @ host >> ring.all_gather @ gpu",
         {"host": 2, "gpu": 4}),
    ],
    "operators": [
        ("(ring.reduce_scatter @ x >> tree.all_reduce @ y >> ring.all_gather @ x"
         " | ring.reduce_scatter @ y >> tree.all_reduce @ x >> ring.all_gather @ y)",
         {"x": 2, "y": 2}),
        ("ring.all_reduce.relabel(shift=1).reversed() @ (x, y)", {"x": 2, "y": 2}),
    ],
}  # fmt: skip


def test_every_module_has_its_prints():
    assert {*modules()} <= PRINTS.keys()


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
    assert printing.lines(expand(allpairs.reduce_scatter, 3)) == [
        "   0  add c[g+1]  g -> g+1    add c[g-1]  g -> g-1"
    ]


def test_edges_elsewhere():
    assert printing.lines(expand(tree.reduce, 4)) == [
        "   0  add c[0]  1 -> 2    add c[0]  3 -> 2",
        "   1  add c[0]  2 -> 0",
    ]
    # A pair of ranks that swap is relative, but not a mere part of it.
    assert printing.lines(expand(tree.reduce, 2)) == ["   0  add c[0]  1 -> 0"]


def test_long_steps_are_cut():
    (line,) = printing.lines(expand(server.reduce, 100))
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
