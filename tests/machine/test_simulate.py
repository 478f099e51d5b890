"""Simulation without lock-step: equal to one from a heap, equal to prices; who stalls; how it scales."""

import heapq
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collc.errors import MachineError
from collc.language.library import load, lookup
from collc.language.parse import parse
from collc.machine.flow import Flow, flow
from collc.machine.placement import Placement, placed
from collc.machine.price import price
from collc.machine.simulation.faults import (
    BrokenLink,
    BrokenRank,
    LateRank,
    SlowLink,
    SlowRank,
    damage,
    parse_fault,
)
from collc.machine.simulation.simulate import simulate
from collc.machine.text import machine as read_machine
from collc.machine.topology import Network
from collc.machine.uniform import two_level, uniform

make = load(Path(__file__).parents[1] / "strategies.py")
pytestmark = pytest.mark.usefixtures("zoo")
INNER, OUTER = (1e-6, 1 / 450e9), (5e-6, 1 / 50e9)


@pytest.fixture(scope="module")
def zoo():
    """The schedules of the strategies are found by name."""
    with make.zoo_known():
        yield


def run(schedule, machine, sizes, size, faults=(), order=None, **options):
    return simulate(flow(schedule, sizes), placed(machine, sizes, order), size, faults, **options)


def ring(n=8, *, name="ring.all_reduce", faults=(), **options):
    """On a uniform machine where a message takes 1 s and 1 s per byte, n bytes of buffer."""
    faults = [parse_fault(text) for text in faults]
    return run(lookup(name), uniform(n, 1, 1), {"": n}, n, faults, **options)


def naive(flow: Flow, placement: Placement, size: float, faults=()):
    """When each rank is done in the abstract model, [ranks]; inf is never."""
    machine, hurt, n = placement.machine, damage(faults, placement), len(placement.order)
    steps = [
        [_sent(moment.messages(), float(size * part.chunk)) for moment in part.moments]
        for part in flow.parts
    ]
    after = [part.strand.after for part in flow.parts]
    free: dict[object, float] = {}
    heap: list[tuple] = []
    at = {(p, r): -1 for p in range(len(steps)) for r in range(n)}
    start, left, done = {}, {}, {}
    got: Counter = Counter()
    latest, gone_by = {}, Counter()

    def enter(p, r, t):
        at[p, r] += 1
        k = at[p, r]
        if k == len(steps[p]):
            done[p, r] = t
            for q, before in enumerate(after):
                if p in before and all((b, r) in done for b in before):
                    enter(q, r, max(done[b, r] for b in before))
            return
        start[p, r] = left[p, r] = t
        for src, dst, round, bytes, _ in steps[p][k]:
            if src == r:
                heapq.heappush(heap, (t, round, src, dst, p, k, bytes))
                left[p, r] = math.inf
        finish(p, r)

    def finish(p, r):
        k = at[p, r]
        if k < 0 or k == len(steps[p]) or left[p, r] == math.inf:
            return
        if got[p, r, k] < sum(m[1] == r for m in steps[p][k]):
            return
        adding = sum(m[4] for m in steps[p][k] if m[1] == r) * machine.gamma * hurt.slow[r]
        end = max(left[p, r], max(start[p, r], latest.get((p, r, k), 0.0)) + adding)
        if end < math.inf:
            enter(p, r, end)

    def send(t, src, dst, bytes):
        """When it has left, and when it has arrived."""
        paths = machine.paths(placement.order[[src]], placement.order[[dst]])
        links = [int(k) for k in paths.links[0] if k >= 0]
        if hurt.broken[links].any():
            return math.inf, math.inf
        slow = hurt.slow[src]
        latency = paths.latency[0] * slow
        port = latency / machine.ports
        arrive = t + (latency + max(bytes * hurt.beta[k] * slow for k in links))
        gone = -math.inf
        for server in (("out", src), *links, ("in", dst)):
            begin = max(t, free.get(server, 0.0))
            own = port if isinstance(server, tuple) else bytes * hurt.beta[server] * slow
            if server in (links[0], links[-1]):
                own += port
            free[server] = begin + own
            middle = not isinstance(server, tuple) and server not in (links[0], links[-1])
            arrive = max(arrive, begin + (own + latency) if middle else begin + own)
            if server != ("in", dst):
                gone = max(gone, begin + own)
        return gone, arrive

    for p, before in enumerate(after):
        for r in range(n) if not before else ():
            if not hurt.dead[r]:
                enter(p, r, float(hurt.late[r]))
    waiting: Counter = Counter()
    while heap:
        t, _, src, dst, p, k, bytes = heapq.heappop(heap)
        gone, arrive = send(t, src, dst, bytes)
        # Its sender waits for the last of all that it sends in this step.
        sends = sum(m[0] == src for m in steps[p][k])
        waiting[p, src, k] += 1
        gone_by[p, src, k] = max(gone_by[p, src, k], gone)
        got[p, dst, k] += 1
        latest[p, dst, k] = max(latest.get((p, dst, k), -math.inf), arrive)
        if waiting[p, src, k] == sends:
            left[p, src] = gone_by[p, src, k]
            finish(p, src)
        if at[p, dst] == k:
            finish(p, dst)
    ends = [
        max((done.get((p, r), math.inf) for p in range(len(steps))), default=hurt.late[r])
        for r in range(n)
    ]
    return np.where(hurt.dead, math.inf, ends)


def _sent(found, chunk):
    """(from, to, round, bytes, bytes added) of each message."""
    columns = (found.src, found.dst, found.round, found.chunks * chunk, found.added * chunk)
    return list(zip(*(c.tolist() for c in columns), strict=True))


@st.composite
def machines(draw, n):
    """A machine of at least n devices, with latencies and speeds of every kind."""
    number = st.floats(1e-3, 10)
    if draw(st.booleans()):
        ports = draw(st.integers(1, 3))
        return uniform(n, draw(number), draw(number), draw(number), ports)
    nodes = draw(st.integers(2, 3))
    gpus = math.ceil(n / nodes)
    network = draw(
        st.sampled_from([Network(0.5), Network(0.5, rails=True, across=0.25)])
        if nodes == 3
        else st.just(Network(rack=1, uplink=0.7, hop=0.3))
    )
    nics = draw(st.sampled_from([1, min(2, gpus), gpus]))
    pair = st.tuples(number, number)
    return two_level(nodes, gpus, draw(pair), draw(pair), nics, draw(number), network)


@st.composite
def faults_of(draw, machine, n):
    rank, times = st.integers(0, n - 1), st.floats(1.5, 4)
    link = st.integers(0, len(machine.beta) - 1).map(machine.name)
    one = st.one_of(
        st.builds(LateRank, rank, st.floats(0.1, 9)),
        st.builds(SlowRank, rank, times),
        st.builds(BrokenRank, rank),
        st.builds(SlowLink, link, times),
        st.builds(BrokenLink, link),
    )
    return draw(st.lists(one, max_size=3))


# Where a message that is sent a little too early or too late changes who waits for whom at a port.
CLOSE = [
    ("pairwise.all_to_all @ (host, gpu)", 2, 8, []),
    ("pairwise.all_to_all @ (host, gpu)", 2, 64, ["slow rank 3 x2", "late rank 5 by 17s"]),
    ("halving.all_reduce @ (host, gpu)", 1, 8, ["slow rank 4 x1.5", "late rank 4 by 8s"]),
    ("ring.two_way_all_reduce @ (host, gpu)", 2, 64, []),
    ("torus.torus('host', 'gpu')", 4, 64, ["late rank 5 by 7s"]),
]


@pytest.mark.parametrize("text, nics, size, faults", CLOSE)
def test_who_comes_first_at_a_shared_port(text, nics, size, faults):
    """As from a heap, which serves message after message."""
    sizes = {"host": 2, "gpu": 4}
    made = flow(parse(text), sizes)
    where = placed(two_level(2, 4, (1, 1), (4, 2), nics, gamma=1), sizes)
    hurt = [parse_fault(text) for text in faults]
    found = simulate(made, where, size, hurt)
    assert found.finish.tolist() == naive(made, where, size, hurt).tolist()


@settings(max_examples=40)
@given(st.data())
def test_it_equals_one_from_a_heap(data):
    """To the last digit: with contention, unequal latencies, skew, and faults."""
    equals_one_from_a_heap(data)


@pytest.mark.newest_only
@settings(max_examples=120)
@given(st.data())
def test_it_equals_one_from_a_heap_many_times(data):
    equals_one_from_a_heap(data)


def equals_one_from_a_heap(data):
    axes = data.draw(st.sampled_from([["x"], ["x", "y"]]))
    sizes = {axis: data.draw(st.integers(2, 6 if len(axes) == 1 else 3)) for axis in axes}
    n = math.prod(sizes.values())
    schedule = data.draw(make.placed(data.draw(make.kinds), axes))
    machine = data.draw(machines(n))
    faults = data.draw(faults_of(machine, n))
    order = data.draw(st.permutations(range(n)))
    made, where = flow(schedule, sizes), placed(machine, sizes, order)
    size = 720720 * 64
    found = simulate(made, where, size, faults)
    expected = naive(made, where, size, faults)
    assert found.finish.tolist() == expected.tolist()
    assert found.seconds == expected.max()
    assert sorted(s.rank for s in found.stalls) == np.flatnonzero(np.isinf(expected)).tolist()
    recorded = simulate(made, where, size, faults, record=True)
    assert recorded.finish.tolist() == expected.tolist()


NAMES = """ring.reduce_scatter ring.all_gather ring.all_reduce halving.all_reduce doubling.all_reduce
binomial.all_reduce binomial.broadcast pairwise.all_to_all""".split()
OTHERS = """ring.two_way_all_reduce allpairs.one_shot allpairs.two_shot pat.all_reduce tree.all_reduce
tree.double_all_reduce chain.all_reduce server.star server.scatter bruck.all_to_all""".split()


@pytest.mark.parametrize("n", [2, 4, 8, 16])
@pytest.mark.parametrize("name", NAMES)
def test_without_skew_it_is_the_price(name, n):
    machine = uniform(n, 3, 2, 1)
    own = price(lookup(name), placed(machine, {"": n}), 64 * n).abstract
    assert run(lookup(name), machine, {"": n}, 64 * n).seconds == own


MACHINES = {
    "uniform": uniform(16, 1e-6, 1e-9, 1e-10),
    "two ports": uniform(16, 1e-6, 1e-9, 1e-10, ports=2),
    "a NIC each": two_level(4, 4, INNER, OUTER),
    "shared NICs": two_level(4, 4, INNER, OUTER, nics=2, gamma=1e-11),
}
# Where latencies differ a fast rank is a step ahead, and its message may come before a slow one's at a
# port that both need: in lock-step it would wait. This much longer is what was found, not a bound.
OVERTAKEN = {
    "halving.all_reduce": 1.06,
    "allpairs.two_shot": 1.01,
    "tree.double_all_reduce": 1.02,
}


@pytest.mark.parametrize("model", ["abstract", "lowered"])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_it_takes_no_longer_than_lock_step(name, machine, model):
    where = placed(MACHINES[machine], {"": 16})
    for size in (2**10, 2**26):
        own = getattr(price(lookup(name), where, size), model)
        found = simulate(flow(lookup(name), {"": 16}), where, size, model=model)
        uneven = machine not in ("uniform", "two ports")
        most = OVERTAKEN.get(name, 1) if uneven else 1
        assert 0 < found.seconds <= own * most * (1 + 1e-12)


@pytest.mark.parametrize("name, longer", [("halving.all_reduce", 1.08), ("bruck.all_to_all", 1.04)])
def test_ranks_that_are_ahead_hold_up_those_behind(name, longer):
    """What docs/timelines.md says."""
    where = placed(read_machine("dgx-h100:4"), {"": 32})
    own = price(lookup(name), where, 2**29).abstract
    found = simulate(flow(lookup(name), {"": 32}), where, 2**29)
    assert found.seconds / own == pytest.approx(longer, abs=0.005)


def test_a_ring_over_hosts_pays_a_launch_a_round():
    """Lowered, a rank that has launched a round is not through with it before it is received."""
    where = placed(read_machine("dgx-h100:4"), {"": 32})
    own = price(lookup("ring.all_reduce"), where, 2**26).lowered
    found = simulate(flow(lookup("ring.all_reduce"), {"": 32}), where, 2**26, model="lowered")
    assert 0.95 * own < found.seconds <= own


def test_composites_take_no_longer_than_lock_step():
    sizes = {"host": 4, "gpu": 4}
    texts = [
        "hierarchical.hierarchical('host', 'gpu')",
        "torus.torus('host', 'gpu')",
        "pairwise.all_to_all @ gpu >> pairwise.all_to_all @ host",
        "native.reduce_scatter @ gpu >> ring.all_reduce @ host >> native.all_gather @ gpu",
    ]
    for text in texts:
        where = placed(MACHINES["shared NICs"], sizes)
        own = price(parse(text), where, 2**26)
        for model in ("abstract", "lowered") if own.abstract else ("lowered",):
            found = run(parse(text), where.machine, sizes, 2**26, model=model)
            assert found.seconds <= getattr(own, model) * (1 + 1e-12), text
    alone = price(lookup("native.all_reduce"), placed(uniform(4, 1e-6, 1e-9), {"": 4}), 2**20)
    found = run(
        lookup("native.all_reduce"), uniform(4, 1e-6, 1e-9), {"": 4}, 2**20, model="lowered"
    )
    assert found.finish.tolist() == [alone.lowered] * 4


def test_a_late_rank_holds_back_a_ring_and_one_group_only():
    own = ring(4)
    assert own.finish.tolist() == [12] * 4
    late = ring(4, faults=["late rank 1 by 100s"])
    # Rank 1 is late, and everybody needs what it adds: one after another, two steps each.
    assert late.finish.tolist() == [112] * 4
    groups = run(
        lookup("ring.all_reduce") @ "x", uniform(8, 1, 1), {"x": 4, "y": 2}, 4,
        [parse_fault("late rank 2 by 100s")],
    )  # fmt: skip
    assert groups.finish.tolist() == [112, 12] * 4


def test_a_ring_stalls_rank_after_rank_where_a_tree_goes_on():
    broken = ring(8, faults=["broken rank 5"])
    assert broken.seconds == math.inf and len(broken.stalls) == 8
    by_rank = {stall.rank: stall for stall in broken.stalls}
    # Rank 6 waits at once, rank 4 after six steps of the reduce-scatter, of 14 in all.
    assert (by_rank[6].step, by_rank[6].waits, by_rank[6].share) == (0, 5, 0)
    assert (by_rank[4].step, by_rank[4].waits, by_rank[4].share) == (6, 3, 6 / 14)
    assert {stall.cause for stall in broken.stalls} == {"rank 5 is broken"}
    assert by_rank[5].title == "" and by_rank[5].share == 0
    text = str(broken)
    assert "8 of 8 ranks never finish" in text and "broken rank 5" in text
    tree = ring(8, name="binomial.broadcast", faults=["broken rank 4"])
    assert (
        [s.rank for s in tree.stalls] == [4, 5, 6, 7] == np.flatnonzero(tree.finish > 1e9).tolist()
    )
    assert [s.waits for s in tree.stalls] == [None, 4, 4, 6]
    assert "the others finish after" in tree.summary()


def test_a_broken_link_stalls_both_ends():
    out = ring(4, faults=["broken link node0/gpu2 -> switch"])
    assert {s.rank: s.waits for s in out.stalls} == {0: 3, 1: 0, 2: None, 3: None}
    assert {s.cause for s in out.stalls} == {"node0/gpu2 -> switch is broken"}
    assert "rank 3, ring.reduce_scatter step 0, node0/gpu2 -> switch is broken" in out.summary()


def test_a_slow_rank_and_a_slow_link():
    assert ring(4, faults=["slow rank 1 x3"]).seconds > ring(4).seconds
    shared = two_level(2, 4, (1, 1), (2, 1), nics=2)
    link = [parse_fault("slow nic 0 of node 1 x5")]
    sizes = {"host": 2, "gpu": 4}
    own = run(lookup("ring.all_reduce") @ "host", shared, sizes, 8, link)
    healthy = run(lookup("ring.all_reduce") @ "host", shared, sizes, 8)
    # GPUs 0 and 1 of each node use that NIC, the others do not feel it.
    assert (own.finish > healthy.finish).tolist() == [True, True, False, False] * 2
    native = parse("native.all_reduce @ host")
    # XLA's own is taken to be held up by the slowest link of all its ways, in the bytes alone.
    whole = price(native, placed(shared, sizes), 8).rows[0].lowered
    held = run(native, shared, sizes, 8, link, model="lowered")
    assert held.finish.tolist() == [whole.latency + 5 * whole.bytes] * 8
    inner = [parse_fault("slow link node1/gpu0 -> switch x5")]
    unused = run(parse("native.all_reduce @ gpu"), shared, sizes, 8, inner, model="lowered")
    assert (unused.finish > unused.finish[0]).tolist() == [False] * 4 + [True] * 4
    with pytest.raises(MachineError, match="nobody knows what"):
        run(native, shared, sizes, 8, [BrokenLink("node1/nic0")], model="lowered")
    slow = run(native, shared, sizes, 8, [parse_fault("slow rank 5 x2")], model="lowered")
    assert slow.finish[1] == slow.finish[5] == 2 * slow.finish[0]
    broken = run(native, shared, sizes, 8, [BrokenRank(5)], model="lowered")
    assert {s.rank: s.waits for s in broken.stalls} == {1: 5, 5: None}


def test_faults_are_read_checked_and_said_to_be_without_effect():
    for text in (
        "late rank 3 by 5 ms", "slow rank 3 x2", "broken rank 3", "slow link node1/nic0 x4",
        "broken link rack1 up", "slow nic 0 of node 1 x4", "broken nic 0 of node 1",
    ):  # fmt: skip
        assert str(parse_fault(text)) == text and parse_fault(str(parse_fault(text))) is not None
    for text in ("slow", "slow rank x x2", "slow rank 3 x0.5", "late rank 1 by 0s", "broken link "):
        with pytest.raises(MachineError):
            parse_fault(text)
    with pytest.raises(MachineError, match="0 to 7"):
        ring(8, faults=["slow rank 8 x2"])
    with pytest.raises(MachineError, match="Did you mean node0/gpu"):
        ring(8, faults=["broken link node0/gpuu1"])
    machine = two_level(2, 2, INNER, OUTER)
    with pytest.raises(MachineError, match="NICs of a node 0, 1"):
        run(lookup("ring.all_reduce"), machine, {"": 4}, 8, [parse_fault("broken nic 7 of node 0")])
    inside = [parse_fault("broken nic 0 of node 1"), parse_fault("slow rank 3 x2")]
    found = run(lookup("ring.all_reduce"), machine, {"": 2}, 8, inside[:1])
    assert found.without_effect == (inside[0],) and "no effect" in found.summary()
    assert run(lookup("ring.all_reduce"), machine, {"": 4}, 8, inside[1:]).without_effect == ()


def test_what_cannot_be_simulated():
    with pytest.raises(MachineError, match="1 byte or more"):
        run(lookup("ring.all_reduce"), uniform(4, 1, 1), {"": 4}, 0)
    with pytest.raises(MachineError, match="model='lowered'"):
        run(lookup("native.all_reduce"), uniform(4, 1, 1), {"": 4}, 8)
    with pytest.raises(MachineError, match="no model 'exact'"):
        ring(4, model="exact")
    with pytest.raises(MachineError, match="same sizes"):
        simulate(flow(lookup("ring.all_reduce"), {"": 4}), placed(uniform(8, 1, 1), {"": 8}), 8)
    assert ring(1).finish.tolist() == [0]


@pytest.mark.parametrize("model", ["abstract", "lowered"])
def test_thousands_of_ranks_take_a_moment(model):
    """4,096 ranks take as long as one host alone, then one GPU of each host, then one host again."""
    machine, size = two_level(512, 8, (1, 1), (4, 2)), 2**26
    schedule = parse("hierarchical.hierarchical('host', 'gpu')")
    found = run(schedule, machine, {"host": 512, "gpu": 8}, size, model=model)
    assert found.progress == 1
    inside = [
        run(lookup(name) @ "gpu", machine, {"gpu": 8}, size, model=model).finish
        for name in ("ring.reduce_scatter", "ring.all_gather")
    ]
    firsts = range(0, 4096, 8)
    between = run(
        lookup("tree.double_all_reduce") @ "host", machine, {"host": 512}, size / 8,
        order=firsts, model=model,
    ).finish  # fmt: skip
    alone = inside[0] + between[:, None] + inside[1]
    if model == "abstract":  # in whole seconds
        assert found.finish.reshape(512, 8).tolist() == alone.tolist()
    else:
        np.testing.assert_allclose(found.finish.reshape(512, 8), alone, rtol=1e-12)
