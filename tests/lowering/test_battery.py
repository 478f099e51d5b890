"""Every schedule on small numbers of ranks: proof, NumPy and devices agree with ``jax.lax``.

New schedules join by being in ``collc.schedules``. `cases.check` has the comparison.
"""

import functools
import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax

from collc.analysis.certificate import verify
from collc.errors import CollcError
from collc.language.algebra import Schedule
from collc.language.leaves import Family
from collc.language.library import contents, load, modules
from collc.language.parse import parse

cases = load(Path(__file__).parent / "cases.py")
zoo = load(Path(__file__).parents[1] / "zoo.py")
random = load(Path(__file__).parents[1] / "strategies.py")

MOST = 17
WIDE = (3, 8)  # where all operations and dtypes are tried
FEW = (
    1,
    2,
    *WIDE,
    5,
    9,
    MOST,
)  # one rank, a pair, primes, powers of two, an odd composite, one more
OTHERS = (4, 6, 7, 10, 11, 12, 13, 14, 15, 16)  # of which each schedule has two
COMPOSED = (
    "ring.all_reduce | ring.all_reduce.reversed()",
    "ring.reduce_scatter | ring.reduce_scatter.relabel(shift=1)",
    "ring.all_gather | ring.all_gather.relabel(shift=2) | native.all_gather",
    "tree.all_reduce | ring.all_reduce | server.shards(2)",
    "ring.reduce_scatter >> (ring.all_gather | ring.all_gather.relabel(shift=1))",
    "(ring.reduce_scatter | native.reduce_scatter) >> ring.all_gather",
    "pairwise.all_to_all | pairwise.all_to_all.reversed() | native.all_to_all",
    "tree.reduce.relabel(shift=1) >> server.broadcast.relabel(shift=1)",
    "tree.broadcast | server.broadcast",
    "tree.reduce | server.reduce",
    "(tree.reduce | tree.reduce) >> (tree.broadcast | server.broadcast)",
    "servers.push(2) >> servers.pull(2)",
    "servers.push(2).relabel(shift=1) >> servers.pull(2).relabel(shift=1) | ring.all_reduce",
)


# Members of families over ranks, each for one number of them.
OF_RANKS = {
    "ring.rings((0, 1))": 2,
    "ring.rings((0, 2, 1), (1, 2, 0))": 3,
    "ring.rings((0, 1, 2, 3, 4), (0, 2, 4, 1, 3), (4, 3, 2, 1, 0))": 5,
    "ring.rings((0, 1, 2, 3, 4, 5, 6, 7), (0, 3, 6, 1, 4, 7, 2, 5))": 8,
    "rack.all_reduce((0, 1, 2))": 3,
    "rack.all_reduce((0, 1, 2, 3), (4, 5, 6, 7))": 8,
    "rack.all_reduce((5, 0), (3, 1), (2, 4))": 6,
    "rack.all_reduce((7, 3, 1), (0,), (2, 4, 5, 6, 8))": 9,
    "rack.all_reduce((0, 1, 2, 3, 4), (5,), (6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)).reversed()": 17,
}


def calls(family: Family) -> Iterator[Schedule]:
    """The family's schedules for small integers and the axes a, b, c, where it takes those."""
    parameters = inspect.signature(family.function).parameters
    # Of any number of axes: two and three.
    several = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    for count in (2, 3) if several else (len(parameters),):
        for literals in itertools.product(*[(1, 2, 3, name) for name in "abc"[:count]]):
            try:
                schedule = family(*literals)
                placed = {*schedule.type.before} >= {x for x in literals if isinstance(x, str)}
            except CollcError:
                continue
            if placed:
                yield schedule


def library() -> list[Schedule]:
    """All schedules of the library and of the zoo."""
    found: list[Schedule] = []
    for module in (*modules().values(), zoo):
        for value in contents(module).values():
            if isinstance(value, Schedule):
                found.append(value)
            elif isinstance(value, Family):
                members = list(calls(value))
                assert members or any(text.startswith(f"{value.name}(") for text in OF_RANKS), (
                    f"{value.name}: calls() finds no arguments for it, nor does OF_RANKS have any"
                )
                found += members
    return found


def variants(i: int, s: Schedule) -> list[Schedule]:
    """Its dual, and the i-th schedule with its ranks renamed: all in one of two ways, roots in both."""
    renamed = [s.relabel(shift=1), s.relabel(order=zoo.odd_first)]
    if str(s.collective) in cases.ROOTED:
        return [s.reversed(), *renamed]
    # To XLA all ranks are alike, but for a root.
    return [] if all(x.native for x in s.leaves()) else [s.reversed(), renamed[i % 2]]


def on_one_axis() -> dict[str, tuple[Schedule, dict[int, str]]]:
    """Schedules by name, each with its sizes and how much is tried: "wide", "all" or "lean".

    Variants that do the same as another schedule are left out.
    """
    plain = [s for s in library() if not s.axes]
    changed = [new for i, s in enumerate(plain) for new in variants(i, s)]
    found: dict[str, tuple[Schedule, dict[int, str]]] = {}
    seen: set[object] = set()
    for i, s in enumerate((*plain, *map(parse, COMPOSED), *changed)):
        does = tuple(verify(s, n=n).digest for n in (4, 5))
        roots = s.type.roots
        if s in seen or (i >= len(plain) and does in seen):
            continue
        seen |= {s, does}
        every = {n: "wide" if n in WIDE else "all" if n < 8 else "lean" for n in FEW}
        if i >= len(plain) or str(s).startswith("zoo"):
            # A few, and all among them.
            every = {2 + i % 3: "all", 5 + i % 5: "all", 10 + i % 8: "lean"}
        else:
            every |= {OTHERS[(2 * i + k) % len(OTHERS)]: "lean" for k in range(2)}
            # Of parts, which are tried by themselves, and of the members of families.
            if i % 3 and (len([*s.leaves()]) > 1 or str(s).endswith(")")):
                every[8] = "lean"
        found[str(s)] = s, {n: tried for n, tried in every.items() if n >= roots}
    return found


ONE = on_one_axis()
# Further sizes tell schedules and meshes apart, not versions of jax.
FURTHER = pytest.mark.newest_only


@pytest.mark.parametrize(
    "name, n",
    [
        pytest.param(name, n, marks=FURTHER if tried == "lean" and n != MOST else ())
        for name, (_, sizes) in ONE.items()
        for n, tried in sizes.items()
    ]
    + [*OF_RANKS.items()],
)
def test_one_axis(name, n):
    schedule, sizes = ONE[name] if name in ONE else (parse(name), {n: "all"})
    cases.check(schedule @ "x", {"x": n}, wide=sizes[n] == "wide", lean=sizes[n] == "lean")


# ---- composites on meshes -----------------------------------------------------------------------

TWO = ({"a": 2, "b": 2}, {"a": 2, "b": 4}, {"a": 3, "b": 5}, {"a": 8, "b": 2}, {"a": 1, "b": 6})
THREE = ({"a": 2, "b": 2, "c": 2}, {"a": 2, "b": 3, "c": 2}, {"a": 4, "b": 2, "c": 2})
ON_TWO = (
    'torus("a", "b").reversed()',
    'hierarchical("b", "a").reversed()',
    "ring.all_reduce @ b >> tree.all_reduce @ a",
    "ring.two_way_reduce_scatter @ b >> doubling.all_reduce @ a >> ring.two_way_all_gather @ b",
    "halving.reduce_scatter @ b >> allpairs.two_shot @ a >> pat.all_gather @ b",
    "binomial.reduce @ b >> chain.all_reduce @ a >> binomial.broadcast @ b",
    "tree.reduce @ b >> server.star @ a >> tree.broadcast @ b",
    "tree.reduce.relabel(shift=1) @ b >> tree.double_all_reduce @ a"
    " >> server.broadcast.relabel(shift=1) @ b",
    "ring.reduce_scatter @ b >> (tree.all_reduce | server.shards(3)) @ a >> ring.all_gather @ b",
    "ring.reduce_scatter @ a >> native.all_reduce @ b >> native.all_gather @ a",
    "ring.reduce_scatter @ a >> ring.reduce_scatter @ b",
    "ring.reduce_scatter @ b >> ring.reduce_scatter @ a",
    "native.reduce_scatter @ a >> ring.reduce_scatter @ b",
    "ring.reduce_scatter @ a >> ring.reduce_scatter @ b"
    " | ring.reduce_scatter @ b >> ring.reduce_scatter @ a",
    "ring.all_gather @ a >> ring.all_gather @ b",
    "ring.all_gather @ b >> (ring.all_gather | ring.all_gather.relabel(shift=1)) @ a",
    "ring.all_gather @ a >> native.all_gather @ b",
    "pairwise.all_to_all @ a >> pairwise.all_to_all @ b",
    "pairwise.all_to_all @ b >> native.all_to_all @ a",
    "bruck.all_to_all @ b >> pairwise.all_to_all @ a",
    "pairwise.all_to_all @ a >> pairwise.all_to_all @ b"
    " | pairwise.all_to_all @ b >> pairwise.all_to_all @ a",
    "tree.broadcast @ a >> server.broadcast @ b",
    "tree.broadcast.relabel(shift=1) @ b >> native.broadcast @ a",
    "tree.reduce @ a >> server.reduce.relabel(shift=1) @ b",
    "ring.reduce_scatter @ b >> servers.push(2) @ a >> servers.pull(2) @ a >> ring.all_gather @ b",
    "tree.reduce.relabel(shift=1) @ a >> servers.push(2) @ b",
    "servers.pull(2).relabel(shift=1) @ b >> server.broadcast @ a",
    "servers.push(3).relabel(shift=1) @ (b, a)",
    "servers.pull(3) @ (a, b)",
    "server.scatter @ a >> server.scatter @ b",
    "server.gather @ a >> server.gather.relabel(shift=1) @ b",
    # Tuples of axes, in both orders.
    "ring.all_reduce @ (a, b)",
    "tree.double_all_reduce @ (b, a)",
    "ring.two_way_all_reduce @ (b, a)",
    "native.all_reduce @ (a, b)",
    "native.all_reduce @ (b, a)",
    "ring.reduce_scatter @ (a, b)",
    "ring.reduce_scatter @ (b, a)",
    "pat.reduce_scatter @ (b, a)",
    "native.reduce_scatter @ (a, b)",
    "native.reduce_scatter @ (b, a)",
    "ring.all_gather @ (a, b)",
    "ring.all_gather.relabel(shift=3) @ (b, a)",
    "halving.all_gather @ (b, a)",
    "native.all_gather @ (a, b)",
    "native.all_gather @ (b, a)",
    "pairwise.all_to_all @ (a, b)",
    "pairwise.all_to_all @ (b, a)",
    "bruck.all_to_all @ (b, a)",
    "native.all_to_all @ (a, b)",
    "native.all_to_all @ (b, a)",
    "native.broadcast @ (b, a)",
    "tree.broadcast.relabel(shift=1) @ (b, a)",
    "(tree.reduce | server.reduce) @ (b, a)",
    # One axis: the other is a batch dimension.
    "ring.all_reduce @ a",
    "tree.all_reduce @ b",
    "pairwise.all_to_all @ a",
)
ON_THREE = (
    "ring.reduce_scatter @ c >> ring.reduce_scatter @ b >> tree.all_reduce @ a"
    " >> ring.all_gather @ b >> ring.all_gather @ c",
    "ring.reduce_scatter @ (c, a) >> tree.double_all_reduce @ b >> ring.all_gather @ (c, a)",
    "ring.reduce_scatter @ (c, a) >> ring.reduce_scatter @ b",
    "ring.all_gather @ b >> ring.all_gather @ (c, a)",
    "ring.reduce_scatter @ b >> server.star @ (c, a) >> ring.all_gather @ b",
    "pairwise.all_to_all @ c >> pairwise.all_to_all @ a >> pairwise.all_to_all @ b",
    "pairwise.all_to_all @ (c, a) >> pairwise.all_to_all @ b",
    "pairwise.all_to_all @ (c, a)",
    "tree.broadcast @ b >> tree.broadcast.relabel(shift=1) @ (c, a)",
    "ring.all_reduce @ (c, b, a)",
    "ring.reduce_scatter @ (b, c, a)",
    "ring.all_gather @ (c, a)",
    "tree.all_reduce @ b",
    'torus("a", "b") >> ring.all_reduce @ c',
    'ring.reduce_scatter @ c >> torus("b", "a") >> ring.all_gather @ c',
    'halving.reduce_scatter @ (a, c) >> hierarchical("b") >> halving.all_gather @ (a, c)',
    'pairwise.two_level("a", "b") >> bruck.all_to_all @ c',
    "native.all_reduce @ (c, a, b)",
    "native.reduce_scatter @ (b, c, a)",
    "native.all_gather @ (c, a, b)",
    "native.all_to_all @ (b, c, a)",
    "native.broadcast.relabel(shift=1) @ (c, a)",
)
ON_ONE_MESH = (
    ('hierarchical("a", "b", "c", "d")', {"a": 2, "b": 2, "c": 2, "d": 2}),
    ("ring.rings((0, 1, 2, 3, 4, 5), (0, 2, 4, 1, 5, 3)) @ (b, a)", {"a": 2, "b": 3}),
    ("rack.all_reduce((0, 1, 2), (3, 4, 5)) @ (b, a)", {"a": 2, "b": 3}),
    ("rack.all_reduce((0, 2), (1,)) @ b", {"a": 2, "b": 3}),
)


def on_meshes() -> Iterator[tuple[str, dict[str, int], bool]]:
    """Schedules, each with its sizes and whether little of it is tried there."""
    placed = [s for s in library() if s.axes and not str(s).startswith("zoo")]
    two, three = ([str(s) for s in placed if len(s.axes) == k] for k in (2, 3))
    for names, meshes in (((*two, *ON_TWO), TWO), ((*three, *ON_THREE), THREE)):
        for i, name in enumerate(names):
            # Every schedule on two meshes, of which one is even, so that no mesh is left out.
            even, other = meshes[i % 2], meshes[2 + i % (len(meshes) - 2)]
            yield name, other, False
            if even != other:
                yield name, even, True
    for name in two:  # the third axis is a batch dimension
        yield name, THREE[0], True
    for case in ON_ONE_MESH:
        yield *case, False


@pytest.mark.parametrize(
    "name, sizes, lean",
    [
        pytest.param(
            *case, id=f"{case[0]}-{list(case[1].values())}", marks=FURTHER if case[2] else ()
        )
        for case in on_meshes()
    ],
)
def test_meshes(name, sizes, lean):
    schedule = parse(name)
    tuples = {leaf.axes for leaf in schedule.leaves()}
    # As in lax: ranks are linear in tuple order, and in mesh order where there is no one tuple.
    order = tuples.pop() if len(tuples) == 1 else None
    cases.check(schedule, sizes, order, wide=False, lean=lean)


# ---- random expressions ------------------------------------------------------------------


@settings(max_examples=12)
@given(st.data())
def test_random_expressions(data):
    """Any expression that the grammar allows, on a mesh of up to three axes."""
    sizes = data.draw(st.sampled_from([*TWO[:2], {"a": 3, "b": 2}, THREE[0]]))
    axes = data.draw(st.sampled_from([list(sizes), ["b"]]))
    with random.zoo_known():
        schedule = data.draw(random.placed(data.draw(random.kinds), axes, native=True))
    # One in a hundred has hundreds of leaves, which XLA takes minutes and gigabytes to compile.
    assume(len([*schedule.leaves()]) <= 12)
    tuples = {leaf.axes for leaf in schedule.leaves()}
    cases.check(schedule, sizes, tuples.pop() if len(tuples) == 1 else None, wide=False)


# ---- the namesakes ------------------------------------------------------------------------------

NAMESAKES = {
    ("all_reduce", "sum"): lax.psum,
    ("all_reduce", "max"): lax.pmax,
    ("all_reduce", "min"): lax.pmin,
    ("reduce_scatter", "sum"): functools.partial(lax.psum_scatter, tiled=True),
    ("all_gather", "sum"): functools.partial(lax.all_gather, tiled=True),
    ("all_to_all", "sum"): functools.partial(
        lax.all_to_all, split_axis=0, concat_axis=0, tiled=True
    ),
}


@pytest.mark.parametrize(
    "sizes, axes",
    [pytest.param({"x": n}, "x", id=f"{n}") for n in FEW]
    + [pytest.param(TWO[2], axes, id=str(axes)) for axes in (("a", "b"), ("b", "a"), "a", "b")]
    + [pytest.param(THREE[1], axes, id=str(axes)) for axes in (("b", "c", "a"), ("c", "a"))],
)
def test_lax_itself(sizes, axes):
    """What the battery compares with is what the namesakes in lax return, on the same data."""
    order = (axes,) if isinstance(axes, str) else axes
    n = int(np.prod([sizes[a] for a in order]))
    groups = int(np.prod([*sizes.values()])) // n
    data = {
        (kind, op, dtype, p): np.stack(
            [
                cases.tell_tale(
                    kind,
                    op,
                    dtype,
                    n,
                    (n * p if kind in ("reduce_scatter", "all_to_all") else p,),
                    g,
                )
                for g in range(groups)
            ]
        )
        for kind, op in NAMESAKES
        for dtype in cases.DTYPES
        for p in (0, 1, n + 2)
        if p or kind not in ("reduce_scatter", "all_gather")  # lax refuses to move nothing
    }

    def body(*xs):
        return [NAMESAKES[kind, op](x, axes) for (kind, op, _, _), x in zip(data, xs, strict=True)]

    inputs = [cases.ungrouped(x, sizes, order) for x in data.values()]
    outputs = cases.quick(cases.on_ranks(body, cases.mesh_of(sizes)))(*inputs)
    for (kind, op, _, _), x, y in zip(data, data.values(), outputs, strict=True):
        cases.compare(kind, op, (0,), x, cases.grouped(np.asarray(y), tuple(sizes), order))


def test_the_battery_notices():
    """A wrong chunk, a wrong rank and a wrong sum are noticed by what the battery compares with."""
    x = cases.tell_tale("all_gather", "sum", "int32", 3, (2,))[None]
    good = np.stack([x.reshape(1, -1)] * 3, axis=1)
    cases.compare("all_gather", "sum", (0,), x, good)
    for bad in (good[:, :, ::-1], good + 1, np.roll(good, 2, axis=2)):
        with pytest.raises(AssertionError):
            cases.compare("all_gather", "sum", (0,), x, bad)


def test_there_are_devices():
    assert len(jax.devices()) >= MOST
