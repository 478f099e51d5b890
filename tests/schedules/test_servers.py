"""What allpairs.py, server.py and servers.py claim, and FORMULAS.md's rows for them."""

from fractions import Fraction
from pathlib import Path

import pytest

import collc
from collc.errors import ScheduleError
from collc.language.expand import expand
from collc.language.library import load
from collc.language.parse import parse
from collc.schedules import allpairs, ring, server, servers

counting = load(Path(__file__).parent / "counting.py")
SIZES, counts = counting.SIZES, counting.counts


@pytest.mark.parametrize("n", SIZES)
class TestAllPairs:
    def test_one_shot(self, n):
        """One step of n - 1 rounds, (n - 1)(alpha + S beta + S gamma) with one port."""
        each, once = [n - 1] * n, min(1, n - 1)
        found = counts(allpairs.one_shot, n)
        assert [*found] == [once, n - 1, each, each]
        assert found.links == {(r, d): 1 for r in range(n) for d in range(n) if r != d}
        assert collc.verify(allpairs.one_shot, n=n).depth == n - 1

    def test_one_shot_s_replicas_may_differ_and_the_certificate_tells(self, n):
        """Two addends have one order only, up to commutativity; beyond that each rank has its own."""
        c = collc.verify(allpairs.one_shot, n=n)
        assert c.consistent is (n <= 2)
        assert c.narrow is (n == 1)

    def test_halves(self, n):
        """One step of n - 1 rounds; each part, or each chunk, goes straight to where it ends."""
        each, once = [Fraction(n - 1, n)] * n, min(1, n - 1)
        for half, depth in ((allpairs.reduce_scatter, n - 1), (allpairs.all_gather, 0)):
            found = counts(half, n)
            assert [*found] == [once, n - 1, each, each]
            assert {*found.links.values()} <= {Fraction(1, n)}
            counting.optimal(half, n, once, depth)
        for step in expand(allpairs.reduce_scatter, n).dense_steps():
            assert (step.dst == step.chunk).all()
        for step in expand(allpairs.all_gather, n).dense_steps():
            assert (step.src == step.chunk).all()

    def test_two_shot(self, n):
        """Consistent: each chunk is summed once, and then copied."""
        c = collc.verify(allpairs.two_shot, n=n)
        assert c.rounds == 2 * (n - 1) and c.sent == Fraction(2 * (n - 1), n)
        counting.optimal(allpairs.two_shot, n, 2 * min(1, n - 1), n - 1)


@pytest.mark.parametrize("n", SIZES)
class TestServer:
    def test_star(self, n):
        """Each way (n - 1)(alpha + S beta): the root sends and receives (n - 1) S."""
        rest = [Fraction(1)] * (n - 1)
        once = min(1, n - 1)
        assert [*counts(server.reduce, n)] == [once, n - 1, [0, *rest], [n - 1] + [0] * (n - 1)]
        assert [*counts(server.broadcast, n)] == [once, n - 1, [n - 1] + [0] * (n - 1), [0, *rest]]
        c = collc.verify(server.star, n=n)
        assert (c.steps, c.rounds, c.sent, c.received) == (2 * once, 2 * (n - 1), n - 1, n - 1)
        assert c.depth == n - 1 and c.consistent and c.narrow
        # For n = 8 that is 4 times the ring's 1.75 S.
        assert n != 8 or c.sent == 4 * collc.verify(ring.all_reduce, n=n).sent

    def test_scatter_and_gather(self, n):
        """One step, n - 1 rounds: the root moves (n - 1)/n S, every other rank its chunk."""
        root = [Fraction(n - 1, n)] + [Fraction(0)] * (n - 1)
        rest = [Fraction(0)] + [Fraction(1, n)] * (n - 1)
        once = min(1, n - 1)
        assert [*counts(server.scatter, n)] == [once, n - 1, root, rest]
        assert [*counts(server.gather, n)] == [once, n - 1, rest, root]
        for half in (server.scatter, server.gather):
            c = collc.verify(half, n=n)
            assert c.depth == 0 and c.consistent and c.narrow and c.gap in (1, None)

    @pytest.mark.parametrize("k", [1, 2, 3, 4, 8, 17])
    def test_shards(self, n, k):
        """k servers, each for 1/k of the buffer: a server moves (n - 1) S/k each way."""
        program = expand(next(server.shards(k).leaves()), n)
        assert program.chunks == k
        steps, rounds, sent, received = counts(server.shards(k), n)
        assert steps == (2 if n > 1 else 0)
        for step in program.dense_steps():  # chunk c is served by rank c mod n
            served = step.dst if step.add.all() else step.src
            assert (served == step.chunk % n).all()
        if n > 1 and k <= n:
            push, pull = program.dense_steps()
            for r in range(k):
                assert (push.dst == r).sum() == (pull.src == r).sum() == n - 1
            assert rounds == 2 * (n - 1)  # all servers are busy in each round
            worker = Fraction(k - 1, k)  # a server is a worker of the others
            assert sent[:k] == received[:k] == [worker + Fraction(n - 1, k)] * k
        if k == n:
            assert {*sent} == {Fraction(2 * (n - 1), n)}
        c = collc.verify(server.shards(k), n=n)
        assert c.depth == n - 1 and c.consistent and c.narrow


@pytest.mark.parametrize("n", SIZES)
class TestServers:
    def test_push_and_pull(self, n):
        """One step, n - 1 rounds: rank c < k moves (n - 1) S/k of its chunk, and works on the rest."""
        for k in {*range(1, min(n, 9)), n}:
            serves, once = [Fraction(n - 1, k)] * k + [Fraction(0)] * (n - k), min(1, n - 1)
            works = [Fraction(k - 1, k)] * k + [Fraction(1)] * (n - k)
            assert [*counts(servers.push(k), n)] == [once, n - 1, works, serves]
            assert [*counts(servers.pull(k), n)] == [once, n - 1, serves, works]
            down, up = collc.verify(servers.push(k), n=n), collc.verify(servers.pull(k), n=n)
            assert (down.received, up.sent) == (Fraction(n - 1, k), Fraction(n - 1, k))
            assert down.gap in (1, None) and down.depth == n - 1 and up.consistent and up.narrow
            (ends,) = servers.push(k).leaves()
            assert (expand(ends, n).ends.nonzero()[0] == range(k)).all()
            whole = collc.verify(servers.push(k) >> servers.pull(k), n=n)
            assert whole.type == "partial -> replica" and whole.consistent and whole.narrow
            assert whole.sent == whole.received == Fraction(k - 1 + n - 1, k)

    def test_one_server_is_the_star(self, n):
        for one, star in ((servers.push, server.reduce), (servers.pull, server.broadcast)):
            assert one(1).program(n).digest == star.program(n).digest
            with pytest.raises(ScheduleError, match=f"{n + 1} roots need as many ranks"):
                collc.verify(one(n + 1), n=n)


@pytest.mark.parametrize(
    "text, words",
    [
        (
            "servers.push(2) >> servers.pull(3)",
            "needs 3 roots on its axis, but servers.push(2) leaves 2",
        ),
        ("servers.push(2) >> server.broadcast", "needs 1 root on its axis"),
        ("servers.push(2) >> servers.pull(2).relabel(shift=1)", "needs another root"),
        ("servers.push(2) @ (a, b) >> servers.pull(2) @ (b, a)", "needs another root on b"),
        ("servers.push(2) | servers.push(2)", "cannot begin or end at 2 roots"),
        ("servers.push(2) @ a >> ring.all_gather @ b", "stands behind `servers.push(2) @ a`"),
        ("ring.reduce_scatter @ b >> servers.pull(2) @ a", "begins at 2 roots on a"),
        ("servers.push(0)", "roots is a positive integer, not 0"),
    ],
)
def test_what_does_not_fit_several_roots(text, words):
    with pytest.raises(ScheduleError) as caught:
        parse(text)
    assert words in str(caught.value)
