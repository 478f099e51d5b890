"""Operators, what may be placed and joined, the wording of type errors, and normal forms."""

import copy
import functools
import pickle

import numpy as np
import pytest

from collc import language as cl
from collc.errors import ScheduleError
from collc.language.parse import parse
from collc.schedules import native, pairwise, rack, ring, server, tree

rs, ag, ar = ring.reduce_scatter, ring.all_gather, ring.all_reduce


@cl.order
def swap(n):
    return np.arange(n) ^ 1 if n % 2 == 0 else np.arange(n)


def refused(make) -> str:
    with pytest.raises(ScheduleError) as caught:
        make()
    return str(caught.value)


def test_types():
    for s, want in [
        (rs, "partial -> shard"), (ag, "shard -> replica"), (ar, "partial -> replica"),
        (tree.reduce, "partial -> root"), (tree.broadcast, "root -> replica"),
        (pairwise.all_to_all, "outbox -> inbox"), (native.all_reduce, "partial -> replica"),
        (rs @ "x" >> ar @ "y" >> ag @ "x", "partial,partial -> replica,replica"),
        (rs @ "x" >> ar @ "y", "x partial -> shard, y partial -> replica"),
        ((rs | rs) @ ("x", "y"), "partial,partial -> shard,shard"),
        (rs.reversed(), "shard -> replica"),
    ]:  # fmt: skip
        assert str(s.type) == want, s
    assert (rs @ "x" >> ar @ "y").collective is None
    assert str((rs @ "x" >> ar @ "y" >> ag @ "x").collective) == "all_reduce"
    assert (rs @ "x" >> ar @ "y").axes == ("x", "y")
    assert rs.axes == ()


def test_states_that_do_not_meet():
    assert refused(lambda: rs @ "gpu" >> ag @ "gpu" >> ag @ "gpu") == (
        "`ring.all_gather @ gpu` needs gpu to be shard, but after `ring.all_gather @ gpu` it is "
        "replica. Drop the second gather."
    )
    assert refused(lambda: rs @ "gpu" >> rs @ "gpu") == (
        "`ring.reduce_scatter @ gpu` needs gpu to be partial, but after `ring.reduce_scatter @ gpu` "
        "it is shard. Drop the second scatter."
    )
    assert refused(lambda: ar >> ar).endswith("it is replica. Drop the second reduce.")
    assert refused(lambda: ag >> rs) == (
        "`ring.reduce_scatter` needs its axis to be partial, but after `ring.all_gather` it is "
        "replica. Put something between that makes replica partial, or drop one."
    )
    assert "needs gpu to be partial" in refused(lambda: rs @ "gpu" >> ar @ ("gpu", "host"))
    assert "but after `tree.reduce` it is root" in refused(lambda: tree.reduce >> ag)


def test_parts_that_differ():
    assert refused(lambda: rs | ag) == (
        "ring.reduce_scatter | ring.all_gather: the parts differ in type: partial -> shard beside "
        "shard -> replica. Every part has to do the same on the same axes."
    )
    assert "x partial -> shard beside y partial -> shard" in refused(lambda: rs @ "x" | rs @ "y")


def test_roots_that_differ():
    moved = tree.reduce.relabel(shift=1)
    assert (moved >> tree.broadcast.relabel(shift=1)).collective is not None
    assert refused(lambda: moved >> tree.broadcast) == (
        "tree.broadcast needs another root on its axis than the one that tree.reduce.relabel(shift=1) "
        "leaves. Relabel both alike."
    )
    assert "differ in type" in refused(lambda: tree.reduce | moved)
    # Rank 0 is rank 0, whichever way the axes are named; another rank is not.
    tree.reduce @ ("x", "y") >> tree.broadcast @ ("y", "x")
    tree.reduce @ ("x", "y") >> tree.broadcast @ "x" >> tree.broadcast @ "y"
    assert "another root on y" in refused(
        lambda: moved @ ("x", "y") >> moved.reversed() @ ("y", "x")
    )


def test_placing():
    assert str(ar @ "gpu") == "ring.all_reduce @ gpu"
    assert str(ar @ ("host", "gpu")) == "ring.all_reduce @ (host, gpu)"
    assert ar @ ("gpu",) == ar @ "gpu"
    assert refused(lambda: ar @ "gpu" @ "host") == (
        "ring.all_reduce @ gpu is placed already, on gpu. Drop one @."
    )
    assert "is placed already" in refused(lambda: (rs @ "x" >> ag @ "x") @ "x")
    assert "an axis is named twice" in refused(lambda: ar @ ("x", "x"))
    for bad in ("", (), "two words", 3, None, ("x", 1), "if", "a-b", {"x": 1}):
        assert "an axis is a name, or a tuple of names" in refused(lambda bad=bad: ar @ bad)
    assert refused(lambda: rs @ "x" >> ag) == (
        "ring.reduce_scatter @ x >> ring.all_gather: one side of >> is placed on axes, "
        "ring.all_gather is not. Place it with @, or place the whole."
    )
    assert "one side of | is placed" in refused(lambda: rs | rs @ "x")


def test_relabelling():
    assert rs.relabel(shift=0) == rs
    assert rs.relabel(shift=1).relabel(shift=2) == rs.relabel(shift=3)
    assert rs.relabel(shift=1).relabel(shift=-1) == rs
    assert str(rs.relabel(shift=np.int8(1))) == "ring.reduce_scatter.relabel(shift=1)"
    assert rs.relabel(order=(1, 0)) != rs
    assert rs.relabel(order=[1, 0]) == rs.relabel(order=np.array([1, 0]))
    assert str(rs.relabel(order=swap)) == "ring.reduce_scatter.relabel(order=test_algebra.swap)"
    assert "either shift= or order=" in refused(lambda: rs.relabel())
    assert "either shift= or order=" in refused(lambda: rs.relabel(shift=1, order=(0,)))
    assert "placed already: relabel first" in refused(lambda: (rs @ "x").relabel(shift=1))
    assert "decorate it with @language.order" in refused(
        lambda: rs.relabel(order=lambda n: range(n))
    )
    assert "an order is a sequence of ranks" in refused(lambda: rs.relabel(order=3))
    for bad in (1.5, 1.0, True, np.bool_(1), "1"):
        assert "ranks and shifts are integers" in refused(lambda bad=bad: rs.relabel(shift=bad))
        assert "ranks and shifts are integers" in refused(
            lambda bad=bad: rs.relabel(order=(0, bad))
        )


def test_orders_are_permutations_of_the_axis():
    import collc

    for order in ((0, 1), (0, 1, 1), (0, 1, 3), (-1, 0, 1)):
        with pytest.raises(ScheduleError, match="needs each of the ranks 0 to 2 once"):
            collc.verify(rs.relabel(order=order), n=3)
    assert collc.verify(rs.relabel(shift=10**30), n=3).steps == 2

    broken = cl.Order("broken", lambda n: [0] * n)
    with pytest.raises(ScheduleError, match=r"relabel\(order=broken\)"):
        collc.verify(rs.relabel(order=broken), n=3)


def test_operators_leave_strangers_alone():
    for make in (lambda: rs >> 1, lambda: rs | None, lambda: 1 >> rs):
        with pytest.raises(TypeError, match="unsupported operand"):
            make()


def test_nesting():
    s = rs
    for _ in range(3000):
        s = s.reversed()
    assert s is rs and rs.reversed().reversed() is rs

    def deep():
        s = rs
        for _ in range(3000):
            s = s.relabel(shift=1)

    assert "more than 100 operators inside one another" in refused(deep)
    long = ar @ "x0"
    for i in range(1, 300):  # a chain is flat
        long = long >> ar @ f"x{i}"
    assert len(parse(str(long)).axes) == 300


def test_pickling():
    for s in (ar @ "gpu", server.shards(2).relabel(shift=1), rs @ "x" >> ar @ "y" >> ag @ "x"):
        again = pickle.loads(pickle.dumps(s))
        assert again == s and str(again) == str(s)
        assert copy.deepcopy(s) is s and copy.copy(s) is s
    assert "cannot be pickled: its text does not lead back" in refused(
        lambda: pickle.dumps(cl.all_gather(lambda n: iter([])) @ "gpu")
    )


def test_normal_forms():
    s = ((rs >> ag) | tree.all_reduce) @ "x"
    assert str(s) == "(ring.reduce_scatter >> ring.all_gather | tree.all_reduce) @ x"
    assert str(s.normal) == (
        "ring.reduce_scatter @ x >> ring.all_gather @ x | "
        "tree.reduce @ x >> tree.reduce.reversed() @ x"
    )
    assert str(((rs | rs) >> (ag | ag)).normal) == (
        "ring.reduce_scatter >> ring.all_gather | ring.reduce_scatter >> ring.all_gather"
    )
    # Other arities stay as they are.
    assert str(((rs | rs) >> ag).normal) == (
        "(ring.reduce_scatter | ring.reduce_scatter) >> ring.all_gather"
    )
    assert str((rs.relabel(shift=1) @ "x").reversed().normal) == (
        "ring.reduce_scatter.relabel(shift=1).reversed() @ x"
    )
    assert (rs >> ag) == ring.all_reduce and hash(rs >> ag) == hash(ring.all_reduce)
    assert rs != ag and rs != "ring.reduce_scatter"
    # A leaf is never equal to another algorithm's, nor to its own dual.
    assert ring.all_gather != ring.reduce_scatter.reversed()


def test_equality_survives_tables():
    table = {ar @ "x": 1, server.shards(3): 2}
    assert table[(rs >> ag) @ "x"] == 1
    assert table[parse("server.shards(3)")] == 2
    assert server.shards(2) not in table


def test_precedence_is_pythons():
    s = rs @ "x" >> ar @ "y" >> ag @ "x" | rs @ "y" >> ar @ "x" >> ag @ "y"
    assert len(s.parts) == 2 and len(s.parts[0].parts) == 3
    assert str(s) == (
        "ring.reduce_scatter @ x >> ring.all_reduce @ y >> ring.all_gather @ x | "
        "ring.reduce_scatter @ y >> ring.all_reduce @ x >> ring.all_gather @ y"
    )


def test_families():
    assert str(server.shards(4)) == "server.shards(4)"
    assert str(pairwise.two_level("host", "gpu")) == 'pairwise.two_level("host", "gpu")'
    assert repr(server.shards) == "<server.shards(...)>"
    for wrong in (1.5, True, (1, 1.5), None):
        last = wrong[-1] if isinstance(wrong, tuple) else wrong
        message = f"server.shards takes integers, axis names and tuples of those, not {last}"
        assert message in refused(lambda wrong=wrong: server.shards(wrong))
    assert str(ring.rings([0, 1], (np.int64(1), 0))) == "ring.rings((0, 1), (1, 0))"
    assert str(ring.rings((0,))) == "ring.rings((0,))"
    # One text means one schedule, also where its leaves have no names.
    assert rack.all_reduce((0, 1)) == rack.all_reduce([0, 1])
    assert "server.shards(1, 2): " in refused(lambda: server.shards(1, 2))
    assert refused(lambda: server.shards(0)) == (
        "server.shards(0): @all_reduce: chunks is a positive integer, not 0"
    )
    assert server.shards(np.int64(3)) == server.shards(3)
    nothing = cl.family(lambda: None)
    assert "has to return a schedule, not None" in refused(lambda: nothing())


def test_decorators():
    assert refused(lambda: cl.reduce_scatter(chunks=2)).startswith(
        "@reduce_scatter(chunks=2): in a reduce_scatter chunk c belongs to rank c"
    )
    assert "chunks is a positive integer, not 0" in refused(lambda: cl.all_reduce(chunks=0))
    assert "not True" in refused(lambda: cl.all_reduce(chunks=True))
    assert "not 2.0" in refused(lambda: cl.all_reduce(chunks=2.0))
    assert cl.all_reduce(chunks=np.int32(2))(lambda n: iter([])).chunks == 2
    assert "decorates a generator function, not 3" in refused(lambda: cl.all_reduce(3))
    assert "@family decorates a function, not 3" in refused(lambda: cl.family(3))
    assert "@order: functools.partial(" in refused(lambda: cl.order(functools.partial(swap)))
    assert "has to be a function at the top of its module" in refused(lambda: cl.order(lambda n: n))
    assert rs.__doc__.startswith("Chunk c sets out")
