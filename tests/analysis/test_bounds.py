"""The lower bounds: against FORMULAS.md's rows, and that nothing in the library goes below one."""

from fractions import Fraction
from pathlib import Path

import pytest

import collc
from collc.analysis.bounds import Bounds, bounds
from collc.language.algebra import Schedule
from collc.language.library import contents, load, modules
from collc.language.states import KINDS

zoo = load(Path(__file__).parents[1] / "zoo.py")
SIZES = range(1, 18)


def library() -> dict[str, Schedule]:
    found = [
        value
        for module in (*modules().values(), zoo)
        for value in contents(module).values()
        if isinstance(value, Schedule) and not any(leaf.native for leaf in value.leaves())
    ]
    found += [modules()["server"].shards(k) for k in (1, 2, 5, 17)]
    return {str(s): s for s in found}


@pytest.mark.parametrize(
    "kind, n, steps, sent, received",
    [
        ("all_reduce", 8, 3, "7/4", "7/4"),
        ("all_reduce", 3, 2, "4/3", "4/3"),
        ("reduce_scatter", 8, 3, "7/8", "7/8"),
        ("all_gather", 5, 3, "4/5", "4/5"),
        ("all_to_all", 9, 4, "8/9", "8/9"),
        ("broadcast", 9, 4, "1", "1"),
        ("reduce", 8, 3, "1", "1"),
        ("gather", 4, 2, "1/4", "3/4"),
        ("scatter", 4, 2, "3/4", "1/4"),
    ],
)
def test_values(kind, n, steps, sent, received):
    assert bounds(KINDS[kind], n) == Bounds(steps, Fraction(sent), Fraction(received))


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_one_rank_has_nothing_to_do_and_the_dual_swaps_sides(kind):
    assert bounds(kind, 1) == Bounds(0, Fraction(0), Fraction(0))
    for n in SIZES:
        here, there = bounds(kind, n), bounds(KINDS[kind.dual], n)
        assert (here.sent, here.received) == (there.received, there.sent)
        assert here.steps == there.steps


@pytest.mark.parametrize("name", library())
def test_no_schedule_beats_its_bound(name):
    for n in SIZES:
        certificate = collc.verify(library()[name], n=n)
        bound = certificate.bound
        assert bound and certificate.sent is not None and certificate.received is not None
        assert certificate.sent >= bound.sent and certificate.received >= bound.received
        assert certificate.rounds >= bound.steps
        assert certificate.gap is None if n == 1 else certificate.gap >= 1


@pytest.mark.parametrize(
    "name", ["ring.all_reduce", "ring.reduce_scatter", "ring.all_gather", "pairwise.all_to_all"]
)
def test_what_is_optimal_in_bytes(name):
    for n in SIZES[1:]:
        assert collc.verify(library()[name], n=n).gap == 1
