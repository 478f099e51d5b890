"""Moves, steps and programs check themselves, and fold and unfold without loss."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collc.errors import ProofError, ScheduleError
from collc.language.ir import ALL, Program, Step, add, copy, ranks
from collc.language.states import KINDS, kind_between


def test_moves_broadcast():
    move = add(ranks(3)[:, None], ranks(2)[None, :], 7)
    assert move.add and isinstance(move.chunk, np.ndarray)
    assert move.chunk.tolist() == [0, 0, 1, 1, 2, 2]
    assert move.src.tolist() == [0, 1] * 3 and move.dst.tolist() == [7] * 6
    assert {a.dtype for a in (move.chunk, move.src, move.dst)} == {np.dtype(np.int64)}
    assert not copy(0, 1, 2).add
    assert copy(ALL, 0, [1, 2]).chunk is ALL and repr(ALL) == "ALL"
    pair = copy(([1, 2], 3), 0, 1)
    assert isinstance(pair.chunk, tuple) and [x.tolist() for x in pair.chunk] == [[1, 2], [3, 3]]
    assert add([], [], []).src.shape == (0,)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: add(0, 0.5, 1), "src has to be an integer or an array of integers, not 0.5"),
        (lambda: add(0, 0, "1"), "dst has to be an integer"),
        (lambda: add(None, 0, 1), "chunk has to be an integer"),
        (lambda: add(0, True, 1), "src has to be an integer"),
        (lambda: copy((0, 1, 2), 0, 1), "a chunk is an integer, ALL, or a pair"),
        (lambda: copy((0, 0.5), 0, 1), "chunk destination has to be an integer"),
        (lambda: add([0, 1], [0, 1, 2], 0), "shapes do not broadcast: src (3,), dst (), chunk (2,)"),
        (lambda: copy(0, 10**30, 1), "src has to be an integer"),
    ],
)  # fmt: skip
def test_what_is_no_send(make, words):
    with pytest.raises(ScheduleError) as caught:
        make()
    assert words in str(caught.value)


def program(kind="all_gather", n=4, *steps: Step, chunks=None):
    return Program("p", KINDS[kind], n, chunks or n, steps, "p.py")


def step(add, chunk, src, dst, **more):
    return Step(np.array(add), *(np.array(x, np.int64) for x in (chunk, src, dst)), **more)


@pytest.mark.parametrize(
    "bad, words",
    [
        (
            step([True], [0], [4], [0]),
            "rank 4 is out of range: there are ranks 0 to 3. NumPy would",
        ),
        (step([True], [0], [0], [-1]), "rank -1 is out of range"),
        (step([True], [-1], [0], [1]), "chunk -1 is out of range: there are chunks 0 to 3"),
        (step([True, True], [0, 0], [0, 2], [1, 2]), "rank 2 sends to itself. Drop the send."),
    ],
)
def test_programs_check_themselves(bad, words):
    good = step([False], [0], [0], [1], line=3)
    with pytest.raises(ProofError) as caught:
        program("all_gather", 4, good, bad)
    assert str(caught.value).startswith(f"p (n = 4), step 1: {words}")
    assert program("all_gather", 4, good).where(0) == "p (n = 4), step 0, p.py:3"


HELD = {
    "partial": [[1, 1], [1, 1]],
    "replica": [[1, 1], [1, 1]],
    "shard": [[1, 0], [0, 1]],
    "root": [[1, 1], [0, 0]],
    "outbox": [[1, 1, 0, 0], [0, 0, 1, 1]],
    "inbox": [[1, 0, 1, 0], [0, 1, 0, 1]],
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_what_is_held_before_and_after(kind):
    p = program(kind.name, 2)
    assert p.starts.astype(int).tolist() == HELD[kind.before]
    assert p.ends.astype(int).tolist() == HELD[kind.after]
    assert p.cells == (4 if kind.name == "all_to_all" else 2)
    assert kind_between(kind.before, kind.after) is kind
    assert KINDS[KINDS[kind.dual].dual] is kind


def test_several_roots_hold_a_part_each():
    two = replace(program("reduce", 3, chunks=4), roots=(2, 0))
    assert two.ends.astype(int).tolist() == [[0, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]]
    # Chunk c stays where it is when ranks are renamed, also where there are n of them.
    assert not replace(program("reduce", 2), roots=(0, 1)).turning
    for roots in ((0, 3), (0, 1, 2)):
        with pytest.raises(ProofError, match="have to be ranks 0 to 2, and to divide the chunks"):
            replace(two, roots=roots)


def test_chunks_cut_in_k():
    assert program("all_gather", 2, chunks=6).starts.astype(int).tolist() == [
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 1],
    ]
    p = program("all_to_all", 2, chunks=4)
    assert p.cells == 8
    assert p.starts[0].astype(int).tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert p.ends[0].astype(int).tolist() == [1, 1, 0, 0, 1, 1, 0, 0]


kinds = st.sampled_from(["all_gather", "all_to_all", "all_reduce"])


@given(kinds, st.integers(2, 6), st.data())
def test_orbits_fold_and_unfold(kind, n, data):
    """Any sends of rank 0, turned round: dense and folded again are the same."""
    blank = program(kind, n)
    moves = data.draw(
        st.lists(
            st.tuples(st.booleans(), st.integers(0, blank.cells - 1), st.integers(1, n - 1)),
            min_size=1, max_size=4, unique=True,
        )
    )  # fmt: skip
    verb, chunk, dst = (list(x) for x in zip(*moves))
    orbit = step(verb, chunk, [0] * len(moves), dst, orbit=True)
    dense = blank.dense(orbit)
    assert dense.size == n * len(moves)
    assert sends(dense) == sends(blank.dense(blank.folded(dense)))
    assert blank.folded(dense).orbit
    # In any order, and not when one send is missing.
    order = np.array(data.draw(st.permutations(range(dense.size))))
    mixed = step(*(x[order] for x in (dense.add, dense.chunk, dense.src, dense.dst)))
    assert sends(blank.dense(blank.folded(mixed))) == sends(dense)
    short = step(*(x[1:] for x in (dense.add, dense.chunk, dense.src, dense.dst)))
    assert sends(blank.dense(blank.folded(short))) == sends(short)
    assert len(moves) > 1 or not blank.folded(short).orbit


def sends(s: Step) -> list:
    return sorted(zip(s.add.tolist(), s.chunk.tolist(), s.src.tolist(), s.dst.tolist()))


def test_digests_see_what_is_done_and_nothing_else():
    one = step([True], [0], [1], [0], line=1)
    same = step([True], [0], [1], [0], line=9)
    a = Program("a", KINDS["reduce"], 2, 1, (one,), "a.py")
    b = Program("b", KINDS["reduce"], 2, 1, (same,), "b.py")
    assert a.digest == b.digest
    others = [
        Program("a", KINDS["reduce"], 2, 1, ()),
        Program("a", KINDS["reduce"], 2, 2, (one,)),
        Program("a", KINDS["reduce"], 3, 1, (one,)),
        Program("a", KINDS["all_reduce"], 2, 1, (one,)),
        Program("a", KINDS["reduce"], 2, 1, (step([False], [0], [1], [0]),)),
        Program("a", KINDS["reduce"], 2, 1, (one, one)),
        Program("a", KINDS["reduce"], 2, 1, (step([True, True], [0, 0], [1, 1], [0, 0]),)),
        Program("a", KINDS["reduce"], 2, 1, (one,), roots=(1,)),
    ]
    assert len({p.digest for p in [a, *others]}) == len(others) + 1
