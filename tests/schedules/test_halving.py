"""What halving.py and pat.py claim, and FORMULAS.md's rows for them."""

import math
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

import collc
from collc.language.expand import expand
from collc.language.library import load
from collc.schedules import doubling, halving, pat

counting = load(Path(__file__).parent / "counting.py")
SIZES, counts, lg, power = counting.SIZES, counting.counts, counting.lg, counting.power


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("module", [halving, pat], ids=["halving", "pat"])
class TestLogarithmicAndOptimal:
    def test_halves(self, module, n):
        """lg n alpha + (n - 1)/n S beta, for every rank alike, and for every n."""
        each = [Fraction(n - 1, n)] * n
        for half, depth in ((module.reduce_scatter, lg(n)), (module.all_gather, 0)):
            assert [*counts(half, n)] == [lg(n), lg(n), each, each]
            counting.optimal(half, n, lg(n), depth)

    def test_all_reduce(self, module, n):
        """2 lg n alpha + 2(n - 1)/n S beta + (n - 1)/n S gamma: Rabenseifner's."""
        c = collc.verify(module.all_reduce, n=n)
        assert c.rounds == 2 * lg(n) and c.sent == Fraction(2 * (n - 1), n)
        counting.optimal(module.all_reduce, n, 2 * lg(n), lg(n))

    def test_each_rank_does_the_same_relative_to_itself(self, module, n):
        for half in (module.reduce_scatter, module.all_gather):
            (leaf,) = half.leaves()
            assert expand(leaf, n).orbit or n == 1


@pytest.mark.parametrize("n", SIZES)
def test_halving(n):
    """Half of what is left each time: (1/2, 1/4...) of the buffer where n is a power of two."""
    left, sent = n, []
    for step in expand(halving.reduce_scatter, n).dense_steps():
        assert step.size == n * (left // 2)
        left -= left // 2
        sent.append(Fraction(step.size, n * n))
        assert len({*((step.dst - step.src) % n).tolist()}) == 1
    assert left == 1
    assert not power(n) or sent == [Fraction(1, 2 ** (t + 1)) for t in range(lg(n))]


@pytest.mark.parametrize("n", SIZES)
def test_doubling_all_gather(n):
    """What a rank holds doubles each time, as far as there is so much left."""
    held = 1
    for step in expand(halving.all_gather, n).dense_steps():
        more = step.size // n
        assert more == held if power(n) else held - 1 <= more <= held
        held += more
    assert held == n


@pytest.mark.parametrize("n", SIZES)
def test_recursive_doubling(n):
    """floor(lg n) exchanges of S; else two steps more, of S each, and one addition."""
    fold = 0 if power(n) else 1
    exchanges = n.bit_length() - 1
    found = counts(doubling.all_reduce, n)
    assert found.steps == found.rounds == exchanges + 2 * fold
    assert max(found.sent) == max(found.received) == exchanges + fold
    c = collc.verify(doubling.all_reduce, n=n)
    assert c.depth == exchanges + fold
    # Partners add the same two sums; with a narrower wire each would round the other's alone.
    assert c.consistent and c.narrow is (n == 1)
    for k, step in enumerate(found.by_step[fold : fold + exchanges]):
        assert {*step} == {(r, r ^ 1 << k) for r in range(1 << exchanges)}
        assert {*step.values()} == {1}


@pytest.mark.parametrize("n", SIZES)
def test_pat(n):
    """For every chunk a binomial tree; ever nearer ranks, and ever more chunks."""
    steps = list(expand(pat.all_gather, n).dense_steps())
    hops = [{*((step.dst - step.src) % n).tolist()} for step in steps]
    assert hops == [{1 << k} for k in reversed(range(lg(n)))]
    chunks = [step.size // n for step in steps]
    assert chunks == sorted(chunks) and chunks[:1] == [1][: n - 1]
    for c in range(min(n, 3)):  # the same for all: see the orbit above
        edges = [
            (int(s), int(d))
            for step in steps
            for s, d in zip(step.src[step.chunk == c], step.dst[step.chunk == c])
        ]
        depth = {c: 0}
        for s, d in edges:
            assert d not in depth
            depth[d] = depth[s] + 1
        assert len(depth) == n
        if power(n):
            by_depth = Counter(depth.values())
            assert by_depth == {d: math.comb(lg(n), d) for d in range(lg(n) + 1)}


@pytest.mark.parametrize("n", SIZES)
def test_pat_s_scatter_is_its_gather_backwards(n):
    there, back = counts(pat.all_gather, n), counts(next(pat.reduce_scatter.leaves()), n)
    assert back.by_step == [
        {(d, s): share for (s, d), share in step.items()} for step in reversed(there.by_step)
    ]
