"""From a leaf to its program; schedules that misbehave are named with step, file and line."""

import functools
import sys
from pathlib import Path

import numpy as np
import pytest

import collc
from collc import language as cl
from collc.errors import CollcError, ProofError, ScheduleError
from collc.language import ALL, add, copy, ranks
from collc.language.expand import dual, expand, most_steps, permutation, relabelled
from collc.language.library import load
from collc.schedules import doubling, pairwise, ring, server, tree

zoo = load(Path(__file__).parents[1] / "zoo.py")
HERE = Path(__file__)


def refusal(leaf, n=4, error: type[CollcError] = ScheduleError) -> str:
    with pytest.raises(error) as caught:
        expand(leaf, n)
    return str(caught.value)


def place(name: str, step: int, mark: str, n: int = 4) -> str:
    """How a message about the line that carries ``# mark`` begins."""
    lines = HERE.read_text(encoding="utf-8").splitlines()
    (line,) = [i for i, text in enumerate(lines, 1) if text.endswith(f"# {mark}")]
    return f"{name} (n = {n}), step {step}, tests/language/test_expand.py:{line}: "


@cl.all_reduce
def raises(n):
    yield add(ALL, 1, 0)
    yield add(ALL, [1, 2][n], 0)  # raises


@cl.all_reduce
def raises_deeper(n):
    yield add(ALL, 1, 0)
    np.reshape(ranks(n), (0, 7))  # deeper


@cl.all_reduce
def leaves_early(n):
    yield add(ALL, 1, 0)
    sys.exit(3)  # leaves


class Rude(BaseException):
    def __str__(self):
        raise ValueError


@cl.all_reduce
def rude(n):
    yield add(ALL, 1, 0)
    raise Rude  # rude


@cl.all_reduce
def generator_exit(n):
    raise GeneratorExit  # gone
    yield


@cl.all_reduce
def noisy(n):
    raise ValueError("\x1b[31mred\nline" + "x" * 1000)  # noisy
    yield


@cl.all_reduce
def returns(n):
    yield add(ALL, ranks(n)[1:], 0)  # returns
    return copy(ALL, 0, ranks(n)[1:])


@cl.all_reduce
def crowd(n):
    yield add(ranks(10**5)[:, None], 0, ranks(10**5)[None])  # crowd


@cl.all_reduce(chunks=8 * 10**6)
def crumbs(n):
    yield add(ALL, np.full(n + 1, 1), 0)  # crumbs


@cl.all_reduce
def never_ends(n):
    while True:
        yield add(ALL, 1, 0)  # never


@cl.all_reduce
def never_ends_idly(n):
    while True:
        yield add(ALL, [], [])  # idly


@cl.all_reduce
def number(n):
    yield 3  # number


@cl.all_reduce
def nested(n):
    yield (add(ALL, 1, 0), (add(ALL, 2, 0),))  # nested


@cl.all_reduce
def nothing(n):
    yield None  # nothing


@cl.all_reduce
def floats(n):
    yield add(ALL, 1, 0)
    yield add(ALL, ranks(n) / 2, 0)  # floats


@cl.all_reduce
def shapes(n):
    yield add([0, 1], [0, 1, 2], 3)  # shapes


@cl.all_to_all
def not_a_pair(n):
    yield copy(0, 0, 1)  # single


@cl.all_to_all
def all_pairs(n):
    yield copy(ALL, 0, 1)  # all


@cl.all_gather
def pair(n):
    yield copy((0, 1), 0, 1)  # pair


@cl.all_to_all
def far_pair(n):
    yield copy((0, 4), 0, 1)  # far


@pytest.mark.parametrize(
    "leaf, step, mark, words",
    [
        (
            raises,
            1,
            "raises",
            "the schedule raised IndexError: list index out of range. Run it alone, ",
        ),
        (raises_deeper, 1, "deeper", "the schedule raised ValueError: cannot reshape array"),
        (leaves_early, 1, "leaves", "the schedule raised SystemExit: 3"),
        (rude, 1, "rude", "the schedule raised Rude: (its own text cannot be made). Run it alone"),
        (generator_exit, 0, "gone", "the schedule raised GeneratorExit. Run it alone"),
        (noisy, 0, "noisy", "the schedule raised ValueError: [31mred linexxx"),
        (returns, 1, "returns", "the schedule ends with return Move(add=False, chunk=ALL, src="),
        (
            crowd,
            0,
            "crowd",
            "10,000,000,000 sends are more than the 33,554,432 that fit in memory.",
        ),
        (crumbs, 0, "crumbs", "40,000,000 sends are more than"),
        (never_ends, 1280, "never", "still yielding after 1280 steps. A schedule has to end"),
        (never_ends_idly, 0, "idly", "still yielding after 1280 steps. A schedule has to end"),
        (number, 0, "number", "yielded 3. A step is an add(...) or copy(...), or a tuple of them."),
        (nested, 0, "nested", "yielded ("),
        (nothing, 0, "nothing", "yielded None."),
        (floats, 1, "floats", "src has to be an integer or an array of integers, not array([0. ,"),
        (shapes, 0, "shapes", "add: shapes do not broadcast: src (3,), dst (), chunk (2,)"),
        (not_a_pair, 0, "single", "the chunks of an all_to_all are (source, destination)"),
        (all_pairs, 0, "all", "ALL in an all_to_all: name the chunk as (source, destination)"),
        (pair, 0, "pair", "a pair as chunk in a all_gather: only an all_to_all has those"),
        (
            far_pair,
            0,
            "far",
            "chunk (0, 4) and its like: source and destination have to be ranks 0 to 3",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_schedules_that_misbehave(leaf, step, mark, words):
    message = refusal(leaf)
    assert message.startswith(place(f"test_expand.{leaf.steps.__name__}", step, mark) + words), (
        message
    )
    assert "\n" not in message and len(message) < 600


@cl.reduce_scatter
def far_rank(n):
    yield add(0, 1, 0)
    yield add(0, 2, n)  # far rank


@cl.reduce_scatter
def far_chunk(n):
    yield add(0, 1, 0)
    yield add(-1, 2, 0)  # far chunk


@cl.reduce_scatter
def to_itself(n):
    yield add(0, 1, 0)
    yield add(ranks(n), 2, ranks(n))  # itself


@pytest.mark.parametrize(
    "leaf, mark, words",
    [
        (
            far_rank,
            "far rank",
            "rank 4 is out of range: there are ranks 0 to 3. NumPy would wrap it",
        ),
        (far_chunk, "far chunk", "chunk -1 is out of range: there are chunks 0 to 3."),
        (to_itself, "itself", "rank 2 sends to itself. Drop the send."),
    ],
)
def test_out_of_range(leaf, mark, words):
    message = refusal(leaf, error=ProofError)
    assert message.startswith(place(f"test_expand.{leaf.steps.__name__}", 1, mark) + words), message


def test_what_is_no_generator():
    assert "the schedule returned None. Say yield before" in refusal(cl.reduce(lambda n: None))
    once = refusal(cl.reduce(lambda n: add(ALL, ranks(n)[1:], 0)))
    assert "the schedule returned Move(add=True" in once and "Say yield before each add" in once
    assert "the schedule raised TypeError" in refusal(cl.reduce(lambda: iter([])))
    listed = cl.reduce(lambda n: [add(ALL, ranks(n)[1:], 0)])
    assert collc.verify(listed, n=4).steps == 1
    assert "n is a number of ranks, at least 1, not 0" in refusal(listed, 0)


def test_chunks_that_no_memory_holds():
    message = refusal(server.shards(10**9))
    assert message.startswith(
        "server.shards(1000000000) (n = 4): 1,000,000,000 chunks on each of 4 ranks are more than"
    )


def test_what_has_no_name_of_its_own():
    def to(root, n):
        yield add(ALL, [r for r in range(n) if r != root], root)

    partial = cl.reduce(functools.partial(to, 0))
    assert str(partial) == "<leaf>" and collc.verify(partial, n=4).rounds == 3


def test_the_bound_on_steps_lets_honest_schedules_pass():
    n = 5
    long = cl.all_gather(lambda n: (copy(0, 0, 1) for _ in range(most_steps(n))))
    assert len(expand(long, n).steps) == most_steps(n)


def test_how_many_chunks_there_are():
    def chunks(leaf, n=4):
        return expand(leaf, n).chunks

    assert chunks(ring.reduce_scatter) == 4
    assert chunks(tree.reduce) == 1  # ALL only
    assert chunks(tree.double_all_reduce) == 2  # declared
    assert chunks(server.shards(3)) == 3
    assert chunks(pairwise.all_to_all) == 4 and expand(pairwise.all_to_all, 4).cells == 16
    numbered = cl.broadcast(
        lambda n: iter([copy(ALL, 0, 1), copy(0, 0, 2), copy(ranks(n)[1:], 0, 2)])
    )
    program = expand(numbered, 3)  # a number occurs: then there are n, also where ALL is said
    assert program.chunks == 3
    assert [step.size for step in program.dense_steps()] == [3, 1, 2]


def test_steps_may_be_tuples_lists_and_empty():
    mixed = cl.all_gather(
        lambda n: iter([(), [copy(0, 0, 1), copy(1, 1, 0)], (copy(0, [], []),), copy([], [], [])])
    )
    program = expand(mixed, 2)
    assert [step.size for step in program.dense_steps()] == [2]
    assert collc.verify(mixed, n=2).rounds == 1


def test_n_is_one():
    for leaf in (
        ring.reduce_scatter,
        ring.all_gather,
        tree.reduce,
        pairwise.all_to_all,
        server.reduce,
    ):
        assert expand(leaf, 1).steps == ()


# ---- relabelling and duals ----------------------------------------------------------------------


def edges(program):
    """The sends of each step as sorted (verb, chunk, src, dst)."""
    return [
        sorted(
            (("copy", "add")[a], c, s, d)
            for a, c, s, d in zip(*(x.tolist() for x in (t.add, t.chunk, t.src, t.dst)))
        )
        for t in program.dense_steps()
    ]


def test_relabelling_moves_ranks_chunks_and_root():
    names = np.array([2, 0, 1])
    moved = relabelled(expand(ring.all_gather, 3), names)
    assert edges(moved)[0] == sorted(
        ("copy", names[c], names[c], names[(c + 1) % 3]) for c in range(3)
    )
    reduce = relabelled(expand(tree.reduce, 3), names)
    assert reduce.roots == (2,)
    assert edges(reduce) == [[("add", 0, 0, 1)], [("add", 0, 1, 2)]]
    swapped = relabelled(expand(pairwise.all_to_all, 2), np.array([1, 0]))
    assert edges(swapped) == edges(expand(pairwise.all_to_all, 2))
    assert permutation(ring.all_gather.relabel(shift=1).normal.relabels, 4).tolist() == [1, 2, 3, 0]


def test_chunks_that_belong_to_no_rank_stay():
    moved = relabelled(expand(tree.double_all_reduce, 4), np.array([1, 2, 3, 0]))
    assert {chunk for step in edges(moved) for _, chunk, _, _ in step} == {0, 1}


def test_the_dual_of_a_ring():
    turned = dual(expand(ring.all_gather, 3))
    assert turned.kind.name == "reduce_scatter"
    assert edges(turned) == [
        [("add", 0, 2, 1), ("add", 1, 0, 2), ("add", 2, 1, 0)],
        [("add", 0, 1, 0), ("add", 1, 2, 1), ("add", 2, 0, 2)],
    ]
    assert turned.orbit


def test_a_copy_becomes_an_add_and_a_last_use_a_copy():
    assert edges(dual(expand(server.reduce, 3))) == [[("copy", 0, 0, 1), ("copy", 0, 0, 2)]]
    assert edges(dual(expand(server.broadcast, 3))) == [[("add", 0, 1, 0), ("add", 0, 2, 0)]]
    # Both partners still need what they sent: adds stay adds. Flipping all would be wrong.
    exchanges = expand(doubling.all_reduce, 4)
    assert {verb for step in edges(dual(exchanges)) for verb, *_ in step} == {"add"}
    # Back from r + t to r is distance n - t, and the last step comes first.
    assert edges(dual(expand(pairwise.all_to_all, 3))) == edges(expand(pairwise.all_to_all, 3))


def test_sends_that_nobody_uses_are_dropped_from_the_dual():
    wasteful = cl.broadcast(lambda n: iter([copy(ALL, 0, [1, 2]), copy(ALL, 0, 1)]))
    assert len(edges(expand(wasteful, 3))) == 2
    turned = dual(expand(wasteful, 3))
    assert sum(map(len, edges(turned))) == 2
    assert collc.verify(wasteful.reversed(), n=3).steps == 2
