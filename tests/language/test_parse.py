"""From text and back; text that is none, or means harm, gets one readable error."""

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import collc
from collc.errors import CollcError, ScheduleError
from collc.schedules import hierarchical, pairwise, ring, server, tree

ROUND_TRIPS = [
    "ring.all_reduce",
    "ring.all_reduce @ gpu",
    "tree.double_all_reduce @ (host, gpu)",
    "ring.reduce_scatter @ gpu >> tree.double_all_reduce @ host >> ring.all_gather @ gpu",
    "ring.reduce_scatter | ring.reduce_scatter.relabel(shift=-1)",
    "(ring.reduce_scatter | ring.reduce_scatter.reversed().relabel(shift=1).reversed()) @ gpu",
    "(ring.reduce_scatter | ring.reduce_scatter) >> ring.all_gather",
    "ring.reduce_scatter.relabel(order=(0, 2, 1, 3)) @ gpu",
    "ring.reduce_scatter.relabel(order=(0,))",
    "(ring.reduce_scatter >> ring.all_gather).relabel(shift=2)",
    "(ring.reduce_scatter @ gpu >> ring.all_gather @ gpu).reversed()",
    "(ring.reduce_scatter @ gpu).reversed()",
    "server.shards(4) @ gpu",
    "server.shards(4).relabel(shift=1).reversed() @ gpu",
    'hierarchical("host", "gpu")',
    'pairwise.two_level("host", "gpu").reversed()',
    "native.reduce_scatter @ gpu >> ring.all_gather @ gpu",
]


@pytest.mark.parametrize("text", ROUND_TRIPS)
def test_round_trip(text):
    s = collc.parse(text)
    assert str(s) == text
    assert collc.parse(str(s)) == s
    assert collc.parse(f"\n  {text}  \n") == s


def test_meaning():
    assert collc.parse("ring.all_reduce") is ring.all_reduce
    assert collc.parse("server.shards(4)") == server.shards(4)
    assert collc.parse('ring.all_reduce @ "gpu"') == (ring.all_reduce @ "gpu")
    assert collc.parse('hierarchical("h", "g")') == hierarchical.hierarchical("h", "g")
    assert collc.parse('hierarchical.hierarchical("h", "g")') == hierarchical.hierarchical("h", "g")
    assert collc.parse("tree.all_reduce @ x") == tree.reduce @ "x" >> tree.broadcast @ "x"
    assert collc.parse("pairwise.two_level('h', 'g')") == pairwise.two_level("h", "g")
    # Python's own precedence.
    assert collc.parse("ring.reduce_scatter >> ring.all_gather | tree.all_reduce") == (
        (ring.reduce_scatter >> ring.all_gather) | tree.all_reduce
    )


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "cannot read the schedule ''"),
        ("ring.all_reduce @", "cannot read the schedule 'ring.all_reduce @'"),
        ("ring.all_reduce @ gpu gpu", "at column 23: invalid syntax"),
        ("rnig.all_reduce", "there is no schedule module 'rnig'. Did you mean ring?"),
        ("ring.all_redcue", "there is no schedule 'ring.all_redcue'. Did you mean ring.all_reduce"),
        ("ring", "ring is a module: ring.reduce_scatter, ring.all_gather, ring.all_reduce"),
        ("server.shards(k=4)", "arguments are positional: server.shards(4)"),
        (
            "pairwise.two_level(inner='gpu', outer='host')",
            "arguments are positional: pairwise.two_level('host', 'gpu')",
        ),
        ("ring.all_reduce(k=4)", "ring.all_reduce takes no parameters"),
        ("ring.ranks", "there is no schedule 'ring.ranks'"),
        ("ring.cl", "there is no schedule 'ring.cl'"),
        ("tree.levels", "there is no schedule 'tree.levels'"),
        ("server.shards", "server.shards has parameters: server.shards(...)"),
        ("server.shards()", "server.shards():"),
        ("server.shards(1.5)", "takes integers, axis names and tuples of those, not 1.5"),
        ("ring.rings((0, 1.5))", "takes integers, axis names and tuples of those, not 1.5"),
        ("ring.rings((0, n))", "expected a literal"),
        (
            "server.shards(n)",
            "cannot read 'n' in the schedule 'server.shards(n)': expected a literal",
        ),
        ("server.shards(k=2)", "arguments are positional: server.shards(2)"),
        ("server.shards(*[2])", "expected a literal"),
        ("ring.all_reduce(4)", "ring.all_reduce takes no parameters"),
        ("ring.all_reduce @ 5", "after @ comes an axis, or a tuple of axes"),
        ("ring.all_reduce @ gpu[0]", "after @ comes an axis"),
        ("ring.all_reduce @ (x, (y, z))", "cannot read '(x, (y, z))'"),
        ("ring.all_reduce @ 'two words'", "an axis is a name"),
        ("ring.all_reduce @ x @ y", "is placed already, on x"),
        ("ring.all_reduce + ring.all_reduce", "a schedule is made of names, @, >>, |, relabel"),
        ("ring.all_reduce >> 3", "cannot read '3'"),
        ("ring.all_reduce.relabel(1)", "cannot read"),
        ("ring.all_reduce.relabel(shift='1')", "shift= takes an integer"),
        ("ring.all_reduce.relabel(shift=True)", "shift= takes an integer"),
        ("ring.all_reduce.relabel(order=5)", "order= takes a tuple of integers or the name"),
        ("ring.all_reduce.relabel(order=(0, 1.0))", "order= takes a tuple of integers"),
        ("ring.all_reduce.relabel(order=ring.all_gather)", "ring.all_gather is not an order"),
        ("ring.all_reduce.relabel(shift=1, order=(0,))", "a schedule is made of names"),
        ("ring.all_reduce.reversed(1)", "cannot read"),
        ("ring.all_gather >> ring.all_gather", "Drop the second gather"),
        ("__import__('os').system('true')", "cannot read"),
        ("ring.all_reduce.__class__", "expected a name such as ring.all_reduce"),
        ("ring.__dict__", "there is no schedule 'ring.__dict__'"),
        ("(lambda: ring.all_reduce)()", "expected a name"),
        ("[ring.all_reduce][0]", "cannot read"),
        ("ring.all_reduce if 1 else 2", "cannot read"),
        ("x := ring.all_reduce", "cannot read"),
        ("import os", "cannot read"),
        ("ring\0", "null bytes"),
        ("f'{ring}'", "cannot read"),
    ],
)
def test_refused(text, words):
    with pytest.raises(ScheduleError) as caught:
        collc.parse(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 500 + "ring.all_reduce" + ")" * 500,
        "ring.all_reduce" + ".reversed()" * 20_000,
        "ring.all_reduce >> " * 20_000 + "ring.all_reduce",
        "ring.all_reduce @ " + "x" * 1_000_000 + " @ y",
        "ring.all_reduce.relabel(shift=" + "-" * 5_000 + "1)",
        "9" * 5_000,
    ],
    ids=["parentheses", "calls", "operators", "axis", "minuses", "digits"],
)
def test_bombs_are_refused_quickly_and_briefly(text):
    start = time.perf_counter()
    with pytest.raises(CollcError):
        collc.parse(text)
    assert time.perf_counter() - start < 20  # generous: it takes a fraction of a second


def test_large_numbers_are_numbers():
    s = collc.parse(f"ring.reduce_scatter.relabel(shift={10**40})")
    assert collc.verify(s, n=4).steps == 3
    assert collc.parse(str(s)) == s


@given(st.text(alphabet="ring.alducex @(),>|'\"10=\n", max_size=60))
@example("ring.all_reduce @ x,")
@example("'ring' @ x")
def test_any_text_is_read_or_refused(text):
    try:
        s = collc.parse(text)
    except ScheduleError as e:
        assert str(e)
    else:
        assert collc.parse(str(s)) == s
