"""Which parameter each number that an optimizer keeps belongs to.

    params {w, b}   adam's state (count, mu {w, b}, nu {w, b})   -->   none, b w, b w

The optimizer is asked for the state of parameters that stand in nodes of their own. It takes over
the nodes where it keeps something for each parameter, as it does with shards.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from collc.errors import StepError


@partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["place"])
@dataclass(frozen=True)
class _Marked:
    """A parameter, with its place among them."""

    value: Any
    place: int


def owners(tx: Any, params: Any, state: Any) -> list[int | None]:
    """For each leaf of an optimizer's state the place of its parameter among the leaves of ``params``;
    None for what is kept for none, such as a count.

    Raises StepError for an optimizer whose state cannot be told apart so.
    """
    leaves, tree = jax.tree.flatten(params)
    marked = jax.tree.unflatten(tree, [_Marked(x, i) for i, x in enumerate(leaves)])
    try:
        kept = jax.eval_shape(tx.init, marked)
    except Exception as error:
        raise StepError(f"{_WHICH} Its init takes no nodes: {error}") from error
    nodes = jax.tree.leaves(kept, is_leaf=_is_marked)
    bare = jax.tree.map(lambda x: x.value if _is_marked(x) else x, kept, is_leaf=_is_marked)
    if jax.tree.structure(bare) != jax.tree.structure(state):
        raise StepError(f"{_WHICH} Its init returns {jax.tree.structure(bare)}.")
    return [
        node.place if _is_marked(node) else None for node in nodes for _ in jax.tree.leaves(node)
    ]


_WHICH = (
    "state.push of some parameters has to know what the optimizer keeps for which of them, but this "
    "one does not say. Push all of them."
)


def _is_marked(x: Any) -> bool:
    return isinstance(x, _Marked)
