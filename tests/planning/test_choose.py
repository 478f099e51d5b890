"""Choosing by price: exact where formulas are, native where it should be, ties, text and errors."""

import hashlib
import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

import collc
from collc.errors import MachineError, PlanError
from collc.language.parse import parse
from collc.language.states import COLLECTIVES
from collc.machine import nccl
from collc.machine.placement import placed
from collc.machine.price import price
from collc.machine.uniform import two_level, uniform
from collc.planning import curves, why
from collc.planning.by_size import BySize
from collc.planning.candidates import MOST_ROUNDS, candidates, rounds
from collc.planning.choose import EXACT, SIZES, Ranking, changes
from collc.planning.curves import Costs, Speeds
from collc.planning.site import Site, site_of

FILES = Path(__file__).parents[1] / "machine" / "files"
LATE, BETA = 100e-6, 1e-9
SMALL, LARGE = 1 << 10, 1 << 30
POD = AbstractMesh((2, 8), ("host", "gpu"))


@pytest.fixture(scope="module")
def plan():
    return collc.plan(POD, "auto", machine="dgx-h100:2")


def every(sizes, collective):
    axes = tuple(sizes)
    return list(candidates(sizes, axes, collective, lambda sizes, axis, levels: levels))


def ranking(machine, sizes, collective):
    site = Site(placed(machine, sizes))
    return site.ranking(tuple(sizes), collective)


def a_round():
    own = nccl.constants(uniform(8, LATE, BETA))
    return own.launch + max(own.near, LATE), BETA / own.reached["link"]


# -- costs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_costs_are_lowered_prices(collective):
    """Those of leaves add up, also where chunks are no whole elements."""
    machine = two_level(3, 4, (2e-6, 1e-11), (9e-6, 1e-10), nics=2, gamma=1e-12)
    placement = placed(machine, {"host": 3, "gpu": 4})
    costs = Costs(placement)
    found = every(placement.sizes, collective)
    for candidate in found[:: 1 + len(found) // 16]:
        assert candidate.schedule.collective.name == collective
        for size in (1000, 1 << 20):
            each = [costs.of(own, share * size) for own, share in candidate.parts]
            assert sum(each) == pytest.approx(price(candidate.schedule, placement, size).lowered)
            assert sum(each) == pytest.approx(costs.of(candidate.schedule, size))


def test_a_crossing_is_where_the_formulas_cross():
    """Bruck: 3 rounds and 12/8 S; pairwise: 7 rounds and 7/8 S."""
    costs = Costs(placed(uniform(8, LATE, BETA), {"gpu": 8}))
    launch, beta = a_round()
    bruck, pairwise = parse("bruck.all_to_all @ gpu"), parse("pairwise.all_to_all @ gpu")
    assert costs.of(bruck, 1 << 20) == pytest.approx(3 * launch + 12 / 8 * 2**20 * beta)
    assert costs.of(pairwise, 1 << 20) == pytest.approx(7 * launch + 7 / 8 * 2**20 * beta)

    def quicker(size):
        return int(costs.of(pairwise, size) < costs.of(bruck, size))

    ((at, then),) = changes(quicker, SIZES[0], SIZES[-1])
    assert then == 1
    exact = 4 * launch / (5 / 8 * beta)
    assert exact <= at <= exact * EXACT + 1


def test_other_speeds_are_those_of_another_machine():
    machine = two_level(2, 4, (2e-6, 1e-11), (9e-6, 1e-10))
    slower = two_level(2, 4, (2e-6, 1e-11), (9e-6, 3e-10))
    costs, other = (Costs(placed(m, {"host": 2, "gpu": 4})) for m in (machine, slower))
    for text in ("ring.all_reduce @ (host, gpu)", "native.all_reduce @ (host, gpu)"):
        schedule = parse(text)
        there = costs.of(schedule, LARGE, Speeds(network=1 / 3))
        assert there == pytest.approx(other.of(schedule, LARGE))


# -- candidates -----------------------------------------------------------------------------------


def test_native_comes_first_and_all_are_there_once():
    found = every({"host": 2, "gpu": 4}, "all_reduce")
    assert found[0].native and found[0].text == "native.all_reduce @ (host, gpu)"
    texts = {c.text for c in found}
    assert len(texts) == len(found) == len({c.schedule for c in found})
    assert {
        "native.reduce_scatter @ gpu >> native.all_reduce @ host >> native.all_gather @ gpu",
        "ring.reduce_scatter @ gpu >> tree.all_reduce @ host >> ring.all_gather @ gpu",
        "ring.reduce_scatter @ host >> tree.all_reduce @ gpu >> ring.all_gather @ host",
        "tree.double_all_reduce.through(Pipeline(8)) @ (host, gpu)",
        "ring.all_reduce @ (host, gpu)",
        'torus("host", "gpu")',
    } <= texts


def test_what_is_hopeless_is_left_out():
    texts = {c.text for c in every({"host": 1024, "gpu": 2}, "all_gather")}
    assert "halving.all_gather @ host >> ring.all_gather @ gpu" not in texts  # a million sends
    assert "native.all_gather @ host >> ring.all_gather @ gpu" in texts
    assert rounds(parse("ring.all_gather").program(1024)) == 1023 > MOST_ROUNDS
    assert not any("ring.all_gather @ host" in text for text in texts)


def test_three_axes_combine_the_best_of_each():
    sizes = {"rack": 2, "host": 2, "gpu": 2}
    machine = two_level(4, 2, (2e-6, 1e-11), (9e-6, 1e-10))
    ranked = ranking(machine, sizes, "all_reduce")
    assert 10 < len(ranked) < 2000
    assert ranked.found[ranked.chosen(LARGE)].native


def test_one_rank_has_nothing_to_choose():
    ranked = ranking(uniform(1, LATE, BETA), {"gpu": 1}, "all_reduce")
    assert len(ranked) == 1 and list(ranked.ranked(LARGE)) == [0]
    assert ranked.choices() == BySize(((0, parse("native.all_reduce @ gpu")),))


# -- the choice -----------------------------------------------------------------------------------


def late(error=None):
    """A reduce-scatter where a hop takes long: NCCL has only a ring, n - 1 of them."""
    site = Site(placed(uniform(16, LATE, BETA), {"gpu": 16}))
    return Ranking(site.costs, ("gpu",), "reduce_scatter", site.error if error is None else error)


def test_native_where_it_is_as_quick_and_a_schedule_where_it_is_not():
    ranked = late()
    (zero, ours), (at, own) = ranked.choices().entries
    assert zero == 0 and str(ours) == "halving.reduce_scatter @ gpu"
    assert str(own) == "native.reduce_scatter @ gpu"

    def ratio(size):
        return ranked.times(size)[0] / ranked.times(size).min()

    assert ratio(at) <= 1 + ranked.error < ratio(int(at / EXACT) - 1)
    assert ranked.chosen(at) == 0 != next(ranked.ranked(at))


def test_an_expensive_launch_makes_native_win(monkeypatch):
    real = nccl.constants

    def dear(*args):
        return replace(real(*args), launch=2e-3)

    monkeypatch.setattr(curves.nccl, "constants", dear)
    assert [str(s) for _, s in late().choices().entries] == ["native.reduce_scatter @ gpu"]


@pytest.mark.parametrize("inner, outer, first", [(1e-11, 1e-9, "gpu"), (1e-9, 1e-11, "host")])
def test_the_slower_links_get_the_smaller_part(inner, outer, first):
    sizes = {"host": 4, "gpu": 4}
    ranked = ranking(two_level(4, 4, (1e-6, inner), (1e-6, outer)), sizes, "all_reduce")
    times = ranked.times(LARGE)
    nested = [
        i for i, c in enumerate(ranked.found)
        if len(c.parts) == 3 and not any(leaf.native for leaf in c.schedule.leaves())
    ]  # fmt: skip
    best = ranked.found[min(nested, key=lambda i: times[i])]
    assert best.parts[0][0].axes == (first,)


def test_a_tie_goes_to_native_then_to_fewer_rounds():
    assert str(late(100.0).choices().at(0)) == "native.reduce_scatter @ gpu"
    ranked = late(0.0)
    halving, times = ranked.chosen(SMALL), ranked.times(SMALL)
    assert ranked.rounds[halving] == 4 and next(ranked.ranked(SMALL)) == halving
    same = [i for i in range(len(ranked)) if times[i] == times[halving]]
    assert len(same) > 1 and ranked.found[halving].text == min(ranked.found[i].text for i in same)


def test_what_ends_with_other_bits_is_not_chosen():
    ranked = ranking(uniform(8, LATE, BETA), {"gpu": 8}, "all_reduce")
    doubling = next(i for i, c in enumerate(ranked.found) if c.text == "doubling.all_reduce @ gpu")
    assert ranked.times(SMALL).argmin() == doubling and not ranked.proved(doubling)
    assert doubling not in list(ranked.ranked(SMALL))


# -- plans ----------------------------------------------------------------------------------------


def test_a_plan_chooses_every_collective_by_size(plan):
    assert str(plan) == (
        'collc.plan(mesh(host=2, gpu=8), {"host": "auto", "gpu": "auto"}, machine="dgx-h100:2")'
    )
    for collective in COLLECTIVES:
        choices = plan.chosen.of(collective).entries
        for least, schedule in choices:
            assert plan.schedule(collective, size=least) == schedule
        assert plan.schedule(collective) == choices[-1][1]
    assert len(plan.chosen.of("all_reduce").entries) > 1
    assert str(plan.schedule("all_reduce", ("gpu",), size=4)) == "native.all_reduce @ gpu"


def test_equal_and_hashed_by_what_is_sent(plan):
    again = collc.plan(POD, {"host": "auto", "gpu": "auto"}, machine="dgx-h100:2")
    assert plan == again and hash(plan) == hash(again)
    assert plan.site is again.site  # nothing was worked out twice
    assert plan != collc.plan(POD, {"host": "native", "gpu": "native"})
    named = collc.plan(POD, {"gpu": "ring", "host": "tree"}, machine="dgx-h100:2")
    assert named == collc.plan(POD, {"gpu": "ring", "host": "tree"})
    assert str(named).endswith('{"host": "tree", "gpu": "ring"}, machine="dgx-h100:2")')


def test_a_file_is_read_again(tmp_path):
    mesh, path = AbstractMesh((8,), ("gpu",)), tmp_path / "topo.xml"
    kinds = []
    for name in ("dgx-h100", "pcie-8"):
        path.write_bytes((FILES / f"{name}.xml").read_bytes())
        kinds.append(site_of(mesh, str(path)).machine.kinds)
    assert kinds[0] != kinds[1]


@pytest.mark.parametrize("axes", ["auto", {"gpu": "ring", "host": "tree"}, {"gpu": "auto"}])
def test_saved_and_loaded(axes, tmp_path):
    mesh = AbstractMesh((2, 4), ("host", "gpu"))
    plan = collc.plan(mesh, axes, machine="gpus=4 link=25GB/s,3us nics=1 net=100Gb/s,20us hosts=2")
    plan.save(tmp_path / "plan.txt")
    back = collc.Plan.load(tmp_path / "plan.txt", mesh)
    assert back == plan and back.text == plan.text and back.explain() == plan.explain()
    assert back.chosen == plan.chosen and str(back) == str(plan)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    "old, new, message",
    [
        (r"machine \w+ dgx-h100:2\n", "", "does not say all of that"),
        (r"(machine \w+) dgx-h100:2", r"\1 dgx-a100:2", "dgx-a100:2, which it was not made for"),
        (r"machine \w+ dgx-h100:2", f"machine {digest('x')} x", "its machine x cannot be used"),
        (r"machine \w+ dgx-h100:2", f"machine {digest('p5')} p5", "8 devices, but the mesh"),
        ("chosen broadcast", "# chosen broadcast", "does not say all of that"),
    ],
)
def test_a_damaged_text_is_refused(plan, tmp_path, old, new, message):
    damaged, count = re.subn(old, new, plan.text)
    assert count
    (tmp_path / "plan.txt").write_text(damaged)
    with pytest.raises(PlanError, match=message):
        collc.Plan.load(tmp_path / "plan.txt", POD)


def test_errors():
    with pytest.raises(PlanError, match=r"use='fresh' is for what is measured here, .* Drop one\."):
        collc.plan(POD, "auto", machine="dgx-h100:2", use="fresh")
    for axes in ("auto", {"gpu": "ring"}):
        with pytest.raises(MachineError, match=r"8 devices, but the mesh .* 16 ranks"):
            collc.plan(POD, axes, machine="dgx-h100")
    with pytest.raises(MachineError, match="dgx-h101"):
        collc.plan(POD, "auto", machine="dgx-h101")
    unnamed = collc.plan(
        AbstractMesh((2,), ("gpu",)), {"gpu": "ring"}, machine=uniform(2, 1e-6, 1e-9)
    )
    with pytest.raises(PlanError, match=r"cannot be saved: its text: its machine uniform\(2\)"):
        _ = unnamed.text


def test_devices_in_another_order_cost_more_and_the_better_one_is_named():
    devices = np.array(jax.devices()[:8])
    machine = two_level(2, 4, (1e-6, 1e-11), (1e-5, 1e-9))
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    mixed = collc.plan(Mesh(devices[order], ("gpu",)), {"gpu": "ring"}, machine=machine)
    straight = collc.plan(Mesh(devices, ("gpu",)), {"gpu": "ring"}, machine=machine)
    assert mixed.site.placement.order.tolist() == order
    assert straight.site.placement.order.tolist() == sorted(order)
    told = mixed.explain()
    told = " ".join(told.split())
    assert "Note: the mesh crosses hosts needlessly" in told and "0, 1, 2, 3, 4, 5, 6, 7" in told
    assert "Note" not in straight.explain()


# -- in words -------------------------------------------------------------------------------------


def test_explained_within_100_columns(plan):
    told = plan.explain()
    assert told == plan.explain() and max(map(len, told.splitlines())) <= 100
    for piece in (
        "Predicted on dgx-h100:2 (2 nodes of 8).",
        "tie (within the model's error of 12%)",
        "abstract unknown (nvls-tree Simple, in-network)",
        "the library's best: halving.reduce_scatter @ gpu >>",
    ):
        assert piece in told


def test_a_plan_that_is_slower_than_native_says_how_much():
    plan = collc.plan(POD, {"gpu": "ring", "host": "tree"}, machine="dgx-h100:2")
    own = Costs(placed(plan.site.machine, dict(plan.sizes)))
    ours, theirs = (
        own.of(s, 1 << 30)
        for s in (plan.schedule("all_reduce"), parse("native.all_reduce @ (host, gpu)"))
    )
    told = plan.explain()
    assert (
        f"1 GiB  12.3 ms   10.5 ms  4.41 ms (in-network)  {ours / theirs:.3g} times as long" in told
    )


def test_what_would_have_to_change_is_where_it_changes():
    """Bruck has 4 rounds fewer than pairwise, and 5/8 S more."""
    costs = Costs(placed(uniform(8, 0.0, BETA), {"gpu": 8}))
    quick, slow = parse("halving.all_reduce @ gpu"), parse("binomial.all_reduce @ gpu")
    names = ("the winner", "it")
    assert why.change(costs, quick, slow, 1 << 20, 0.0, names) == (
        "it would beat the winner by more than 0% by nothing that was tried: no change of a launch, "
        "links inside nodes by up to 100 times does it"
    )
    quick, slow = parse("pairwise.all_to_all @ gpu"), parse("bruck.all_to_all @ gpu")
    told = why.change(costs, quick, slow, 1 << 20, 0.0, ("pairwise", "bruck"))
    own = nccl.constants(costs.placement.machine)
    # 4 rounds more have to take as long as 5/8 S.
    factor = 5 / 8 * 2**20 * BETA / own.reached["link"] / 4 / (own.launch + own.near)
    assert (
        "bruck would beat pairwise by more than 0% if a launch took over "
        f"{own.launch * factor * 1e6:.3g} us (now 10.4 us)" in told
    )
    assert f"or if links inside nodes were {factor:.3g} times faster (now 1 GB/s)" in told


@pytest.mark.parametrize("sizes", [{"host": 1, "gpu": 8}, {"gpu": 8, "x": 1}, {"x": 1}])
def test_axes_of_one_rank(sizes):
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    plan = collc.plan(mesh, "auto", machine="dgx-h100")
    assert plan.schedule("all_reduce", size=1 << 20).axes == tuple(sizes)
    assert "nan" not in plan.explain()
