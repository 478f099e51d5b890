"""The paths of a tree's leaves, as patterns name them: ``blocks/0/attention/kernel``.

What wraps a leaf has no part in its path: nnx variables, Linen's boxes, ``Shard`` and ``Ranked``.
"""

import sys
from fnmatch import fnmatchcase
from typing import Any

import jax

from collc.lowering.shards import is_shard
from collc.training.kinds import Ranked


def is_wrapped(x: Any) -> bool:
    """Whether a node stands for one parameter: a shard, an nnx variable, or a Linen box."""
    nnx, linen = sys.modules.get("flax.nnx"), sys.modules.get("flax.linen")
    return (
        is_shard(x)
        or (nnx is not None and isinstance(x, nnx.Variable))
        or (linen is not None and isinstance(x, linen.meta.AxisMetadata))
    )


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The path and the node of each parameter, in the order of the tree's leaves.

    >>> [path for path, _ in named_leaves({"embed": {"table": 1}, "blocks": [{"w": 2}, {"w": 3}]})]
    ['blocks/0/w', 'blocks/1/w', 'embed/table']
    """
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_wrapped)[0]
    named: list[tuple[str, Any]] = []
    for keys, node in found:
        path = _path(tree, keys)
        named += [(path, node)] * len(jax.tree.leaves(node))
    return named


def _path(tree: Any, keys: tuple[Any, ...]) -> str:
    words, at = [], tree
    for key in keys:
        inside = isinstance(at, Ranked)
        at = _child(at, key)
        if not inside:
            words.append(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))))
    return "/".join(words)


def _child(node: Any, key: Any) -> Any:
    children, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return next((child for path, child in children if path[:1] == (key,)), None)


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern names a path. ``*`` stands for any part of it, "/" included.

    >>> matches("embed/*", "embed/table"), matches("*/bias", "blocks/0/bias"), matches("w", "w2")
    (True, True, False)
    """
    return fnmatchcase(path, pattern)
