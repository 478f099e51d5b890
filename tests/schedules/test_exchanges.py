"""What pairwise.py and bruck.py claim, and FORMULAS.md's rows for them."""

from fractions import Fraction
from pathlib import Path

import pytest

import collc
from collc.language.expand import expand
from collc.language.library import load
from collc.language.parse import parse
from collc.schedules import bruck, pairwise

counting = load(Path(__file__).parent / "counting.py")
SIZES, counts, flat = counting.SIZES, counting.counts, counting.flat
lg, power = counting.lg, counting.power
MESHES = [(1, 1), (1, 4), (4, 1), (2, 2), (2, 8), (3, 4), (4, 3), (5, 2)]


@pytest.mark.parametrize("n", SIZES)
def test_pairwise(n):
    """n - 1 steps; in step t rank r sends to rank r + t. Each rank sends (n - 1)/n of its buffer."""
    each = [Fraction(n - 1, n)] * n
    assert [*counts(pairwise.all_to_all, n)] == [n - 1, n - 1, each, each]
    counting.optimal(pairwise.all_to_all, n, n - 1, 0)
    for t, step in enumerate(expand(pairwise.all_to_all, n).dense_steps(), start=1):
        assert (step.dst == (step.src + t) % n).all()
        assert (step.chunk == step.src * n + step.dst).all()


@pytest.mark.parametrize("n", SIZES)
def test_bruck(n):
    """ceil(lg n) steps; each rank sends at most lg n/2 of its buffer, and as much only where n = 2^k."""
    found = counts(bruck.all_to_all, n)
    assert found.steps == found.rounds == lg(n)
    (sent,) = {*found.sent}
    (received,) = {*found.received}
    # A chunk with j ranks to go takes as many hops as j has bits.
    assert sent == received == Fraction(sum(j.bit_count() for j in range(n)), n)
    bits = int(sent * n)
    assert 4**bits <= n**n  # sent <= lg n/2, in integers
    assert (4**bits == n**n) is power(n)
    assert not power(n) or sent == Fraction(lg(n), 2)
    for k, step in enumerate(expand(bruck.all_to_all, n).dense_steps()):
        source, target = divmod(step.chunk, n)
        assert ((step.dst - step.src) % n == 1 << k).all()
        assert ((target - source) % n & 1 << k != 0).all()
    c = collc.verify(bruck.all_to_all, n=n)
    assert c.depth == 0 and c.consistent and c.narrow


@pytest.mark.parametrize("m, g", MESHES)
def test_two_level(m, g):
    """g - 1 + m - 1 steps; per GPU m - 1 messages between hosts, where a flat one has g(m - 1)."""
    schedule = pairwise.two_level("host", "gpu")
    c = collc.verify(schedule, host=m, gpu=g)
    assert c.steps == c.rounds == g - 1 + m - 1
    assert c.sent == Fraction(g - 1, g) + Fraction(m - 1, m)
    for s, messages in ((schedule, m - 1), (pairwise.all_to_all @ ("host", "gpu"), g * (m - 1))):
        found = flat(s, host=m, gpu=g)
        assert max(found.sent) == min(found.sent) == collc.verify(s, host=m, gpu=g).sent
        for r in range(m * g):
            between = [
                share for (a, b), share in found.links.items() if a == r and a // g != b // g
            ]
            assert len(between) == messages
            assert sum(between) == Fraction(m - 1, m)  # the bytes are the same


@pytest.mark.parametrize("m, g", MESHES)
def test_two_level_of_which_one_forwards(m, g):
    """Any all-to-all composes: steps and bytes add up."""
    c = collc.verify(parse("bruck.all_to_all @ gpu >> pairwise.all_to_all @ host"), host=m, gpu=g)
    assert c.steps == lg(g) + m - 1
    assert c.sent == collc.verify(bruck.all_to_all, n=g).sent + Fraction(m - 1, m)
    found = flat(c.schedule, host=m, gpu=g)
    assert {*found.sent} == {c.sent}
