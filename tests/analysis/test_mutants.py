"""Every mutant of every small program is refused, or does what the collective means all the same."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from collc.analysis.proof import prove
from collc.analysis.reference import flatten, run
from collc.errors import ProofError
from collc.language.algebra import Leaf
from collc.language.expand import expand
from collc.language.ir import Program, Step
from collc.language.library import contents, load, modules
from collc.language.parse import parse

zoo = load(Path(__file__).parents[1] / "zoo.py")
COMPOSITES = [
    ('hierarchical("host", "gpu")', {"host": 2, "gpu": 2}),
    ('pairwise.two_level("host", "gpu")', {"host": 2, "gpu": 2}),
    ("(ring.reduce_scatter | ring.reduce_scatter.relabel(shift=1)) @ gpu", {"gpu": 3}),
    ("servers.push(2) >> servers.pull(2)", {"": 4}),
    ("servers.push(3).relabel(shift=1) @ (host, gpu)", {"host": 2, "gpu": 3}),
    ("servers.pull(2) @ host >> tree.broadcast @ gpu", {"host": 3, "gpu": 2}),
]


def leaves() -> dict[str, Leaf]:
    """All leaves of the library and of the zoo, with the dual of each, and servers for k = 1 to 3."""
    found = []
    for module in (*modules().values(), zoo):
        for value in contents(module).values():
            if isinstance(value, Leaf) and not value.native:
                found += [value, value.reversed()]
    found += [modules()["server"].shards(k) for k in (1, 2, 3)]
    found += [half(2) for half in (modules()["servers"].push, modules()["servers"].pull)]
    return {str(s.normal): leaf for s in found for leaf in s.leaves()}


def mutants(program: Program) -> Iterator[tuple[str, tuple[Step, ...]]]:
    """What was done, and the steps after it: each send dropped, doubled, flipped, redirected..."""
    steps = tuple(program.dense_steps())
    for t, step in enumerate(steps):
        columns = step.add, step.chunk, step.src, step.dst

        def within(*changed: np.ndarray, t: int = t) -> tuple[Step, ...]:
            return (*steps[:t], Step(*changed), *steps[t + 1 :])

        for i in range(step.size):
            keep = np.arange(step.size) != i
            yield "drop", within(*(c[keep] for c in columns))
            yield "double", within(*(np.append(c, c[i]) for c in columns))
            for which, name, values in (
                (0, "flip", [not step.add[i]]),
                (1, "rechunk", range(program.cells)),
                (2, "resource", range(program.n)),
                (3, "redirect", range(program.n)),
            ):
                for value in values:
                    if value != columns[which][i]:
                        changed = columns[which].copy()
                        changed[i] = value
                        yield name, within(*columns[:which], changed, *columns[which + 1 :])


def meaning(program: Program, data: np.ndarray) -> np.ndarray:
    """What the collective has every cell be, [n, cells], worked out without any program."""
    if program.kind.before != "partial":
        data = np.where(program.starts, data, 0)
    return np.broadcast_to(data.sum(axis=0), data.shape)


def judge(program: Program) -> Counter[str]:
    """Counts of refused and equivalent mutants, by what was done. Fails where one slips through."""
    # Random 64-bit numbers: two different sums of them differ, but for a chance of 2 ** -64.
    data = np.random.default_rng(program.n).integers(
        0, 1 << 64, (program.n, program.cells), np.uint64, endpoint=False
    )
    want = meaning(program, data)[program.ends]
    np.testing.assert_array_equal(run(program, data)[program.ends], want)
    counts: Counter[str] = Counter()
    for what, steps in mutants(program):
        counts["all"] += 1
        try:
            mutant = replace(program, steps=steps)
            prove(mutant)
        except ProofError:
            counts[f"{what} refused"] += 1
            continue
        got = run(mutant, data)[program.ends]
        assert (got == want).all(), f"{program.name} n={program.n}: {what} slipped through\n{steps}"
        counts[f"{what} equivalent"] += 1
    return counts


@pytest.mark.newest_only
@pytest.mark.parametrize("name", leaves())
def test_no_mutant_of_a_leaf_slips_through(name):
    leaf = leaves()[name]
    total: Counter[str] = Counter()
    for n in range(2, 7):
        total += judge(expand(leaf, n))
    assert total["all"] >= 100
    # There is nothing idle in these programs: without one of its sends, none does its work.
    assert total["drop refused"] and not total["drop equivalent"]
    assert total["double refused"] and not total["double equivalent"]
    refused = sum(count for what, count in total.items() if what.endswith("refused"))
    assert refused >= 0.8 * total["all"], total


@pytest.mark.parametrize("text, mesh", COMPOSITES)
def test_no_mutant_of_a_composite_slips_through(text, mesh):
    total = judge(flatten(parse(text), mesh))
    assert total["all"] >= 100
    assert not total["drop equivalent"] and not total["double equivalent"]


def test_the_judge_notices():
    """A program that is wrong from the start does not pass as its own mutant."""
    program = expand(modules()["allpairs"].one_shot, 3)
    short = replace(program, steps=(program.dense(program.steps[0]),))
    short = replace(short, steps=(replace(short.steps[0], **first_but_one(short.steps[0])),))
    with pytest.raises(AssertionError):
        judge(short)


def first_but_one(step: Step) -> dict[str, np.ndarray]:
    return {name: getattr(step, name)[1:] for name in ("add", "chunk", "src", "dst")}


def test_there_are_many():
    """So that a change of the library does not leave the mutants few without notice."""
    programs = [expand(leaf, n) for leaf in leaves().values() for n in range(2, 7)]
    assert len(leaves()) >= 24
    assert sum(1 for p in programs for _ in mutants(p)) >= 18000
