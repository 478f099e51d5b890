"""The abstract price equals the closed formulas, exactly; elsewhere it equals counting send by send."""

import functools
import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

import collc
from collc.errors import MachineError
from collc.language import ALL, add, copy, ranks
from collc.language import all_reduce as declared
from collc.language.algebra import Leaf, Schedule
from collc.language.expand import expand
from collc.language.library import contents, modules
from collc.machine.flow import flow
from collc.machine.placement import placed
from collc.machine.price import price
from collc.machine.topology import Network
from collc.machine.uniform import two_level
from collc.machine.uniform import uniform as uncached

uniform = functools.cache(uncached)

ALPHA, BETA, GAMMA = 7, 3, 2
SIZES = range(1, 65)


def lg(n: int) -> int:
    return (n - 1).bit_length()


def most(n: int) -> Fraction:
    return Fraction(n - 1, n)


def doubling(n: int) -> tuple[Fraction | int, ...]:
    power = n & (n - 1) == 0
    steps = n.bit_length() - 1
    return (steps, steps, steps) if power else (steps + 2, steps + 2, steps + 1)


# name: n -> (messages, bytes in S, added bytes in S). Sources: those of the table of formulas, Thakur,
# Rabenseifner and Gropp 2005, Sanders, Speck and Träff 2009, Bruck 1997, PAT arXiv 2506.20252.
FORMULAS = {
    "ring.reduce_scatter": lambda n: (n - 1, most(n), most(n)),
    "ring.all_gather": lambda n: (n - 1, most(n), 0),
    "ring.all_reduce": lambda n: (2 * (n - 1), 2 * most(n), most(n)),
    "doubling.all_reduce": doubling,
    "halving.reduce_scatter": lambda n: (lg(n), most(n), most(n)),
    "halving.all_gather": lambda n: (lg(n), most(n), 0),
    "halving.all_reduce": lambda n: (2 * lg(n), 2 * most(n), most(n)),
    "binomial.reduce": lambda n: (lg(n), lg(n), lg(n)),
    "binomial.broadcast": lambda n: (lg(n), lg(n), 0),
    "binomial.all_reduce": lambda n: (2 * lg(n), 2 * lg(n), lg(n)),
    "chain.reduce": lambda n: (n - 1, n - 1, n - 1),
    "server.reduce": lambda n: (n - 1, n - 1, n - 1),
    "server.broadcast": lambda n: (n - 1, n - 1, 0),
    "server.star": lambda n: (2 * (n - 1), 2 * (n - 1), n - 1),
    "allpairs.one_shot": lambda n: (n - 1, n - 1, n - 1),
    "allpairs.two_shot": lambda n: (2 * (n - 1), 2 * most(n), most(n)),
    "pairwise.all_to_all": lambda n: (n - 1, most(n), 0),
    "pat.all_gather": lambda n: (lg(n), most(n), 0),
    "pat.all_reduce": lambda n: (2 * lg(n), 2 * most(n), most(n)),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_the_closed_formulas(name):
    schedule = collc.parse(name)
    for n in SIZES:
        size = 64 * 60 * n  # divided by all that is divided by
        found = price(schedule, placed(uniform(n, ALPHA, BETA, GAMMA), {"": n}), size)
        messages, sent, added = FORMULAS[name](n)
        assert found.abstract == messages * ALPHA + sent * size * BETA + added * size * GAMMA, n
        assert found.bound is not None and found.bound.seconds <= found.abstract, n


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_k_servers(k):
    n = 16
    size = 64 * n
    found = price(
        collc.parse(f"server.shards({k})"), placed(uniform(n, ALPHA, BETA), {"": n}), size
    )
    # Rank r serves 1/k and works on the rest: a server's own port is the busiest one.
    assert found.abstract is not None
    assert found.abstract >= 2 * Fraction((n - 1) * size, k) * BETA
    if k == 1:
        assert found.abstract == 2 * (n - 1) * (ALPHA + size * BETA)


@pytest.mark.parametrize("k", [2, 3, 4, 5, 6])
def test_the_double_tree_without_slices(k):
    """(4 lg n - 2)(alpha + S/2 beta) for n = 2^k >= 4: 5 S beta at n = 8, 11 at 64."""
    n, size = 2**k, 64
    found = price(
        collc.parse("tree.double_all_reduce"), placed(uniform(n, ALPHA, BETA), {"": n}), size
    )
    assert found.abstract == (4 * k - 2) * (ALPHA + size / 2 * BETA)


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32, 64])
def test_bruck(n):
    """lg n alpha + (S/2) lg n beta, exactly for powers of two."""
    size = 64 * n
    found = price(collc.parse("bruck.all_to_all"), placed(uniform(n, ALPHA, BETA), {"": n}), size)
    assert found.abstract == lg(n) * ALPHA + size // 2 * lg(n) * BETA


def test_one_shot_with_many_ports_pays_one_latency():
    n, size = 8, 64
    found = price(
        collc.parse("allpairs.one_shot"),
        placed(uniform(n, ALPHA, BETA, GAMMA, n - 1), {"": n}),
        size,
    )
    assert found.abstract == ALPHA + (n - 1) * size * (BETA + GAMMA)


@pytest.mark.parametrize("m, g, q", [(2, 4, 4), (3, 4, 2), (4, 8, 8), (8, 8, 1), (5, 6, 3)])
def test_two_levels(m, g, q):
    """2(g-1)a_i + 2(g-1)/g S b_i + 2(m-1)a_e + 2(m-1)/m (S/g) b_e, the last times g/q on q NICs."""
    machine = two_level(m, g, (7, 3), (100, 20), q)
    place = placed(machine, {"host": m, "gpu": g})
    size = 64 * m * g
    text = "ring.reduce_scatter @ gpu >> ring.all_reduce @ host >> ring.all_gather @ gpu"
    found = price(collc.parse(text), place, size)
    inner = 2 * (g - 1) * 7 + 2 * most(g) * size * 3
    outer = 2 * (m - 1) * 100 + 2 * most(m) * Fraction(size, g) * 20 * Fraction(g, q)
    assert found.abstract == inner + outer
    exchange = price(
        collc.parse("pairwise.two_level('host', 'gpu')".replace("'", '"')), place, size
    )
    inner = (g - 1) * 7 + most(g) * size * 3
    outer = (m - 1) * 100 + most(m) * size * 20 * Fraction(g, q)
    assert exchange.abstract == inner + outer
    for one in (found, exchange):
        assert one.bound is not None and one.abstract is not None
        assert one.bound.seconds <= one.abstract


def counted(schedule: str, n: int, size: int) -> Fraction:
    """Lock-step, send by send: for each step the busiest rank's messages, bytes and additions."""
    total = Fraction(0)
    leaves = list(collc.parse(schedule).leaves())
    for leaf in leaves:
        program = expand(leaf, n)
        chunk = Fraction(size, program.chunks)
        for step in program.dense_steps():
            pairs, out, into, adds = set(), Counter(), Counter(), Counter()
            for s, d, is_add in zip(step.src.tolist(), step.dst.tolist(), step.add.tolist()):
                pairs.add((s, d))
                out[s] += 1
                into[d] += 1
                adds[d] += is_add
            most_messages = max(
                max(Counter(s for s, _ in pairs).values()),
                max(Counter(d for _, d in pairs).values()),
            )
            most_chunks = max(*out.values(), *into.values())
            total += most_messages * ALPHA + chunk * (
                most_chunks * BETA + max(adds.values()) * GAMMA
            )
    return total


@pytest.mark.parametrize("n", [2, 3, 5, 8, 12, 17])
@pytest.mark.parametrize(
    "schedule",
    ["tree.all_reduce", "tree.double_all_reduce", "bruck.all_to_all", "pat.reduce_scatter",
     "chain.all_reduce", "server.gather", "server.scatter", "server.shards(2)", "binomial.all_reduce",
     "doubling.all_reduce", "rack.all_reduce((0,), (1,))"],
)  # fmt: skip
def test_counting_send_by_send(schedule, n):
    if schedule.startswith("rack"):
        half = n // 2
        racks = (tuple(range(half)), tuple(range(half, n)))
        schedule = f"rack.all_reduce({', '.join(map(str, racks))})"
    size = 840 * n
    found = price(collc.parse(schedule), placed(uniform(n, ALPHA, BETA, GAMMA), {"": n}), size)
    assert found.abstract == counted(schedule, n, size)


def test_every_schedule_of_the_library_is_priced_above_its_bound():
    seen = 0
    for n in (2, 3, 4, 7, 8, 12):
        place = placed(uniform(n, ALPHA, BETA, GAMMA), {"": n})
        for module in modules().values():
            for schedule in contents(module).values():
                if not isinstance(schedule, Schedule) or schedule.axes:
                    continue
                found = price(schedule, place, 840 * n)
                if found.abstract is None:
                    continue
                seen += 1
                assert found.bound is None or found.bound.seconds <= found.abstract * (1 + 1e-12)
    assert seen > 100


@declared
def forgetful(n):
    """No all-reduce at all: it has a price all the same."""
    yield add(ALL, ranks(n)[1:], 0)
    yield copy(ALL, 0, ranks(n)[1:-1])


def test_deleting_a_send_changes_the_price_and_an_unseen_schedule_has_one():
    @declared
    def whole(n):
        yield add(ALL, ranks(n)[1:], 0)
        yield copy(ALL, 0, ranks(n)[1:])

    place = placed(uniform(5, ALPHA, BETA, GAMMA), {"": 5})
    size = 100
    all_sends = price(whole, place, size).abstract
    fewer = price(forgetful, place, size).abstract
    assert all_sends == 8 * (ALPHA + size * BETA) + 4 * size * GAMMA
    assert fewer == all_sends - (ALPHA + size * BETA)


def test_parts_side_by_side_share_ports_and_links():
    n, size = 8, 64 * 8
    place = placed(uniform(n, ALPHA, BETA), {"": n})
    one = price(collc.parse("ring.all_reduce"), place, size)
    two = price(collc.parse("ring.two_way_all_reduce"), place, size)
    steps = 2 * (n - 1)
    assert one.abstract == steps * ALPHA + 2 * most(n) * size * BETA
    # One port each way: two messages of half the bytes.
    assert two.abstract == 2 * steps * ALPHA + 2 * most(n) * size * BETA
    assert sum(row.steps for row in two.rows) == steps


def test_a_torus_uses_the_links_of_both_axes_at_once():
    place = placed(two_level(4, 4, (1, 1), (1, 1)), {"host": 4, "gpu": 4})
    size = 64 * 32
    found = price(collc.parse('torus.torus("host", "gpu")'), place, size)
    assert {row.kind for row in found.rows} <= {"link", "net", "board"}
    assert len(found.traffic) == 3


def test_traffic_by_class_of_link():
    m, g = 4, 8
    place = placed(two_level(m, g, (7, 3), (100, 20)), {"host": m, "gpu": g})
    size = 64 * m * g
    found = price(collc.parse('hierarchical("host", "gpu")'), place, size)
    # The double tree has 2(m - 1) messages of each half between hosts, for each gpu; out and in.
    assert found.traffic["net"].total == 2 * 2 * (m - 1) * size
    assert found.traffic["link"].total == 2 * m * 2 * (g - 1) * size


def test_contention_on_a_shared_nic_and_an_uplink():
    size = 64 * 16
    text = "ring.all_reduce @ host"
    own = price(
        collc.parse(text), placed(two_level(4, 4, (1, 1), (10, 20)), {"host": 4, "gpu": 4}), size
    )
    one = price(
        collc.parse(text), placed(two_level(4, 4, (1, 1), (10, 20), 1), {"host": 4, "gpu": 4}), size
    )
    assert own.abstract is not None and one.abstract is not None
    latencies = 6 * 10
    assert one.abstract - latencies == 4 * (own.abstract - latencies)
    racks = Network(rack=2, uplink=40.0)
    slow = price(
        collc.parse(text),
        placed(two_level(4, 4, (1, 1), (10, 20), network=racks), {"host": 4, "gpu": 4}),
        size,
    )
    # Of each ring of hosts one message leaves each rack in a step: four rings, four messages.
    assert slow.abstract == latencies + 6 * 4 * size / 4 * 40
    assert slow.rows[0].kind == "uplink"


@pytest.mark.parametrize("size", [0, -1, math.nan, math.inf])
def test_sizes_that_have_no_price(size):
    with pytest.raises(MachineError, match="has no price"):
        price(collc.parse("ring.all_reduce"), placed(uniform(4, 1, 1), {"": 4}), size)


def test_whole_chunks_are_priced_where_xla_runs_them():
    """5 elements over 4 ranks: chunks of 2 elements travel."""
    place = placed(uniform(4, 1e-6, 1e-9), {"": 4})
    ring = collc.parse("ring.all_reduce")
    five, eight = price(ring, place, 20), price(ring, place, 32)
    assert five.lowered == eight.lowered
    assert five.abstract is not None and eight.abstract is not None
    assert five.abstract < eight.abstract


def test_lowered_rounds_pay_a_launch_each_and_run_one_at_a_time():
    place = placed(uniform(8, 1e-6, 1e-9), {"": 8})
    one = price(collc.parse("ring.all_reduce"), place, 8 << 20)
    two = price(collc.parse("ring.two_way_all_reduce"), place, 8 << 20)
    assert [row.rounds for row in two.rows] == [2, 2]
    assert two.lowered > one.lowered
    assert sum(r.lowered.latency * r.steps for r in two.rows) == pytest.approx(
        2 * sum(r.lowered.latency * r.steps for r in one.rows)
    )


def test_where_xlas_own_takes_part_its_sends_are_unknown():
    place = placed(two_level(4, 8, (1e-6, 1e-11), (5e-6, 1e-10)), {"host": 4, "gpu": 8})
    text = "native.reduce_scatter @ gpu >> ring.all_reduce @ host >> native.all_gather @ gpu"
    found = price(collc.parse(text), place, 1 << 20)
    assert found.abstract is None and found.gap is None
    assert found.lowered > 0
    assert [bool(row.how) for row in found.rows] == [True, False, False, True]


def test_65536_ranks():
    """8,192 x 8, hierarchical: see benchmarks for the seconds."""
    place = placed(two_level(8192, 8, (1e-6, 1e-11), (5e-6, 1e-10)), {"host": 8192, "gpu": 8})
    found = price(collc.parse('hierarchical("host", "gpu")'), place, 64 << 20)
    assert found.abstract is not None
    assert found.bound is not None and found.bound.seconds < found.abstract
    assert sum(row.steps for row in found.rows) == 7 + 26 + 7


def test_an_axis_of_one_rank_keeps_the_order_of_the_others():
    sizes = {"host": 1, "gpu": 8}
    place = placed(two_level(1, 8, (3, 1), (1, 1)), sizes)
    found = price(collc.parse('hierarchical("host", "gpu")'), place, 64)
    assert [row.title for row in found.rows] == [
        "ring.reduce_scatter @ gpu",
        "ring.all_gather @ gpu",
    ]
    assert found.abstract == price(collc.parse("ring.all_reduce @ gpu"), place, 64).abstract


def test_equal_steps_are_one_moment():
    what = flow(collc.parse("ring.all_reduce"), {"": 64})
    assert [len(set(part.moments or ())) for part in what.parts] == [1, 1]


def test_the_table_of_a_leaf_in_tuple_order():
    what = flow(collc.parse("ring.all_gather @ (gpu, host)"), {"host": 2, "gpu": 3})
    assert what.parts[0].table.reshape(-1).tolist() == [0, 3, 1, 4, 2, 5]


def test_relabelled_ranks_and_a_bad_order_of_devices():
    machine = two_level(2, 4, (1, 1), (100, 20))
    ring = collc.parse("ring.all_reduce")
    good = price(ring, placed(machine, {"": 8}), 64)
    shuffled = placed(machine, {"": 8}, [0, 4, 1, 5, 2, 6, 3, 7])
    bad = price(ring, shuffled, 64)
    assert good.abstract == 14 * 100 + 14 * 8 * 20  # one message of 64/8 over each NIC a step
    assert bad.abstract == good.abstract  # a NIC each: every device has its own
    healed = ring.relabel(order=(0, 2, 4, 6, 1, 3, 5, 7))
    assert flow(healed, {"": 8}).parts[0].table.reshape(-1).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    shared = two_level(2, 4, (1, 1), (100, 20), 1)
    bad = price(ring, placed(shared, {"": 8}, [0, 4, 1, 5, 2, 6, 3, 7]), 64)
    assert bad.abstract == 14 * 100 + 14 * 4 * 8 * 20
    assert (
        price(healed, placed(shared, {"": 8}, [0, 4, 1, 5, 2, 6, 3, 7]), 64).abstract
        == good.abstract
    )


def test_a_leaf_knows_its_place_in_the_mesh():
    leaf = next(collc.parse("ring.all_gather @ host").leaves())
    assert isinstance(leaf, Leaf) and replace(leaf).axes == ("host",)
    what = flow(collc.parse("ring.all_gather @ host"), {"host": 2, "gpu": 2})
    found = what.parts[0].moments
    assert found is not None
    sent = found[0].messages()
    assert sorted(zip(sent.src.tolist(), sent.dst.tolist())) == [(0, 2), (1, 3), (2, 0), (3, 1)]
    assert np.array_equal(sent.round, [0, 0, 0, 0])
