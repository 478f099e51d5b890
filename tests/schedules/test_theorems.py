"""What each schedule's docstring claims, and FORMULAS.md's row for it, for n = 1 to 17 and more."""

from fractions import Fraction

import numpy as np
import pytest
from collc.schedules import hierarchical, pairwise, ring, server, tree

import collc
from collc.analysis.rounds import rounds
from collc.language.expand import expand
from collc.language.parse import parse

SIZES = [*range(1, 18), 31, 32, 33, 64]
MESHES = [(1, 1), (1, 4), (4, 1), (2, 2), (2, 8), (3, 4), (4, 3), (4, 4), (5, 2)]


def counts(leaf, n):
    """(steps, rounds, bytes sent and received by each rank as [n] fractions of S), by brute force."""
    program = expand(next(leaf.leaves()), n)
    sent, received = np.zeros(n, np.int64), np.zeros(n, np.int64)
    for step in program.dense_steps():
        for s, d in zip(step.src.tolist(), step.dst.tolist()):
            sent[s] += 1
            received[d] += 1
    share = Fraction(1, program.chunks)
    return (
        len(program.steps), len(rounds(program)),
        [int(x) * share for x in sent], [int(x) * share for x in received],
    )  # fmt: skip


def lg(n: int) -> int:
    """ceil(log2 n)."""
    return (n - 1).bit_length()


@pytest.mark.parametrize("n", SIZES)
class TestRing:
    def test_halves(self, n):
        """(n - 1) alpha + (n - 1)/n S beta, for every rank alike."""
        for half in (ring.reduce_scatter, ring.all_gather):
            each = [Fraction(n - 1, n)] * n
            assert counts(half, n) == (n - 1, n - 1, each, each)

    def test_all_reduce(self, n):
        """2(n - 1) alpha + 2(n - 1)/n S beta + (n - 1)/n S gamma."""
        c = collc.verify(ring.all_reduce, n=n)
        assert (c.steps, c.rounds, c.sent, c.received) == (
            2 * (n - 1), 2 * (n - 1), Fraction(2 * (n - 1), n), Fraction(2 * (n - 1), n),
        )  # fmt: skip
        assert c.depth == n - 1
        assert c.consistent and c.narrow

    def test_chunk_c_comes_home_to_rank_c(self, n):
        """It sets out from rank c + 1, and goes up by one each step."""
        program = expand(ring.reduce_scatter, n)
        for t, step in enumerate(program.dense_steps()):
            assert (step.src == (step.chunk + 1 + t) % n).all()
            assert (step.dst == (step.src + 1) % n).all()
            assert t < n - 2 or (step.dst == step.chunk).all()

    def test_only_neighbours(self, n):
        for step in expand(ring.all_gather, n).dense_steps():
            assert ((step.dst - step.src) % n == 1).all()


@pytest.mark.parametrize("n", SIZES)
class TestTree:
    def test_reduce(self, n):
        """ceil(lg n) steps, of two rounds but for the last; every rank but the root sends S once."""
        steps, n_rounds, sent, received = counts(tree.reduce, n)
        assert steps == lg(n)
        assert n_rounds <= max(0, 2 * lg(n) - 1)
        assert n_rounds == 2 * lg(n) - 1 or n < 4 or n & (n - 1)
        assert sent == [0] + [1] * (n - 1)
        assert max(received) <= 2 * lg(n)

    def test_the_root_has_one_child_and_inner_ranks_two_where_n_is_a_power(self, n):
        """A star's root sends n - 1 times; a binary tree's does not."""
        if n & (n - 1) or n < 2:
            return
        received = counts(tree.reduce, n)[3]
        assert received[0] == 1
        assert received[1::2] == [0] * (n // 2)
        assert received[2::2] == [2] * (n // 2 - 1)

    def test_odd_ranks_are_leaves_and_edges_form_a_tree(self, n):
        edges = [
            (int(c), int(p)) for child, parent in tree.levels(n) for c, p in zip(child, parent)
        ]
        parent = dict(edges)
        assert len(edges) == len(parent) == n - 1 and 0 not in parent
        assert all(p % 2 == 0 for p in parent.values())
        for r in range(n):  # every path ends at the root, within ceil(lg n) edges
            hops = 0
            while r:
                r, hops = parent[r], hops + 1
            assert hops <= lg(n)

    def test_all_reduce(self, n):
        c = collc.verify(tree.all_reduce, n=n)
        assert c.steps == 2 * lg(n)
        assert c.sent is not None and c.sent <= max(3, lg(n) + 1)
        assert c.consistent and c.narrow

    def test_double(self, n):
        """For n = 2^k >= 4: 4k - 2 rounds of S/2, at most 2 S sent by a rank."""
        c = collc.verify(tree.double_all_reduce, n=n)
        assert c.steps == 2 * lg(n)
        assert c.consistent and c.narrow
        if n >= 4 and not n & (n - 1):
            assert c.rounds == 4 * lg(n) - 2
            assert c.sent == 2
            # 5 S beta at n = 8, 11 S beta at 64, one after the other.
            assert Fraction(c.rounds, 2) == {8: 5, 64: 11}.get(n, 2 * lg(n) - 1)

    def test_the_trees_of_the_double_one_are_disjoint_inside(self, n):
        """For even n no rank is inner in both; for odd n > 1 the first tree's root alone is."""
        first = {int(p) for _, parent in tree.levels(n) for p in parent}
        second = {int(tree.mirror(n, p)) for p in first}
        both = first & second
        assert both == (set() if n % 2 == 0 or n == 1 else {0})
        assert sorted(tree.mirror(n, np.arange(n))) == list(range(n))


@pytest.mark.parametrize("n", SIZES)
class TestServer:
    def test_star(self, n):
        """Each way (n - 1)(alpha + S beta): the root sends and receives (n - 1) S."""
        rest = [Fraction(1)] * (n - 1)
        once = min(1, n - 1)
        assert counts(server.push, n) == (once, n - 1, [0] + rest, [n - 1] + [0] * (n - 1))
        assert counts(server.pull, n) == (once, n - 1, [n - 1] + [0] * (n - 1), [0] + rest)
        c = collc.verify(server.star, n=n)
        assert c.depth == n - 1 and c.consistent
        # For n = 8 that is 4 times the ring's 1.75 S.
        assert n != 8 or c.sent == 4 * collc.verify(ring.all_reduce, n=n).sent

    @pytest.mark.parametrize("k", [1, 2, 3, 4, 8, 17])
    def test_shards(self, n, k):
        """k servers, each for 1/k of the buffer: a server moves (n - 1) S/k each way."""
        program = expand(next(server.shards(k).leaves()), n)
        assert program.chunks == k
        steps, n_rounds, sent, received = counts(server.shards(k), n)
        assert steps == (2 if n > 1 else 0)
        if k <= n:
            push, pull = program.dense_steps() if n > 1 else ((), ())
            for r in range(k if n > 1 else 0):
                assert (push.dst == r).sum() == (pull.src == r).sum() == n - 1
            assert n_rounds == 2 * (n - 1)  # all servers are busy in each round
            worker = Fraction(k - 1, k)  # a server is a worker of the others
            assert sent[:k] == received[:k] == [worker + Fraction(n - 1, k)] * k or n == 1
        if k == n:
            assert set(sent) == {Fraction(2 * (n - 1), n)}


@pytest.mark.parametrize("n", SIZES[:-2])
def test_pairwise(n):
    """n - 1 steps; in step t rank r sends to rank r + t. Each rank sends (n - 1)/n of its buffer."""
    each = [Fraction(n - 1, n)] * n
    assert counts(pairwise.all_to_all, n) == (n - 1, n - 1, each, each)
    program = expand(pairwise.all_to_all, n)
    for t, step in enumerate(program.dense_steps(), start=1):
        assert (step.dst == (step.src + t) % n).all()
        assert (step.chunk == step.src * n + step.dst).all()


@pytest.mark.parametrize("m, n", MESHES)
def test_two_level_all_to_all(m, n):
    """n - 1 + m - 1 steps, and m - 1 messages between hosts."""
    c = collc.verify(pairwise.two_level("host", "gpu"), host=m, gpu=n)
    assert c.steps == c.rounds == n - 1 + m - 1
    assert c.sent == Fraction(n - 1, n) + Fraction(m - 1, m)


@pytest.mark.parametrize("m, n", MESHES)
def test_hierarchical(m, n):
    """Between the hosts goes 1/n of the buffer, where n is the size of a host."""
    s = hierarchical.hierarchical("host", "gpu")
    c = collc.verify(s, host=m, gpu=n)
    between = collc.verify(tree.double_all_reduce, n=m)
    inside = collc.verify(ring.all_reduce, n=n)
    assert c.steps == inside.steps + between.steps
    assert c.rounds == inside.rounds + between.rounds
    assert c.sent == inside.sent + between.sent / n
    assert c.depth == inside.depth + between.depth
    # Two rings: 2(g - 1)/g S inside, 2(m - 1)/m S/g between.
    rings = parse("ring.reduce_scatter @ gpu >> ring.all_reduce @ host >> ring.all_gather @ gpu")
    both = collc.verify(rings, host=m, gpu=n)
    assert both.sent == Fraction(2 * (n - 1), n) + Fraction(2 * (m - 1), m * n)
    assert both.sent == Fraction(2 * (m * n - 1), m * n)  # so it is optimal as a whole
