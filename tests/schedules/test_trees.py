"""What tree.py, binomial.py, chain.py and rack.py claim, and FORMULAS.md's rows for them."""

from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import collc
from collc import language as cl
from collc.errors import CollcError
from collc.language.expand import expand
from collc.language.library import load
from collc.language.parse import parse
from collc.schedules import binomial, chain, rack, ring, tree

counting = load(Path(__file__).parent / "counting.py")
SIZES, counts, flat = counting.SIZES, counting.counts, counting.flat
lg, power = counting.lg, counting.power


def parents(levels):
    """{child: parent}, of which each rank but the root is in one level once."""
    edges = [(int(c), int(p)) for child, parent in levels for c, p in zip(child, parent)]
    assert len(edges) == len(dict(edges))
    return dict(edges)


def hops(parent, r):
    """The number of edges from a rank to the root."""
    return 1 + hops(parent, parent[r]) if r in parent else 0


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("module", [binomial, tree], ids=["binomial", "tree"])
def test_levels_are_a_tree(module, n):
    """Every path ends at rank 0, within ceil(lg n) edges; each edge comes after those below it."""
    levels = list(module.levels(n))
    parent = parents(levels)
    assert len(levels) == lg(n)
    assert sorted(parent) == list(range(1, n))
    assert all(hops(parent, r) <= lg(n) for r in range(n))
    when = {int(c): t for t, (child, _) in enumerate(levels) for c in child}
    assert all(when[c] < when[p] for c, p in parent.items() if p)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("module", [binomial, tree, chain], ids=["binomial", "tree", "chain"])
def test_reduce_broadcast_and_both(module, n):
    """Every rank but the root sends S once, and the broadcast is the reduce backwards."""
    up, down = counts(module.reduce, n), counts(module.broadcast, n)
    assert up.sent == down.received == [0] + [1] * (n - 1)
    assert up.received == down.sent
    assert down.by_step == [
        {(d, s): share for (s, d), share in step.items()} for step in reversed(up.by_step)
    ]
    c = collc.verify(module.all_reduce, n=n)
    assert (c.steps, c.rounds) == (2 * up.steps, 2 * up.rounds)
    assert c.sent == max(a + b for a, b in zip(up.sent, down.sent))
    assert c.consistent and c.narrow
    assert c.depth == collc.verify(module.reduce, n=n).depth


@pytest.mark.parametrize("n", SIZES)
def test_binomial(n):
    """ceil(lg n) steps of one round; 2 ceil(lg n)(alpha + S beta) + ceil(lg n) S gamma both ways."""
    found = counts(binomial.reduce, n)
    assert found.steps == found.rounds == lg(n)
    assert max(found.received) == found.received[0] == lg(n)
    assert collc.verify(binomial.all_reduce, n=n).depth == lg(n)
    parent = parents(binomial.levels(n))
    assert all(child - p == child & -child for child, p in parent.items())


@pytest.mark.parametrize("n", SIZES)
def test_chain(n):
    """n - 1 steps of S, each to the rank before."""
    found = counts(chain.reduce, n)
    assert found.steps == found.rounds == n - 1
    assert [*found.by_step] == [{(r, r - 1): 1} for r in range(n - 1, 0, -1)]
    assert collc.verify(chain.all_reduce, n=n).depth == n - 1


def sliced_chain(k):
    @cl.broadcast(chunks=k)
    def slices(n):
        c = cl.ranks(k)
        for t in range(n + k - 2):
            here = t - c
            on = (here >= 0) & (here < n - 1)
            yield cl.copy(c[on], here[on], here[on] + 1)

    return slices


@pytest.mark.parametrize("k", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("n", [2, 3, 8, 17])
def test_a_chain_in_slices(n, k):
    """k slices take n + k - 2 steps of S/k: near S for many. Of a tree, inner ranks send 2 S."""
    sliced = sliced_chain(k)
    c = collc.verify(sliced, n=n)
    assert c.steps == c.rounds == n + k - 2
    assert max(counts(sliced, n).sent) == 1
    assert Fraction(c.rounds, k) == 1 + Fraction(n - 2, k)
    assert n < 4 or max(counts(tree.broadcast, n).sent) == 2


@pytest.mark.parametrize("n", SIZES)
class TestTree:
    def test_reduce(self, n):
        """ceil(lg n) steps of at most two rounds, the last of one."""
        found = counts(tree.reduce, n)
        children = [Counter(d for _, d in step) for step in found.by_step]
        assert all(max(step.values()) <= 2 for step in children)
        assert [*children[-1:]] == [{0: 1}][: n - 1]
        assert found.steps == lg(n)
        assert found.rounds <= max(0, 2 * lg(n) - 1)
        assert found.rounds == 2 * lg(n) - 1 or n < 4 or not power(n)
        assert max(found.received) <= 2
        assert collc.verify(tree.reduce, n=n).depth == found.rounds

    def test_the_root_has_one_child_and_inner_ranks_two_where_n_is_a_power(self, n):
        """A star's root sends n - 1 times; a binary tree's does not."""
        received = counts(tree.reduce, n).received
        assert received[0] == min(1, n - 1)
        if power(n) and n > 1:
            assert received[1::2] == [0] * (n // 2)
            assert received[2::2] == [2] * (n // 2 - 1)

    def test_odd_ranks_are_leaves_and_ranks_are_in_order(self, n):
        """What is below a rank lies on both sides of it, without a gap."""
        parent = parents(tree.levels(n))
        assert all(p % 2 == 0 for p in parent.values())
        below = {r: {r} for r in range(n)}
        for r in range(n):
            p = r
            while p in parent:
                p = parent[p]
                below[p].add(r)
        assert all(max(b) - min(b) == len(b) - 1 for b in below.values())

    def test_double(self, n):
        """For n = 2^k >= 4: 4k - 2 rounds of S/2. At most 2 S sent by a rank, for every n."""
        c = collc.verify(tree.double_all_reduce, n=n)
        assert c.steps == 2 * lg(n)
        assert c.consistent and c.narrow
        assert c.sent == max(counts(tree.double_all_reduce, n).sent) <= 2
        if n >= 4 and power(n):
            assert c.rounds == 4 * lg(n) - 2
            assert c.sent == 2
            # 5 S beta at n = 8, 11 S beta at 64, one after the other; a ring stays under 2 S beta.
            assert Fraction(c.rounds, 2) == {8: 5, 64: 11}.get(n, 2 * lg(n) - 1)
            assert collc.verify(ring.all_reduce, n=n).sent < 2

    def test_the_trees_of_the_double_one_are_disjoint_inside(self, n):
        """For even n no rank is inner in both; for odd n > 1 rank 0 alone, the first one's root."""
        first = {*parents(tree.levels(n)).values()}
        second = {int(tree.mirror(n, p)) for p in first}
        assert first & second == (set() if n % 2 == 0 or n == 1 else {0})
        assert sorted(tree.mirror(n, np.arange(n))) == list(range(n))

    def test_the_second_tree_is_the_first_one_renamed(self, n):
        program = expand(tree.double_all_reduce, n)
        for step in program.dense_steps():
            hops = [
                {*zip(names(step.src[on]).tolist(), names(step.dst[on]).tolist())}
                for on, names in (
                    (step.chunk == 1, lambda r: r),
                    (step.chunk == 0, lambda r: tree.mirror(n, r)),
                )
            ]
            assert hops[0] == hops[1]


# ---- racks --------------------------------------------------------------------------------------

RACKS = [
    [range(1)],
    [range(8)],
    [range(4), range(4, 8)],
    [range(0, 8, 2), range(1, 8, 2)],
    [(5, 0), (3, 1), (2, 4)],
    [range(5), range(5, 6), range(6, 17)],  # unequal
    [(7, 3, 1), (0,), (2, 4, 5, 6, 8)],
    [(r,) for r in range(9)],
]


@pytest.mark.parametrize("racks", RACKS, ids=lambda racks: "+".join(str(len(r)) for r in racks))
def test_racks(racks):
    """ceil(lg g) + ceil(lg m) steps each way, and m - 1 messages of S between racks each way."""
    racks = [tuple(rack) for rack in racks]
    m, g, n = len(racks), max(map(len, racks)), sum(map(len, racks))
    schedule = rack.all_reduce(*racks)
    c = collc.verify(schedule, n=n)
    assert c.steps == c.rounds == 2 * (lg(g) + lg(m))
    assert c.depth <= lg(g) + lg(m)
    assert c.depth == lg(g) + lg(m) or len({*map(len, racks)}) > 1
    assert c.consistent and c.narrow
    home = {r: i for i, members in enumerate(racks) for r in members}
    for leaf in schedule.leaves():
        found = counts(leaf, n)
        assert found.steps == found.rounds == lg(g) + lg(m)
        assert {*found.links.values()} <= {1} and len(found.links) == n - 1
        between = Counter(home[s] != home[d] for s, d in found.links)[True]
        assert between == m - 1
        # First within the racks, then between their first ranks (and backwards).
        crossing = [[home[s] != home[d] for s, d in step] for step in found.by_step]
        assert [any(step) for step in crossing] == [all(step) for step in crossing]
        leaders = {min(members) for members in racks}
        assert {r for hop in found.links if home[hop[0]] != home[hop[1]] for r in hop} <= leaders
    assert parse(str(schedule)) == schedule


def test_no_schedule_sends_less_between_racks():
    """2(m - 1) S, whatever the schedule; one that does not know the racks sends more."""
    racks = [tuple(range(i, 16, 4)) for i in range(4)]

    def between(schedule):
        links = flat(schedule, n=16).links
        return sum(share for (s, d), share in links.items() if s % 4 != d % 4)

    assert between(rack.all_reduce(*racks)) == 2 * 3
    assert between(ring.all_reduce) == 30  # every hop
    assert between(binomial.all_reduce) == between(tree.all_reduce) == 24


@pytest.mark.parametrize("racks", [
    [(0, 1), (2,)], [(0, 1), (1, 2, 3)], [(0, 1), (2, 3), (4,)], [(1, 2), (3, 4)], [],
])  # fmt: skip
def test_racks_that_are_no_partition(racks):
    with pytest.raises(CollcError, match=r"do not hold each of the ranks 0 to 3 once"):
        collc.verify(rack.all_reduce(*racks), n=4)
