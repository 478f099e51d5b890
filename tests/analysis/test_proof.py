"""What is refused, in which words, and what is found of what is proved."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import collc
from collc.analysis import cache, proof
from collc.analysis.certificate import Certificate
from collc.analysis.proof import prove
from collc.analysis.rounds import rounds
from collc.errors import MeshError, ProofError, ScheduleError
from collc.language import ALL, add, copy, ranks
from collc.language import all_gather as all_gather_leaf
from collc.language import all_reduce as all_reduce_leaf
from collc.language import all_to_all as all_to_all_leaf
from collc.language import reduce as reduce_leaf
from collc.language import reduce_scatter as reduce_scatter_leaf
from collc.language.algebra import Leaf
from collc.language.expand import expand
from collc.language.ir import Program
from collc.language.library import contents, load, modules
from collc.language.parse import parse
from collc.schedules import allpairs, doubling, pairwise, ring, server, tree

zoo = load(Path(__file__).parents[1] / "zoo.py")
HERE = Path(__file__)
SIZES = range(1, 10)


def library() -> dict[str, Leaf]:
    found = [
        value
        for module in (*modules().values(), zoo)
        for value in contents(module).values()
        if isinstance(value, Leaf) and not value.native
    ]
    found += [server.shards(k) for k in (1, 2, 3, 8)]
    return {str(leaf): leaf for s in found for leaf in (s, *s.reversed().leaves())}


def refusal(leaf, n, error=ProofError) -> str:
    with pytest.raises(error) as caught:
        collc.verify(leaf, n=n)
    return str(caught.value)


def line_of(text: str) -> int:
    """The line of this file that holds the text, for messages that point to it."""
    lines = HERE.read_text(encoding="utf-8").splitlines()
    (found,) = [i for i, line in enumerate(lines, 1) if text in line and "line_of" not in line]
    return found


# ---- refusals -----------------------------------------------------------------------------------


def test_a_chunk_that_is_not_held():
    @all_gather_leaf
    def gap(n):
        yield copy(0, 0, 1)
        yield copy(1, 2, 0)  # rank 2 has no chunk 1

    message = refusal(gap, 3)
    where = f"gap (n = 3), step 1, tests/analysis/test_proof.py:{line_of('no chunk 1')}"
    assert message.startswith(
        f"{where}: rank 2 sends chunk 1, which it does not hold. Send it only"
    )
    # The steps about it, the culprit marked.
    assert message.splitlines()[1:] == ["     0  copy c[0]  0 -> 1", ">    1  copy c[1]  2 -> 0"]


def test_copies_that_race():
    @reduce_scatter_leaf
    def race(n):
        yield copy(0, 1, 0), add(0, 2, 0)

    message = refusal(race, 3)
    assert "step 0" in message
    assert "two writes race for chunk 0 at rank 0, one of them a copy. Put them in" in message
    both = all_gather_leaf(lambda n: iter([copy(1, ranks(n)[1:], 0)]))
    assert "rank 2 sends chunk 1, which it does not hold" in refusal(both, 3)


def test_an_addend_counted_twice():
    @all_reduce_leaf
    def twice(n):
        yield add(ALL, 1, 0)
        yield add(ALL, 0, 1)

    message = refusal(twice, 2)
    assert (
        "rank 1 adds chunk 0 from rank 0, but the addend of rank 1 would be counted twice"
        in message
    )
    assert "Drop the send, or copy instead." in message


def test_a_send_doubled_in_one_step():
    @reduce_leaf
    def doubled(n):
        yield add(ALL, [1, 1], 0)

    assert "the addend of rank 1 would be counted twice" in refusal(doubled, 2)


def test_an_addend_that_is_missing():
    @reduce_leaf
    def short(n):
        yield add(ALL, 1, 0)

    message = refusal(short, 4)
    assert "short (n = 4), step 0" in message
    assert "at the end chunk 0 at rank 0 lacks the addend of rank 2, 3." in message
    assert "A reduce has to leave root: the root of every chunk holds it, finished." in message


def test_a_chunk_that_ends_in_the_wrong_place():
    @all_gather_leaf
    def astray(n):
        yield copy(0, 0, 1)

    message = refusal(astray, 3)
    assert "at the end rank 0 does not hold chunk 1 (it is complete at rank 1)" in message
    assert "every rank holds every chunk" in message


def test_an_end_state_that_is_not_the_declared_one():
    @reduce_scatter_leaf
    def off_by_one(n):
        """As the ring, but chunk c comes home to rank c + 1."""
        c = ranks(n)
        for t in range(1, n):
            yield add(c, (c + t + 1) % n, (c + t + 2) % n)

    assert "chunk 0 at rank 0 lacks the addend of rank" in refusal(off_by_one, 3)
    assert "(it is complete at rank 1)" in refusal(off_by_one, 3)


def test_an_add_to_nothing():
    @all_gather_leaf
    def nothing(n):
        yield add(0, 0, 1)

    message = refusal(nothing, 2)
    assert (
        "rank 1 adds chunk 0 from rank 0 to nothing: it does not hold the chunk. Use copy."
        in message
    )


def test_an_all_to_all_that_delivers_to_the_wrong_rank():
    @all_to_all_leaf
    def turned(n):
        yield copy((0, 1), 0, 2), copy((1, 2), 1, 2)

    message = refusal(turned, 3)
    assert "at the end rank 0 does not hold chunk (1, 0) (it is complete at rank 1)" in message
    assert "An all_to_all has to leave inbox: rank r holds the chunks (., r)." in message


def test_ranks_and_chunks_out_of_range():
    def sends(*moves):
        return reduce_scatter_leaf(lambda n: iter(moves))

    for move, what in [
        (add(0, 0, 3), "rank 3 is out of range: there are ranks 0 to 2"),
        (add(0, -1, 0), "rank -1 is out of range: there are ranks 0 to 2"),
        (add(3, 1, 0), "chunk 3 is out of range: there are chunks 0 to 2"),
        (add([0, 0], [1, 2], [0, 2]), "rank 2 sends to itself. Drop the send."),
    ]:
        message = refusal(sends(add(0, 1, 2), move), 3)
        assert what in message
        assert "(n = 3), step 1" in message


def test_a_placed_leaf_is_named_in_full():
    broken = reduce_leaf(lambda n: iter([add(ALL, 1, 0)]))
    with pytest.raises(ProofError, match=r"@ gpu: .*lacks the addend of rank 2"):
        collc.verify(broken @ "gpu", gpu=3)


def test_no_steps_at_all():
    idle = reduce_leaf(lambda n: iter([]))
    assert "no steps" in refusal(idle, 2)
    assert collc.verify(idle, n=1).steps == 0


def test_sizes_of_axes():
    with pytest.raises(MeshError, match="Did you mean gpu"):
        collc.verify(ring.all_reduce @ "gpus", gpu=4)
    for bad in (0, -1, 2.0, True, "4"):
        with pytest.raises(MeshError, match="positive integer"):
            collc.verify(ring.all_reduce @ "gpu", gpu=bad)
    with pytest.raises(MeshError, match="not placed"):
        collc.verify(ring.all_reduce, gpu=4, host=2)
    with pytest.raises(MeshError, match="n= has no meaning"):
        collc.verify(ring.all_reduce @ "gpu", n=4)
    # An axis that the schedule does not name is a batch dimension.
    assert collc.verify(ring.all_reduce @ "gpu", host=3, gpu=4).sizes == (("gpu", 4),)


def test_a_certificate_cannot_be_forged():
    real = collc.verify(ring.all_reduce, n=4)
    with pytest.raises(ProofError, match=r"comes from collc\.verify alone"):
        Certificate(**{**vars(real), "token": None})


# ---- what is found ------------------------------------------------------------------------------


def slow(program: Program):
    """Proof by Python sets, send by send: addends, terms and depths; and the counts."""
    partial = program.kind.before == "partial"
    held = {
        (r, c): (frozenset([r if partial else 0]), r if partial else "it", 0)
        for r in range(program.n)
        for c in range(program.cells)
        if program.starts[r, c]
    }
    n_rounds, sent, received = 0, [0] * program.n, [0] * program.n
    for t, step in enumerate(program.dense_steps()):
        before = dict(held)
        mine = [r.sends for r in rounds(replace(program, steps=(step,)))]
        n_rounds += len(mine)
        for sends in mine:
            columns = (sends.add, sends.chunk, sends.src, sends.dst)
            for is_add, c, s, d in zip(*(x.tolist() for x in columns)):
                sent[s] += 1
                received[d] += 1
                addends, term, depth = before[s, c]
                if not is_add:
                    held[d, c] = before[s, c]
                    continue
                own, own_term, own_depth = held[d, c]
                assert not own & addends, t
                held[d, c] = (own | addends, frozenset([own_term, term]), max(own_depth, depth) + 1)
    ends = [(int(r), int(c)) for r, c in zip(*np.nonzero(program.ends))]
    whole = frozenset(range(program.n)) if partial else frozenset([0])
    assert all(held[cell][0] == whole for cell in ends)
    terms: dict[int, set] = {}
    for r, c in ends:
        terms.setdefault(c, set()).add(held[r, c][1])
    return {
        "steps": len(program.steps),
        "rounds": n_rounds,
        "sent": tuple(sent),
        "received": tuple(received),
        "depth": max((held[cell][2] for cell in ends), default=0),
        "consistent": all(len(found) == 1 for found in terms.values()),
    }


@pytest.mark.parametrize("name", library())
def test_the_proof_finds_what_brute_force_finds(name):
    leaf = library()[name]
    for n in SIZES:
        program = expand(leaf, n)
        found, want = prove(program), slow(program)
        assert {key: getattr(found, key) for key in want} == want, n
        assert found.chunk == Fraction(1, program.chunks)


@pytest.mark.parametrize("name", library())
def test_one_orbit_proves_what_all_chunks_prove(name, monkeypatch):
    leaf = library()[name]
    for n in SIZES:
        program = expand(leaf, n)
        unfolded = replace(program, steps=tuple(program.dense_steps()))
        assert not unfolded.orbit or not unfolded.steps
        assert prove(program) == prove(unfolded)
        monkeypatch.setattr(proof, "BLOCK_BYTES", 1)  # chunk by chunk
        assert prove(unfolded) == prove(program)
        monkeypatch.undo()


def test_rings_and_pairwise_are_orbits():
    for leaf in (
        ring.reduce_scatter,
        ring.all_gather,
        pairwise.all_to_all,
        allpairs.reduce_scatter,
    ):
        assert expand(leaf, 6).orbit
    assert not expand(tree.reduce, 6).orbit


@pytest.mark.parametrize("block_bytes", [1, 64, 200])
def test_a_refusal_in_a_late_block_says_the_same(block_bytes, monkeypatch):
    @all_gather_leaf
    def late(n):
        """Only the last chunk does not come round."""
        c = ranks(n)
        for t in range(n - 1):
            here = c[:-1] if t == n - 2 else c
            yield copy(here, (here + t) % n, (here + t + 1) % n)

    whole = refusal(late, 4)
    monkeypatch.setattr(proof, "BLOCK_BYTES", block_bytes)
    assert refusal(late, 4) == whole


@settings(max_examples=40)
@given(st.sampled_from([65, 70, 128, 130]), st.data())
def test_masks_of_several_words(n, data):
    """More ranks than bits in a word: what is missing is still named."""
    gone = data.draw(st.integers(1, n - 1))
    rest = [r for r in range(1, n) if r != gone]
    leaf = reduce_leaf(lambda n: iter([add(ALL, rest, 0)]))
    assert f"lacks the addend of rank {gone}." in refusal(leaf, n)
    assert collc.verify(server.reduce, n=n).depth == n - 1


def test_who_ends_with_the_same_bits():
    def found(schedule, n):
        certificate = collc.verify(schedule, n=n)
        return certificate.consistent, certificate.narrow

    for n in SIZES:
        for schedule in (ring.all_reduce, tree.all_reduce, tree.double_all_reduce, server.star):
            assert found(schedule, n) == (True, True), (schedule, n)
        # Everyone adds up in an order of its own; two addends have but one, up to commutativity.
        assert found(allpairs.one_shot, n)[0] is (n <= 2)
        # Pairs exchange partial sums: the same tree at all, but not with the casts of a narrow wire.
        assert found(doubling.all_reduce, n) == (True, n == 1)
    assert found(allpairs.one_shot, 2) == (True, False)


def test_a_composite_is_as_consistent_as_the_leaf_that_ends_it():
    inside = ring.reduce_scatter @ "gpu"
    back = ring.all_gather @ "gpu"
    for between, consistent in (
        (allpairs.one_shot, False),
        (doubling.all_reduce, True),
        (tree.all_reduce, True),
    ):
        certificate = collc.verify(inside >> between @ "host" >> back, host=4, gpu=2)
        assert certificate.consistent is consistent
    # What one rank has decided and the others copy is the same everywhere.
    assert collc.verify(tree.reduce >> tree.broadcast, n=5).narrow


@pytest.mark.parametrize(
    "schedule, n, depth",
    [
        (ring.all_reduce, 8, 7),
        (ring.all_gather, 8, 0),
        (server.reduce, 8, 7),
        (tree.reduce, 8, 5),
        (doubling.all_reduce, 8, 3),
        (pairwise.all_to_all, 8, 0),
    ],
)
def test_depth_is_the_longest_chain_of_additions(schedule, n, depth):
    assert collc.verify(schedule, n=n).depth == depth


def test_native_leaves_are_trusted_and_say_so():
    mixed = parse("ring.reduce_scatter @ gpu >> native.all_reduce @ host >> ring.all_gather @ gpu")
    certificate = collc.verify(mixed, host=2, gpu=4)
    assert certificate.trusted == ("native.all_reduce",)
    assert (certificate.rounds, certificate.steps) == (6, 7)
    assert certificate.sent is certificate.consistent is certificate.depth is None
    assert str(certificate).endswith("7 steps, 6 rounds, trusted: native.all_reduce")
    with pytest.raises(ScheduleError, match="XLA's own"):
        expand(next(parse("native.all_reduce").leaves()), 4)


def test_the_certificate_of_a_composite():
    certificate = collc.verify(parse('hierarchical("host", "gpu")'), host=4, gpu=4)
    assert str(certificate) == (
        'hierarchical("host", "gpu")  : partial,partial -> replica,replica\n'
        "  host=4 gpu=4   10 steps, 12 rounds, at most 2 S sent by a rank"
    )
    assert certificate.bound and certificate.bound.sent == Fraction(15, 8)
    assert certificate.gap == Fraction(16, 15)


def test_large_meshes_cost_what_their_leaves_cost():
    """Only the counts; benchmarks/proof_scale.py has the times and the memory."""
    n = 1024
    certificate = collc.verify(ring.all_reduce, n=n)
    assert (certificate.steps, certificate.rounds) == (2 * (n - 1), 2 * (n - 1))
    assert certificate.sent == Fraction(2 * (n - 1), n) and certificate.gap == 1
    composite = collc.verify(parse('hierarchical("host", "gpu")'), host=512, gpu=8)
    assert composite.rounds == 2 * 7 + 4 * 9 - 2
    assert composite.consistent and composite.depth


# ---- the cache ----------------------------------------------------------------------------------


def test_proofs_are_kept_and_damaged_ones_are_not_believed(tmp_path, monkeypatch):
    monkeypatch.setenv("COLLC_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "SMALL", 0)
    program = expand(ring.all_gather, 7)

    def once(program, calls=[]):  # noqa: B006
        calls.append(program)
        assert len(calls) == 1
        return prove(program)

    for _ in range(2):
        monkeypatch.setattr(cache, "_memory", {})  # as another process
        assert cache.proof(program, once) == prove(program)
    (kept,) = tmp_path.rglob("*.json")
    for damage in ("", "{}", "[]", '{"steps": 1', "null"):
        kept.write_text(damage)
        monkeypatch.setattr(cache, "_memory", {})
        assert cache.proof(program, prove) == prove(program)


def test_a_changed_program_has_another_digest():
    assert expand(ring.all_gather, 4).digest != expand(ring.all_gather, 5).digest
    (shifted,) = ring.all_gather.relabel(shift=1).leaves()
    assert expand(ring.all_gather, 4).digest == expand(shifted, 4).digest
    plain = collc.verify(ring.all_gather, n=4)
    assert plain.digest != collc.verify(ring.all_gather.relabel(shift=1), n=4).digest
