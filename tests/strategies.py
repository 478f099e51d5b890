"""Random schedule expressions that fit together, for hypothesis.

Loaded with ``library.load``, by path: tests are no package.
"""

from contextlib import contextmanager
from pathlib import Path

from hypothesis import strategies as st

from collc.language.library import load, lookup, modules

zoo = load(Path(__file__).parent / "zoo.py")


@contextmanager
def zoo_known():
    """Within, ``zoo.chain`` and its like are found by name; later tests do not see them."""
    modules()["zoo"] = zoo
    try:
        yield
    finally:
        del modules()["zoo"]


LEAVES = {
    "reduce_scatter": [
        "ring.reduce_scatter", "ring.two_way_reduce_scatter", "allpairs.reduce_scatter",
        "halving.reduce_scatter", "pat.reduce_scatter", "native.reduce_scatter",
    ],
    "all_gather": [
        "ring.all_gather", "ring.two_way_all_gather", "allpairs.all_gather", "halving.all_gather",
        "pat.all_gather", "native.all_gather",
    ],
    "all_reduce": [
        "ring.all_reduce", "ring.two_way_all_reduce", "tree.all_reduce", "tree.double_all_reduce",
        "binomial.all_reduce", "chain.all_reduce", "server.star", "allpairs.one_shot",
        "allpairs.two_shot", "halving.all_reduce", "doubling.all_reduce", "pat.all_reduce",
        "native.all_reduce",
    ],
    "reduce": ["tree.reduce", "binomial.reduce", "chain.reduce", "server.reduce"],
    "broadcast": [
        "tree.broadcast", "binomial.broadcast", "server.broadcast", "zoo.chain", "native.broadcast",
    ],
    "gather": ["server.gather"],
    "scatter": ["server.scatter"],
    "all_to_all": ["pairwise.all_to_all", "bruck.all_to_all", "native.all_to_all"],
}  # fmt: skip
DUAL = {
    "reduce_scatter": "all_gather", "all_gather": "reduce_scatter", "reduce": "broadcast",
    "broadcast": "reduce", "gather": "scatter", "scatter": "gather",
    "all_reduce": "all_reduce", "all_to_all": "all_to_all",
}  # fmt: skip
# What a collective can be made of, one after another.
MADE_OF = {
    "all_reduce": [("reduce_scatter", "all_gather"), ("reduce", "broadcast")],
    "reduce_scatter": [("reduce", "scatter")],
    "all_gather": [("gather", "broadcast")],
}
ROOTED = {"reduce", "broadcast", "gather", "scatter"}
# On several axes one after the other; the first and the last of three may also enclose the rest.
ENCLOSED = {"all_reduce": ("reduce_scatter", "all_gather")}


@st.composite
def leaves(draw, kind, native=False, relabels=True):
    """A leaf, or a named composite, of that kind: perhaps a dual, perhaps relabelled."""
    own = [name for name in LEAVES[kind] if native or not name.startswith("native")]
    turned = [name for name in LEAVES[DUAL[kind]] if not name.startswith("native") and "." in name]
    if kind == "all_reduce" and draw(st.booleans()):
        found = lookup("server.shards")(draw(st.integers(1, 3)))
    elif turned and draw(st.integers(0, 3)) == 0:
        found = lookup(draw(st.sampled_from(turned))).reversed()
    else:
        found = lookup(draw(st.sampled_from(own)))
    # A root that moves has to move for its partner too: unplaced() relabels those as a whole.
    if relabels and kind not in ROOTED:
        found = draw(relabelled(found))
    return found


@st.composite
def relabelled(draw, schedule):
    match draw(st.integers(0, 5)):
        case 0:
            return schedule.relabel(shift=draw(st.integers(-3, 3)))
        case 1:
            return schedule.relabel(
                order=lookup(draw(st.sampled_from(["zoo.backwards", "zoo.odd_first"])))
            )
    return schedule


@st.composite
def unplaced(draw, kind, depth=2, native=False):
    """An expression of that kind without axes."""
    form = draw(st.integers(0, 3)) if depth else 0
    if form == 1 and kind in MADE_OF:
        first, second = draw(st.sampled_from(MADE_OF[kind]))
        whole = draw(unplaced(first, depth - 1, native)) >> draw(
            unplaced(second, depth - 1, native)
        )
        return draw(relabelled(whole))
    if form == 2:
        parts = draw(st.lists(unplaced(kind, depth - 1, native), min_size=2, max_size=3))
        return beside(parts)
    if form == 3:
        return draw(unplaced(DUAL[kind], depth - 1, native)).reversed()
    return draw(leaves(kind, native))


@st.composite
def placed(draw, kind, axes, depth=2, native=False):
    """An expression that does the collective on all these axes."""
    form = draw(st.integers(0, 3)) if depth else 0
    if form == 1:
        parts = draw(st.lists(placed(kind, axes, depth - 1, native), min_size=2, max_size=2))
        return beside(parts)
    if form == 2:
        return draw(placed(DUAL[kind], axes, depth - 1, native)).reversed()
    order = draw(st.permutations(axes))
    if len(axes) == 1 or draw(st.integers(0, 3)) == 0:
        on = order[0] if len(order) == 1 else tuple(order)
        return draw(unplaced(kind, depth, native)) @ on
    cut = draw(st.integers(1, len(axes) - 1))
    outer, inner = order[:cut], order[cut:]
    if kind in ENCLOSED and draw(st.booleans()):
        first, last = ENCLOSED[kind]
        return (
            draw(placed(first, inner, depth - 1, native))
            >> draw(placed(kind, outer, depth - 1, native))
            >> draw(placed(last, inner, depth - 1, native))
        )
    return draw(placed(kind, outer, depth - 1, native)) >> draw(
        placed(kind, inner, depth - 1, native)
    )


def beside(parts):
    whole = parts[0]
    for part in parts[1:]:
        whole = whole | part
    return whole


kinds = st.sampled_from(sorted(LEAVES))
