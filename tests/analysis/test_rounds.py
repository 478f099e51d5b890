"""Rounds are partial permutations, and as few as the busiest rank has partners."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collc.analysis.rounds import colouring, colours, rounds
from collc.language.expand import expand
from collc.language.ir import Program, Step, ranks
from collc.language.parse import parse
from collc.language.states import KINDS

pairs = st.integers(2, 9).flatmap(
    lambda n: st.tuples(
        st.just(n),
        st.lists(
            st.tuples(st.integers(0, n - 1), st.integers(0, n - 1), st.integers(0, 3)), max_size=60
        ),
    )
)


def one_step(n: int, sends: list[tuple[int, int, int]]) -> Program:
    s, d, c = np.array(sends, np.int64).reshape(-1, 3).T
    step = Step(np.ones(len(s), bool), c, s, d)
    return Program("random", KINDS["all_reduce"], n, 4, (step,))


def degree(src: np.ndarray, dst: np.ndarray) -> int:
    """The most partners that a rank has on one side; several chunks for one partner count once."""
    edges = np.array(sorted(set(zip(src.tolist(), dst.tolist()))), np.int64).reshape(-1, 2)
    return max((int(np.bincount(side).max()) for side in edges.T if len(side)), default=0)


def assert_proper(src, dst, colour):
    for k in range(int(colour.max(initial=-1)) + 1):
        edges = set(zip(src[colour == k].tolist(), dst[colour == k].tolist()))
        assert edges
        assert len({s for s, _ in edges}) == len({d for _, d in edges}) == len(edges)


@given(pairs)
def test_colours_are_proper_and_as_few_as_the_degree(case):
    n, sends = case
    program = one_step(n, [x for x in sends if x[0] != x[1]])
    (step,) = program.steps
    colour = colours(program, step)
    assert_proper(step.src, step.dst, colour)
    assert int(colour.max(initial=-1)) + 1 == degree(step.src, step.dst) == len(rounds(program))
    # Equal pairs travel in one message.
    by_pair = {}
    for pair in zip(step.src.tolist(), step.dst.tolist(), colour.tolist()):
        assert by_pair.setdefault(pair[:2], pair[2]) == pair[2]


@given(st.sets(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=200), st.randoms())
def test_any_simplecolouring_graph(edges, random):
    edges = sorted(edges)
    random.shuffle(edges)
    s, d = np.array(edges, np.int64).reshape(-1, 2).T
    colour = colouring(s, d)
    assert_proper(s, d, colour)
    assert int(colour.max(initial=-1)) + 1 == degree(s, d)


@given(pairs)
def test_rounds_hold_the_steps_sends(case):
    n, sends = case
    program = one_step(n, [x for x in sends if x[0] != x[1]])
    found = [send for r in rounds(program) for send in zip(r.sends.src, r.sends.dst, r.sends.chunk)]
    (step,) = program.steps
    assert sorted(found) == sorted(zip(step.src, step.dst, step.chunk))
    assert all(r.step == 0 for r in rounds(program))


@pytest.mark.parametrize("name", ["ring.reduce_scatter", "pairwise.all_to_all"])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_an_orbit_has_the_rounds_of_its_dense_form(name, n):
    program = expand(next(parse(name).leaves()), n)
    assert n == 1 or program.orbit
    dense = [program.dense(step) for step in program.steps]
    assert len(rounds(program)) == sum(int(colours(program, s).max()) + 1 for s in dense) == n - 1
    for step in dense:
        assert_proper(step.src, step.dst, colours(program, step))


def test_a_star_takes_turns_in_the_order_of_the_source():
    program = expand(next(parse("server.reduce").leaves()), 5)
    assert colours(program, program.steps[0]).tolist() == [0, 1, 2, 3]
    assert [r.sends.src.tolist() for r in rounds(program)] == [[1], [2], [3], [4]]


def test_servers_that_take_turns_are_all_busy():
    """Each round of a push to n servers is a full permutation."""
    n = 5
    program = expand(next(parse(f"server.shards({n})").leaves()), n)
    for sends in (program.dense(r.sends) for r in rounds(program)):
        assert sorted(sends.src) == sorted(sends.dst) == ranks(n).tolist()
    assert len(rounds(program)) == 2 * (n - 1)
