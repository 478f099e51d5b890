"""Passes: what they make is proved, moves the same bytes, and has the shape that they promise."""

import pickle
import re
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import collc
from collc import language as cl
from collc.analysis import reference
from collc.analysis.passes import Coalesce, Pipeline, Relabel, Roll, Rounds
from collc.analysis.proof import prove
from collc.analysis.relative import rolled
from collc.analysis.rounds import colours
from collc.errors import ProofError, ScheduleError
from collc.language.expand import dual
from collc.language.ir import Program, Step, copy, ranks
from collc.language.library import contents, modules
from collc.language.states import KINDS
from collc.schedules import allpairs, chain, doubling, halving, pairwise, ring, server, tree

LEAVES = {
    leaf.name: leaf
    for module in modules().values()
    for leaf in vars(module).values()
    if hasattr(leaf, "leaves") and getattr(leaf, "steps", None) is not None
}
SLICED = ["tree.reduce", "tree.double_all_reduce", "chain.reduce", "binomial.reduce"]


def at_once(step: Step) -> int:
    """The most partners that a rank sends to, or receives from, in a step."""
    pairs = np.unique(np.stack([step.src, step.dst]), axis=1)
    return max(np.unique(end, return_counts=True)[1].max() for end in pairs)


def sends(program: Program) -> Counter[tuple[bool, int, int, int]]:
    """Every send of the program, whenever it happens."""
    return Counter(
        each
        for s in program.dense_steps()
        for each in zip(s.add.tolist(), s.chunk.tolist(), s.src.tolist(), s.dst.tolist())
    )


@given(st.sampled_from(sorted(LEAVES)), st.integers(1, 12), st.integers(1, 3))
def test_rounds(name, n, ports):
    """The same sends, at most ``ports`` partners at once; refused only where a step is an exchange."""
    program = LEAVES[name].program(n)
    try:
        made = Rounds(ports)(program)
    except ScheduleError as e:
        assert "Only one step can read all before it writes any" in str(e)
        assert name == "allpairs.one_shot" and n - 1 > ports
        return
    assert sends(made) == sends(program)
    assert all(at_once(step) <= ports for step in made.dense_steps())
    assert prove(made).rounds == prove(program).rounds


def test_rounds_reads_a_cell_before_it_is_written():
    """Rank 1 hands chunk 0 on in the second round, and it is written in the first: they change."""

    @cl.broadcast(chunks=2)
    def handed_on(n):
        yield copy(0, 0, 1)
        yield copy(1, 0, 3)
        yield copy(1, 3, 2), copy(0, 0, 1), copy(0, 1, 2)
        yield copy(1, 0, 1), copy(0, 2, 3)

    program = handed_on.program(4)
    assert colours(program, program.steps[2]).tolist() == [0, 0, 1]
    made = Rounds()(program)
    assert sends(made) == sends(program)
    third, fourth = made.steps[2:4]
    assert (third.src.tolist(), third.dst.tolist()) == ([1], [2])
    assert (fourth.src.tolist(), fourth.dst.tolist()) == ([3, 0], [2, 1])


def test_rounds_leaves_what_fits():
    """An exchange of two partners at once is no more than two ports can do."""
    program = allpairs.one_shot.program(3)
    assert Rounds(2)(program).digest == program.digest
    with pytest.raises(ScheduleError, match="Only one step can read all before it writes any"):
        Rounds(1)(program)


def test_the_dual_is_that_of_what_was_rewritten():
    """Passes and reversed() apply in the order in which they stand; a derivative needs the dual."""
    sliced = tree.reduce.through(Pipeline(3))
    assert str(sliced.reversed()) == "tree.reduce.through(Pipeline(3)).reversed()"
    assert sliced.reversed().reversed() == sliced != sliced.reversed()
    (leaf,), (back,) = sliced.leaves(), sliced.reversed().leaves()
    assert back.program(8).digest == dual(leaf.program(8)).digest
    assert back.facing.name == "broadcast"
    joined = halving.all_gather.through(Coalesce())
    assert collc.verify(joined.reversed(), n=3).consistent
    assert tree.reduce.reversed().through(Pipeline(3)) != sliced.reversed()
    assert str(next((tree.reduce.reversed().through(Pipeline(3))).leaves())) == (
        "tree.reduce.reversed().through(Pipeline(3))"
    )


def test_slices_of_slices():
    chain_ = ring.reduce_scatter @ "a" >> tree.all_reduce @ "b" >> ring.all_gather @ "a"
    assert chain_.through(Pipeline(2), Pipeline(3)) == chain_.through(Pipeline(6))
    assert collc.verify(chain_.through(Pipeline(1)), a=2, b=2).steps == (
        collc.verify(chain_, a=2, b=2).steps
    )
    # On one tuple of axes there is nothing to stagger, wherever the @ stands.
    for schedule in (
        ring.all_reduce.through(Pipeline(2)) @ ("a", "b"),
        (ring.all_reduce @ ("a", "b")).through(Pipeline(2)),
    ):
        with pytest.raises(ScheduleError, match="chunk c of its reduce_scatter belongs to rank c"):
            collc.verify(schedule, a=2, b=2)


@pytest.mark.parametrize(
    "stride, text", [(1, "-t"), (10, "-10t"), (11, "-11t"), (-1, "+t"), (-12, "+12t")]
)
def test_a_loop_prints_its_stride(stride, text):
    @cl.all_gather
    def strided(n):
        c = ranks(n)
        for t in range(n - 1):
            yield copy(c, (c + stride * t) % n, (c + stride * (t + 1)) % n)

    assert f"c[g{text}]" in str(Roll()(strided.program(29)))


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_coalesce_undoes_rounds(n):
    """A gather's messages are apart; those of a reduce meet in one cell, so they stay."""
    program = server.gather.program(n)
    if n > 2:
        assert sends(Coalesce()(Rounds()(program))) == sends(program)
        assert len(Coalesce()(Rounds()(program)).steps) == 1
        with pytest.raises(ScheduleError, match="every step reads or writes what"):
            Coalesce()(Rounds()(server.reduce.program(n)))


@given(st.sampled_from(SLICED), st.integers(1, 20), st.integers(2, 5), st.booleans())
def test_pipeline(name, n, k, turned):
    """T + p(k - 1) steps, less the idle ones; one message for a rank in each, and not a byte more."""
    leaf = collc.parse(name)
    program = next((leaf.reversed() if turned else leaf).leaves()).program(n)
    made, long = Pipeline(k)(program), Pipeline(30)(program)
    busiest = 0
    pairs = [np.unique(np.stack([s.src, s.dst]), axis=1) for s in program.dense_steps()]
    if pairs:
        src, dst = np.concatenate(pairs, axis=1)
        busiest = max(np.bincount(src).max(), np.bincount(dst).max())
    slice_takes = len(long.steps) - busiest * 29  # so many slices leave no step idle
    assert len(made.steps) <= slice_takes + busiest * (k - 1)
    assert slice_takes <= busiest * max(1, len(program.steps))
    assert all(at_once(step) == 1 for step in made.dense_steps())
    before, after = prove(program), prove(made)
    assert [Fraction(x) * after.chunk for x in after.sent] == [
        x * before.chunk for x in before.sent
    ]
    assert after.depth <= before.depth and after.consistent and after.narrow


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 16, 33, 64])
@pytest.mark.parametrize("k", [2, 4, 16])
def test_what_slices_cost(n, k):
    """FORMULAS: a chain n + k - 2 each way, a double tree no more than 2(2 lg n + 2k - 1)."""
    lg = (n - 1).bit_length()
    assert collc.verify(chain.all_reduce.through(Pipeline(k)), n=n).steps == 2 * (n + k - 2)
    double = collc.verify(tree.double_all_reduce.through(Pipeline(k)), n=n)
    assert double.steps == double.rounds <= 2 * (2 * lg + 2 * k - 1)
    assert double.sent == collc.verify(tree.double_all_reduce, n=n).sent <= 2


@pytest.mark.parametrize("n", range(1, 10))
def test_roll(n):
    made = rolled(ring.all_gather.program(n))
    assert made.loops == ((range(n - 1),) if n > 2 else ())
    assert made.digest == ring.all_gather.program(n).digest
    assert Roll()(ring.reduce_scatter.program(n)).loops == made.loops


def test_relabel():
    by = Relabel(order=(0, 2, 1, 3))
    assert by(ring.all_gather.program(4)).digest != ring.all_gather.program(4).digest
    assert ring.all_reduce.through(by) == ring.all_reduce.relabel(order=(0, 2, 1, 3))
    assert (
        str(ring.all_gather.through(Relabel(shift=1)).normal) == "ring.all_gather.relabel(shift=1)"
    )
    assert (str(by), repr(by)) == ("Relabel(order=(0, 2, 1, 3))",) * 2


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_a_ring_that_follows_the_hosts_leaves_each_once(hosts):
    program = Relabel.grouped(tuple(hosts))(ring.all_gather.program(len(hosts)))
    groups = len(set(hosts))
    for step in program.dense_steps():
        across = sum(hosts[s] != hosts[d] for s, d in zip(step.src.tolist(), step.dst.tolist()))
        assert across == (groups if groups > 1 else 0)


def test_what_cannot_apply_says_why():
    for by, program, why in (
        (
            Rounds(),
            allpairs.one_shot.program(3),
            "in step 0 rank 0 sends chunk 0 in several rounds",
        ),
        (Roll(), pairwise.all_to_all.program(4), "no two steps in a row send on"),
        (Roll(), tree.reduce.program(8), "its ranks do different things"),
        (Pipeline(2), ring.all_gather.program(4), "chunk c of its all_gather belongs to rank c"),
        (
            Pipeline(2),
            doubling.all_reduce.program(4),
            "in step 0 rank 0 sends chunk 0 and receives into it",
        ),
        (
            Coalesce(),
            chain.reduce.program(4),
            "every step reads or writes what",
        ),
    ):
        with pytest.raises(ScheduleError) as e:
            by(program)
        assert str(e.value).startswith(
            f"{by} cannot apply to {program.name} (n = {program.n}): {why}"
        )
    for wrong in (0, -1, 1.5, True, "2", None):
        with pytest.raises(ScheduleError, match=r"k is a positive integer, at most 4,096, not"):
            Pipeline(wrong)
        with pytest.raises(ScheduleError, match=r"ports is a positive integer, at most .*, not"):
            Rounds(wrong)
    with pytest.raises(
        ScheduleError, match=r"XLA's own collective: it has no steps for Pipeline\(2\)"
    ):
        str((collc.parse("native.all_reduce").through(Pipeline(2)) @ "x").normal)
    with pytest.raises(ScheduleError, match="through takes passes, such as Pipeline"):
        ring.all_reduce.through(4)  # type: ignore[arg-type]
    for wrong, why in (
        ({}, "takes either shift= or order="),
        ({"shift": 1, "order": (0, 1)}, "takes either shift= or order="),
        ({"shift": "x"}, "ranks and shifts are integers, not 'x'"),
        ({"order": (0, 1.5)}, "ranks and shifts are integers, not 1.5"),
        ({"order": 3}, "an order is a sequence of ranks"),
    ):
        with pytest.raises(ScheduleError, match=re.escape(why)):
            Relabel(**wrong)
    assert Relabel(order=[1, 0]) == Relabel(order=(1, 0))
    for text, why in (
        ("tree.reduce.through(Pipelin(2))", "no pass 'Pipelin'. Did you mean Pipeline?"),
        ("tree.reduce.through(Pipeline())", "missing 1 required positional argument: 'k'"),
        (
            "tree.reduce.through(4)",
            (
                "tree.reduce.through(4)",
                "passes of literals, as Pipeline(4) or Relabel(order=(1, 0))",
            ),
        ),
        ("tree.reduce.through(Pipeline(k=x))", "expected a literal"),
    ):
        with pytest.raises(ScheduleError) as e:
            collc.parse(text)
        assert str(e.value).endswith(why)


def test_the_given_program_is_proved_too():
    """What is wrong before a pass is not made right, or hidden, by it."""
    whole = chain.reduce.program(4)
    broken = Program("broken", KINDS["reduce"], 4, 1, whole.steps[1:])
    for by in (Rounds(), Coalesce(), Pipeline(2), Roll(), Relabel(shift=1)):
        with pytest.raises(ProofError, match="broken"):
            by(broken)


STAGGERED = [
    "(ring.reduce_scatter @ a >> tree.all_reduce @ b >> ring.all_gather @ a).through(Pipeline(3))",
    "(halving.reduce_scatter @ b >> server.shards(2) @ a >> pat.all_gather @ b).through(Pipeline(2))",
    "(tree.double_all_reduce @ a >> chain.all_reduce @ b).through(Pipeline(4))",
    'torus("a", "b").through(Pipeline(2))',
    "((ring.reduce_scatter @ a >> tree.all_reduce @ b).through(Pipeline(2)) >> ring.all_gather @ a)",
    'hierarchical("a", "b").reversed().through(Pipeline(2))',
]


@pytest.mark.parametrize("text", STAGGERED)
@pytest.mark.parametrize("sizes", [{"a": 2, "b": 2}, {"a": 3, "b": 2}, {"a": 2, "b": 4}])
def test_a_chain_in_slices_agrees_with_the_whole_expansion(text, sizes):
    schedule = collc.parse(text)
    certificate = collc.verify(schedule, **sizes)
    found = prove(reference.flatten(schedule, sizes))
    assert certificate.steps == found.steps
    assert certificate.sent == max(found.sent) * found.chunk
    assert certificate.received == max(found.received) * found.chunk
    assert certificate.consistent is found.consistent


@pytest.mark.parametrize("text", STAGGERED)
def test_text(text):
    schedule = collc.parse(text)
    assert collc.parse(str(schedule)) == schedule == pickle.loads(pickle.dumps(schedule))
    assert collc.parse(str(schedule.normal)) == schedule
    assert schedule.reversed().reversed() == schedule


def test_slices_are_told_apart():
    base = "(ring.reduce_scatter @ a >> tree.all_reduce @ b >> ring.all_gather @ a)"
    plain, two, three = (
        collc.parse(base + by) for by in ("", ".through(Pipeline(2))", ".through(Pipeline(3))")
    )
    beside = collc.parse(f"{base} | {base}")
    assert len({plain, two, three, beside}) == 4
    digests = {collc.verify(s, a=2, b=2).digest for s in (plain, two, three, beside)}
    assert len(digests) == 4


def test_passes_are_known_by_name():
    found = contents(modules()["tree"])
    assert found["reduce"].through(Pipeline(2), Coalesce()) == collc.parse(
        "tree.reduce.through(Pipeline(2), Coalesce())"
    )
    assert tree.reduce.through(Pipeline(k=2)) == collc.parse("tree.reduce.through(Pipeline(k=2))")
    assert str(tree.reduce.through(Rounds(ports=2))) == "tree.reduce.through(Rounds(ports=2))"


def test_bounds_and_kinds_of_arguments():
    for text in (
        "chain.all_reduce.through(Pipeline(100000000000000000000))",
        "chain.all_reduce.through(Pipeline(4097))",
        "(chain.all_reduce @ x >> tree.all_reduce @ y).through(Pipeline(4096), Pipeline(2))",
        "server.gather.through(Rounds(**{'ports': 2}))",
        "ring.rings({(0, []), 1})",
        "native.all_reduce.through(Roll())",
    ):
        with pytest.raises(ScheduleError):
            collc.parse(text)
    for n in (True, "4", None, 4.0, 0):
        with pytest.raises(ScheduleError, match="n is a number of ranks, at least 1, not"):
            tree.reduce.program(n)
    assert tree.reduce.program(np.int64(4)) is tree.reduce.program(4)
    assert collc.verify(tree.reduce, n=1).steps == 0
    with pytest.raises(ScheduleError, match="has several leaves, each with a program of its own"):
        tree.all_reduce.program(4)
    with pytest.raises(ScheduleError, match=r"takes a program, as of leaf\.program\(8\)"):
        Pipeline(2)(tree.reduce)
    with pytest.raises(ScheduleError, match="takes at least one pass"):
        tree.reduce.through()
    for labels in (3, ([1], [2])):
        with pytest.raises(ScheduleError, match="a label for each rank"):
            Relabel.grouped(labels)
    for join in (cl.then, cl.beside):
        for parts in ((), (ring.all_reduce, "x"), (1,), ([ring.all_reduce, ring.all_reduce],)):
            with pytest.raises(ScheduleError, match=r"needs at least one schedule|takes schedules"):
                join(*parts)
        assert join(ring.all_reduce) == ring.all_reduce
