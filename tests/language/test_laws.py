"""The laws of the language, over random expressions."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import collc
from collc.analysis.proof import prove
from collc.analysis.reference import flat_cells, flatten, run
from collc.language.algebra import Beside, Leaf, Placed, Relabelled, Reversed, Schedule, Then
from collc.language.expand import dual, expand, permutation, relabelled
from collc.language.library import load

random = load(Path(__file__).parents[1] / "strategies.py")
AXES = ["x", "y", "z"]
small = st.integers(1, 6)


@pytest.fixture(autouse=True, scope="module")
def zoo_known():
    with random.zoo_known():
        yield


@st.composite
def meshes(draw, most=3):
    count = draw(st.integers(1, most))
    return {a: draw(st.integers(1, 3)) for a in draw(st.permutations(AXES))[:count]}


@st.composite
def on_meshes(draw, native=False, kinds=random.kinds):
    """A placed schedule and the mesh that it is for."""
    mesh = draw(meshes())
    s = draw(random.placed(draw(kinds), list(mesh), native=native))
    assume(flat_cells(s, mesh) <= 1 << 12)
    return s, mesh


@st.composite
def chains(draw, count=3):
    """Schedules that fit one behind the other."""
    kinds = draw(
        st.sampled_from(
            [
                ["reduce_scatter", "gather", "broadcast"],
                ["reduce", "scatter", "all_gather"],
                ["reduce", "scatter", "gather"],
                ["scatter", "gather", "broadcast"],
                ["gather", "scatter", "all_gather"],
            ]
        )
    )
    # Together on one axis, or each on its own axes: then any three are a chain.
    if draw(st.booleans()):
        return [draw(random.unplaced(k, 1, native=True)) for k in kinds]
    return [draw(random.placed(draw(random.kinds), [a], 1, native=True)) for a in AXES]


@given(chains())
def test_then_is_associative(chain):
    a, b, c = chain
    assert (a >> b) >> c == a >> (b >> c)
    assert hash((a >> b) >> c) == hash(a >> (b >> c))
    assert str(((a >> b) >> c).normal) == str((a >> (b >> c)).normal)


@given(st.data(), random.kinds)
def test_beside_is_associative(data, kind):
    a, b, c = (data.draw(random.unplaced(kind, native=True)) for _ in range(3))
    assert (a | b) | c == a | (b | c) == random.beside([a, b, c])
    assert hash((a | b) | c) == hash(a | (b | c))


@given(st.data(), random.kinds)
def test_placing_distributes(data, kind):
    a, b = (data.draw(random.unplaced(kind, native=True)) for _ in range(2))
    assert (a | b) @ "x" == a @ "x" | b @ "x"
    assert (a | b) @ ("y", "x") == a @ ("y", "x") | b @ ("y", "x")
    assert (a | b).relabel(shift=2) == a.relabel(shift=2) | b.relabel(shift=2)
    assert (a | b).reversed() == a.reversed() | b.reversed()
    assert a @ "x" != a @ "y"


@given(st.data(), chains())
def test_then_and_beside_interchange(data, chain):
    first, second, _ = chain
    assume(single(first) and single(second))
    arity = data.draw(st.integers(2, 3))
    tops, bottoms = [first] * arity, [second] * arity
    together = random.beside(tops) >> random.beside(bottoms)
    apart = random.beside([a >> b for a, b in zip(tops, bottoms)])
    assert together == apart
    assert hash(together) == hash(apart)


def single(s):
    """Not itself parts side by side: | is n-ary and flat, so that it would count as several."""
    return not isinstance(s.normal, Beside)


@pytest.mark.newest_only
@given(st.data())
@settings(max_examples=50)
def test_then_and_beside_interchange_for_different_parts(data):
    a, b = (data.draw(random.unplaced("reduce_scatter", native=True)) for _ in range(2))
    c, d = (data.draw(random.unplaced("all_gather", native=True)) for _ in range(2))
    assume(all(map(single, (a, b, c, d))))
    assert (a | b) >> (c | d) == (a >> c) | (b >> d)


@given(st.data(), random.kinds)
def test_the_duals_dual_is_equal(data, kind):
    s = data.draw(random.unplaced(kind, native=True))
    assert s.reversed().reversed() == s
    assert (s @ "x").reversed() == s.reversed() @ "x"
    before, after = s.type.before, s.type.after
    turned = s.reversed().type.signature()
    assert {a: (p, q) for a, (p, q) in turned.items()} == {
        a: (random_dual(after[a][0], before[a][0])) for a in before
    }


def random_dual(after: str, before: str) -> tuple[str, str]:
    """Going back, a sum is wanted where there were replicas, and replicas where there was a sum."""
    turn = {"partial": "replica", "replica": "partial", "outbox": "inbox", "inbox": "outbox"}
    return turn.get(after, after), turn.get(before, before)


@given(st.data(), random.kinds, small)
@settings(max_examples=150)
def test_the_dual_of_a_leaf_is_proved_and_is_its_transpose(data, kind, n):
    for leaf in data.draw(random.unplaced(kind, 1)).leaves():
        program = expand(leaf, n)
        turned = dual(program)
        prove(turned)
        prove(dual(turned))
        assert_transposes(program, turned)
        assert_transposes(turned, dual(turned))


def assert_transposes(program, turned):
    """<y, A x> = <A' y, x> for random integers, where A is what the program does."""
    generator = np.random.default_rng(7)
    x, y = (generator.integers(-99, 99, (program.n, program.cells)) for _ in range(2))
    across = np.arange(program.cells)
    if program.kind.name == "all_to_all":
        across = across.reshape(program.n, program.n).T.reshape(-1)
    np.testing.assert_array_equal(turned.starts[:, across], program.ends)
    np.testing.assert_array_equal(turned.ends[:, across], program.starts)
    forward = (y * run(program, x))[program.ends].sum()
    back = (run(turned, y[:, across])[:, across] * x)[program.starts].sum()
    assert forward == back


@given(st.data(), random.kinds, small)
def test_a_relabelled_leaf_is_proved(data, kind, n):
    """So a proof of the leaf serves all its relabellings."""
    for leaf in data.draw(random.unplaced(kind, 1)).leaves():
        program = expand(leaf, n)
        names = np.array(data.draw(st.permutations(range(n))))
        before, after = prove(program), prove(relabelled(program, names))
        assert (before.steps, before.rounds, before.depth) == (
            after.steps,
            after.rounds,
            after.depth,
        )
        assert before.consistent == after.consistent
        assert [after.sent[r] for r in names] == list(before.sent)


@pytest.mark.newest_only
@given(st.data(), random.kinds)
@settings(max_examples=60)
def test_printed_text_is_read_back(data, kind):
    for s in (
        data.draw(random.unplaced(kind, native=True)),
        data.draw(random.placed(kind, AXES[: data.draw(st.integers(1, 3))], native=True)),
    ):
        assert collc.parse(str(s)) == s
        assert str(collc.parse(str(s))) == str(s)
        assert collc.parse(str(s.normal)) == s
        assert repr(s) == f"<{s}>"
        assert list(walk(collc.parse(str(s)))) == list(walk(s))


def walk(s: Schedule):
    """The form as it was written, which printing keeps: only a name hides what is below it."""
    yield type(s)
    if s.name and not isinstance(s, Leaf):
        return
    match s:
        case Then(parts=parts) | Beside(parts=parts):
            for part in parts:
                yield from walk(part)
        case Placed(inner=inner) | Relabelled(inner=inner) | Reversed(inner=inner):
            yield from walk(inner)


@pytest.mark.newest_only
@given(on_meshes())
@settings(max_examples=100)
def test_the_proof_by_type_agrees_with_exhaustive_expansion(case):
    s, mesh = case
    certificate = collc.verify(s, **mesh)
    program = flatten(s, mesh)
    proof = prove(program)
    assert proof.steps == certificate.steps
    assert proof.rounds <= certificate.rounds  # the parts of | may share a round
    busiest = max(proof.sent) * proof.chunk, max(proof.received) * proof.chunk
    rooted = any(k in random.ROOTED for k in kinds_of(s)) and len(mesh) > 1
    if rooted:  # only the root's lanes are flattened, but all run
        assert busiest <= (certificate.sent, certificate.received)
    else:
        assert busiest == (certificate.sent, certificate.received)
    assert proof.depth <= certificate.depth
    # A composite is called consistent only if its flat program is.
    assert proof.consistent or not certificate.consistent
    assert proof.narrow or not certificate.narrow


def kinds_of(s):
    return {leaf.facing.name for leaf in s.leaves()}


@given(on_meshes())
@settings(max_examples=60)
def test_every_schedule_does_what_its_collective_means(case):
    """However it is put together and relabelled: it is a drop-in."""
    s, mesh = case
    program = flatten(s, mesh)
    n = program.n
    data = np.random.default_rng(3).integers(0, 1 << 40, (n, program.cells))
    out = run(program, data)
    want = meaning(program, data)
    np.testing.assert_array_equal(out[program.ends], want[program.ends])


def meaning(program, data):
    """What the kind of a flat program says of its cells."""
    match program.kind.name:
        case "all_reduce" | "reduce" | "reduce_scatter":
            return np.broadcast_to(data.sum(0), data.shape)
    whole = np.where(program.starts, data, 0).sum(0)
    return np.broadcast_to(whole, data.shape)


@given(st.integers(1, 7), st.permutations(range(7)))
def test_orders_compose(n, order):
    order = tuple(r for r in order if r < n)
    s = random.lookup("allpairs.one_shot").relabel(shift=1).relabel(order=order)
    (leaf,) = s.leaves()
    want = [order[(r + 1) % n] for r in range(n)]
    assert permutation(leaf.relabels, n).tolist() == want
