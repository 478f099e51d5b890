"""Every way in which what runs can differ from what was asked for has its name."""

import dataclasses

import pytest

from collc.lowering.sends import Asked
from collc.receipts.compare import compare
from collc.receipts.hlo import AllGather, AllReduce, AllToAll, CollectivePermute, ReduceScatter

MESH = {"host": 2, "gpu": 2}
ALL, GPU, HOST = ((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0, 2), (1, 3))
RING = ((0, 1), (1, 0), (2, 3), (3, 2))
OURS = "jit(f)/shard_map/collc/ring.reduce_scatter/gpu/r0/ppermute"


def made(cls, name, elements, among, dtype="f32", count=1, op_name=""):
    """A collective with one result for each number of elements."""
    each = elements if isinstance(elements, tuple) else (elements,)
    own = {"pairs": among} if cls is CollectivePermute else {"groups": among}
    if cls in (AllReduce, ReduceScatter):
        own["reduction"] = "add"
    return cls(
        name=name,
        dtypes=(dtype,) * len(each),
        shapes=tuple((n,) for n in each),
        operands=(),
        count=count,
        asynchronous=False,
        kernel="",
        op_name=op_name,
        beside=(),
        **own,
    )


def all_reduce(axes, elements, count=1, dtype="f32", scope="psum", plan=False):
    return Asked("all-reduce", axes, None, dtype, elements, count, scope, plan, "add")


def permute(elements, count=1, dtype="f32", edges=((0, 1), (1, 0))):
    scope = "collc/ring.reduce_scatter/gpu"
    return Asked("collective-permute", ("gpu",), edges, dtype, elements, count, scope, True)


def differences(asked, found, sizes=MESH):
    return [(d.what, d.count, d.names) for d in compare(asked, found, sizes).differences]


def test_equal():
    asked = [permute(8, 6), all_reduce(("host",), 8), all_reduce(("host", "gpu"), 1, 2)]
    found = [
        made(CollectivePermute, "a", 8, RING[::-1], count=2),
        made(CollectivePermute, "b", 8, RING, count=4),
        made(AllReduce, "c", 8, ((2, 0), (1, 3))),
        made(AllReduce, "d", 1, ALL, count=2),
    ]
    compared = compare(asked, found, MESH)
    assert compared.differences == ()
    assert [[(a.axes, n) for a, n in own] for own in compared.served] == [
        [(("gpu",), 2)],
        [(("gpu",), 4)],
        [(("host",), 1)],
        [(("host", "gpu"), 2)],
    ]


def test_a_permute_that_moves_along_one_axis_only():
    over_both = dataclasses.replace(permute(8, edges=((0, 2),)), axes=("host", "gpu"))
    found = [made(CollectivePermute, "a", 8, ((0, 2),))]
    assert differences([over_both], found) == []


def test_a_loop_that_nobody_can_count():
    asked = [dataclasses.replace(permute(8), count=None)]
    assert differences(asked, [made(CollectivePermute, "a", 8, RING, count=7)]) == []
    assert differences(asked, []) == []


def test_merged():
    asked = [all_reduce(("gpu",), 8), all_reduce(("gpu",), 4), all_reduce(("gpu",), 8)]
    found = [made(AllReduce, "a", (8, 4, 8), GPU)]
    assert differences(asked, found) == [("merged", 1, ("a",))]
    (one,) = compare(asked, found, MESH).differences
    assert str(one) == (
        "merged: 3 that were asked for (psum) are one all-reduce over gpu of 80 B f32"
    )


def test_merged_end_to_end():
    """As XLA:GPU does below some 30 MiB: one buffer, in whatever order."""
    asked = [
        all_reduce(("gpu",), 8, 2, scope="psum"),
        all_reduce(("gpu",), 1, scope="pmax"),
        all_reduce(("gpu",), 100),
        all_reduce(("gpu",), 30, dtype="bf16"),
    ]
    found = [
        made(AllReduce, "a", 17, GPU),
        made(AllReduce, "b", 30, GPU, dtype="bf16"),
        made(AllReduce, "c", 100, GPU),
    ]
    (one,) = compare(asked, found, MESH).differences
    assert (one.what, one.count, one.names) == ("merged", 1, ("a",))
    assert "3 that were asked for (psum, pmax) are one all-reduce over gpu of 68 B" in str(one)


def test_merged_in_a_loop():
    asked = [all_reduce(("gpu",), 8, 10), all_reduce(("gpu",), 3, 5)]
    assert differences(asked, [made(AllReduce, "a", 19, GPU, count=5)]) == [("merged", 5, ("a",))]


def test_partly_merged_with_what_nobody_asked_for():
    found = [made(AllReduce, "a", (8, 4), GPU)]
    assert differences([all_reduce(("gpu",), 8)], found) == [
        ("merged", 1, ("a",)),
        ("unplanned", 1, ("a",)),
    ]


def test_upcast_and_narrowed():
    asked = [permute(8, 3, "bf16"), all_reduce(("gpu",), 8)]
    found = [
        made(CollectivePermute, "a", 8, RING, count=3),
        made(AllReduce, "b", 8, GPU, dtype="bf16"),
    ]
    assert differences(asked, found) == [("upcast", 3, ("a",)), ("narrowed", 1, ("b",))]
    first = compare(asked, found, MESH).differences[0]
    assert "f32 travels, but bf16 was asked (ring.reduce_scatter @ gpu), 2 times" in str(first)


def test_split_as_blueconnect_does():
    asked = [all_reduce(("host", "gpu"), 8)]
    found = [
        made(ReduceScatter, "a", 4, GPU, op_name="jit(f)/psum"),
        made(AllReduce, "b", 4, HOST, op_name="jit(f)/psum"),
        made(AllGather, "c", 8, GPU, op_name="jit(f)/psum"),
    ]
    assert differences(asked, found) == [("split", 1, ("a", "b", "c"))]


def test_split_in_levels_without_a_name():
    """Each takes up what the one before it left; of two, each has its own."""
    asked = [all_reduce(("host", "gpu"), 8), all_reduce(("host", "gpu"), 16)]
    found = [
        made(cls, f"{name}{n}", elements, among)
        for n in (8, 16)
        for name, cls, elements, among in (
            ("a", ReduceScatter, n // 2, GPU),
            ("b", AllReduce, n // 2, HOST),
            ("c", AllGather, n, GPU),
        )
    ]
    assert differences(asked, found) == [
        ("split", 1, ("a8", "b8", "c8")),
        ("split", 1, ("a16", "b16", "c16")),
    ]
    what = [d[0] for d in differences(asked[:1], found[:2])]
    assert what == ["unplanned", "unplanned", "removed"]


def test_merged_and_then_split_in_levels():
    """As blueconnect does with what XLA has combined."""
    asked = [all_reduce(("host", "gpu"), 3), all_reduce(("host", "gpu"), 5)]
    found = [
        made(ReduceScatter, "a", 4, GPU),
        made(AllReduce, "b", 4, HOST),
        made(AllGather, "c", 8, GPU),
    ]
    assert differences(asked, found) == [("split", 1, ("a", "b", "c"))]


def levels(name, elements, count=1, reduction="add"):
    """What blueconnect makes of an all-reduce over both axes."""
    own = [
        made(ReduceScatter, f"{name}1", elements // 2, GPU, count=count),
        made(AllReduce, f"{name}2", elements // 2, HOST, count=count),
        made(AllGather, f"{name}3", elements, GPU, count=count),
    ]
    return [
        c if c.kind == "all-gather" else dataclasses.replace(c, reduction=reduction) for c in own
    ]


BOTH = ("host", "gpu")


def test_two_of_one_size_in_levels_are_two():
    asked = [all_reduce(BOTH, 8), all_reduce(BOTH, 8)]
    assert differences(asked, [*levels("a", 8), *levels("b", 8)]) == [
        ("split", 1, ("a1", "a2", "a3")),
        ("split", 1, ("b1", "b2", "b3")),
    ]
    assert differences(asked, levels("a", 16)) == [("split", 1, ("a1", "a2", "a3"))]
    assert differences([all_reduce(BOTH, 8, 2)], levels("a", 16)) == [
        ("split", 1, ("a1", "a2", "a3"))
    ]


def test_levels_run_as_often_as_what_was_asked():
    asked = [all_reduce(BOTH, 8, 5), all_reduce(BOTH, 8, 1)]
    assert differences(asked, [*levels("a", 8, 5), *levels("b", 8)]) == [
        ("split", 5, ("a1", "a2", "a3")),
        ("split", 1, ("b1", "b2", "b3")),
    ]


def test_levels_of_a_sum_and_a_maximum():
    asked = [all_reduce(BOTH, 8), dataclasses.replace(all_reduce(BOTH, 8), reduction="max")]
    found = [*levels("a", 8), *levels("b", 8, reduction="max")]
    compared = compare(asked, found, MESH)
    assert [d.what for d in compared.differences] == ["split", "split"]
    assert [own[0][0].reduction for own in compared.served] == ["add"] * 3 + ["max"] * 3


def test_levels_over_fewer_axes_are_of_something_else():
    asked = [all_reduce(BOTH, 8)]
    found = [
        made(ReduceScatter, "a", 4, HOST),
        made(AllReduce, "b", 4, ((0, 2), (1, 3))),
        made(AllGather, "c", 8, HOST),
    ]
    assert {d[0] for d in differences(asked, found)} == {"unplanned", "removed"}


def test_layers_that_are_merged_one_by_one():
    """XLA combines neighbours; what is equal in other layers is theirs."""
    sizes = [7000, 10, 30, 11, 70]
    asked = [all_reduce(("gpu",), n) for _ in range(40) for n in sizes]
    found = [made(AllReduce, f"a{i}", sum(sizes), GPU) for i in range(40)]
    compared = compare(asked, found, MESH)
    assert [d.what for d in compared.differences] == ["merged"] * 40
    assert all([a.elements for a, _ in own] == sizes for own in compared.served)


def test_in_a_loop_that_nobody_can_count():
    asked = [dataclasses.replace(all_reduce(BOTH, n), count=None) for n in (3, 5)]
    assert differences(asked, [made(AllReduce, "a", 8, ALL, count=7)]) == [("merged", 7, ("a",))]
    assert differences(asked, levels("a", 8, 7)) == [("split", 7, ("a1", "a2", "a3"))]


def test_other_sizes_of_one_name_are_not_passed_off_as_a_split():
    asked = [all_reduce(("gpu",), 16, 3)]
    found = [made(AllReduce, "a", 20, GPU, count=3, op_name="jit(f)/psum")]
    assert [d[0] for d in differences(asked, found)] == ["unplanned", "removed"]


def test_split_never_takes_another_axis():
    asked = [all_reduce(("gpu",), 8)]
    found = [made(AllReduce, "a", 8, HOST, op_name="jit(f)/psum")]
    assert differences(asked, found) == [("unplanned", 1, ("a",)), ("removed", 1, ())]


def test_unplanned_names_the_axis_that_no_plan_names():
    found = [
        made(CollectivePermute, "a", 8, RING, op_name=OURS),
        made(AllGather, "b", 8, HOST, count=24, op_name="jit(f)/mlp/dot_general"),
    ]
    (one,) = compare([permute(8)], found, MESH).differences
    assert (one.what, one.count) == ("unplanned", 24)
    assert "over host of 32 B f32, 24 times (jit(f)/mlp/dot_general): XLA put it in" in str(one)
    assert str(one).endswith("the plan does not name host")


def test_removed_and_repeated():
    asked = [permute(8, 3)]
    assert differences(asked, [made(CollectivePermute, "a", 8, RING, count=2)]) == [
        ("removed", 1, ())
    ]
    assert differences(asked, [made(CollectivePermute, "a", 8, RING, count=5)]) == [
        ("repeated", 2, ("a",))
    ]


def test_other_pairs_are_another_permute():
    asked = [permute(8)]
    found = [made(CollectivePermute, "a", 8, ((0, 1), (1, 0)))]
    assert [d[0] for d in differences(asked, found)] == ["unplanned", "removed"]


@pytest.mark.parametrize("share", [1, 2, 3, 6])
def test_automatic_axes_share_an_operand_out(share):
    sizes = {"gpu": 2, "model": 3, "data": 2}
    pairs = tuple((a, b) for i in range(6) for a, b in ((i, i + 6), (i + 6, i)))
    found = [made(CollectivePermute, "a", 12 // share, pairs)]
    assert differences([dataclasses.replace(permute(12), free=True)], found, sizes) == []
    expected = [] if share == 1 else [("resharded", 1, ("a",))]
    assert differences([permute(12)], found, sizes) == expected


def test_more_than_was_asked_over_automatic_axes():
    sizes = {"gpu": 2, "model": 4}
    pairs = tuple((a, b) for i in range(4) for a, b in ((i, i + 4), (i + 4, i)))
    found = [made(CollectivePermute, "a", 48, pairs)]
    (one,) = compare([permute(12)], found, sizes).differences
    assert one.what == "resharded" and "4 times what was asked (ring.reduce_scatter @ gpu)" in str(
        one
    )


def test_no_other_share():
    sizes = {"gpu": 2, "model": 3, "data": 2}
    pairs = tuple((a, b) for i in range(6) for a, b in ((i, i + 6), (i + 6, i)))
    found = [made(CollectivePermute, "a", 5, pairs)]
    assert [d[0] for d in differences([permute(12)], found, sizes)] == ["unplanned", "removed"]


def test_scopes_decide_among_equals():
    asked = [all_reduce(("gpu",), 8, scope="collc/native.all_reduce/gpu", plan=True)]
    asked.insert(0, all_reduce(("gpu",), 8))
    found = [
        made(AllReduce, "a", 8, GPU, op_name="f/collc/native.all_reduce/gpu/psum"),
        made(AllReduce, "b", 8, GPU, op_name="f/psum"),
    ]
    compared = compare(asked, found, MESH)
    assert [a.plan for own in compared.served for a, _ in own] == [True, False]


def test_one_instruction_that_runs_twice():
    """A computation that is called from two places gives its collectives twice."""
    found = [made(AllReduce, "a", 8, GPU), made(AllReduce, "a", 8, GPU)]
    compared = compare([all_reduce(("gpu",), 8, 2)], found, MESH)
    assert compared.differences == () and [len(own) for own in compared.served] == [1, 1]


def test_a_maximum_is_no_sum():
    asked = [dataclasses.replace(all_reduce(("gpu",), 8), reduction="max")]
    found = [made(AllReduce, "a", 8, GPU)]
    assert [d[0] for d in differences(asked, found)] == ["unplanned", "removed"]
    truths = [dataclasses.replace(asked[0], dtype="pred")]
    assert differences(truths, [made(AllReduce, "a", 8, GPU, dtype="pred")]) == []


def test_many_permutes_are_compared_in_no_time():
    n = 512
    hops = [tuple((r, (r + d) % n) for r in range(n)) for d in range(1, n)]
    asked = [dataclasses.replace(permute(8, edges=hop), axes=("gpu",)) for hop in hops]
    found = [made(CollectivePermute, f"p{i}", 8, hop) for i, hop in enumerate(reversed(hops))]
    assert differences(asked, found, {"gpu": n}) == []


def test_an_all_to_all_in_pieces():
    asked = [Asked("all-to-all", ("gpu",), None, "f32", 8, 1, "all_to_all", False)]
    assert differences(asked, [made(AllToAll, "a", (4, 4), GPU)]) == []
