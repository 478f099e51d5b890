"""What ring.py claims, and FORMULAS.md's rows for it, for n = 1 to 17 and more."""

import itertools
from fractions import Fraction
from pathlib import Path

import pytest

import collc
from collc.errors import CollcError
from collc.language.expand import expand
from collc.language.library import load
from collc.language.parse import parse
from collc.schedules import ring

counting = load(Path(__file__).parent / "counting.py")
SIZES, counts, flat = counting.SIZES, counting.counts, counting.flat
TWO_WAY = {
    "reduce_scatter": ring.two_way_reduce_scatter,
    "all_gather": ring.two_way_all_gather,
    "all_reduce": ring.two_way_all_reduce,
}


@pytest.mark.parametrize("n", SIZES)
class TestRing:
    def test_halves(self, n):
        """(n - 1) alpha + (n - 1)/n S beta, for every rank alike; the scatter adds as much."""
        for half, depth in ((ring.reduce_scatter, n - 1), (ring.all_gather, 0)):
            each = [Fraction(n - 1, n)] * n
            assert [*counts(half, n)] == [n - 1, n - 1, each, each]
            counting.optimal(half, n, n - 1, depth)

    def test_all_reduce(self, n):
        """2(n - 1) alpha + 2(n - 1)/n S beta + (n - 1)/n S gamma."""
        c = collc.verify(ring.all_reduce, n=n)
        assert (c.steps, c.rounds) == (2 * (n - 1), 2 * (n - 1))
        assert c.sent == c.received == Fraction(2 * (n - 1), n)
        counting.optimal(ring.all_reduce, n, 2 * (n - 1), n - 1)

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
@pytest.mark.parametrize("kind, one_way", [
    ("reduce_scatter", 1), ("all_gather", 1), ("all_reduce", 2),
])  # fmt: skip
def test_two_way(n, kind, one_way):
    """As many steps and bytes as one way, with half of the bytes on each direction of a link."""
    schedule = TWO_WAY[kind]
    c = collc.verify(schedule, n=n)
    # Two permutations a step, which XLA runs one after the other.
    assert (c.steps, c.rounds) == (one_way * (n - 1), 2 * one_way * (n - 1))
    counting.optimal(schedule, n, one_way * (n - 1), 0 if kind == "all_gather" else n - 1)
    found = flat(schedule, n=n)
    assert found.steps == c.steps
    if n > 2:  # of two ranks, the next is also the one before
        half = one_way * Fraction(n - 1, 2 * n)
        links = {(r, (r + by) % n): half for r in range(n) for by in (1, -1)}
        assert found.links == links
        for step in found.by_step:  # in every step
            assert step.keys() == links.keys() and len({*step.values()}) == 1


ORDERS = {
    4: [(0, 1, 2, 3), (3, 1, 0, 2)],
    5: [(0, 1, 2, 3, 4), (0, 2, 4, 1, 3), (4, 0, 3, 1, 2)],
    8: [(0, 1, 2, 3, 4, 5, 6, 7), (7, 6, 5, 4, 3, 2, 1, 0)],
}


@pytest.mark.parametrize("n, k", [(n, k) for n in ORDERS for k in range(1, len(ORDERS[n]) + 1)])
def test_rings(n, k):
    """k rings, each with 1/k of the buffer, and every hop follows its order."""
    orders = ORDERS[n][:k]
    schedule = ring.rings(*orders)
    counting.optimal(schedule, n, 2 * (n - 1), n - 1)
    assert collc.verify(schedule, n=n).rounds == k * 2 * (n - 1)
    links = {}
    for order in orders:
        for hop in itertools.pairwise((*order, order[0])):
            links[hop] = links.get(hop, 0) + Fraction(2 * (n - 1), n * k)
    found = flat(schedule, n=n)
    assert (found.steps, found.links) == (2 * (n - 1), links)
    assert parse(str(schedule)) == schedule == ring.rings(*map(list, orders))


def test_rings_over_both_directions_are_a_two_way_ring():
    n = 8
    assert flat(ring.rings(*ORDERS[n]), n=n).links == flat(ring.two_way_all_reduce, n=n).links


@pytest.mark.parametrize("orders, n, wrong", [
    ((), 4, "at least one schedule"),
    (((0, 1, 1, 2),), 4, "order"),
    (((0, 1, 2),), 4, "order"),
])  # fmt: skip
def test_rings_over_what_is_no_order(orders, n, wrong):
    with pytest.raises(CollcError, match=wrong):
        collc.verify(ring.rings(*orders), n=n)
