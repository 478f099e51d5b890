"""The paths of a tree's leaves, as patterns name them: ``blocks/0/attention/kernel``.

What wraps a leaf has no part in its path: nnx variables, Linen's boxes, ``Shard`` and ``Ranked``.
"""

import functools
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from collc.errors import StepError
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
    named: list[tuple[str, Any]] = []
    for words, _, node in _parameters(tree):
        named += [("/".join(words), node)] * len(jax.tree.leaves(node))
    return named


def is_parameter(node: Any) -> bool:
    """Whether a node may have a gradient: of nnx variables ``nnx.Param`` alone."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is None or not isinstance(node, nnx.Variable) or isinstance(node, nnx.Param)


def check_distinct(tree: Any) -> None:
    """Raises StepError where two parameters have one path, as those of {"a/b": x, "a": {"b": y}}."""
    found: dict[str, Any] = {}
    for words, keys, _ in _parameters(tree):
        path = "/".join(words)
        if path in found:
            both = f"{keystr(found[path])} and {keystr(keys)}"
            raise StepError(f"two parameters have the path {path!r}: {both}. Rename one of them.")
        found[path] = keys


def word(key: Any) -> str:
    """A key of jax's paths as it stands in ours: of a dict, a sequence, or an attribute."""
    return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))


def _parameters(
    node: Any, words: tuple[str, ...] = (), keys: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[str, ...], tuple[Any, ...], Any]]:
    """Each parameter's node, with the words of its path and jax's keys."""
    if is_wrapped(node):
        yield words, keys, node
        return
    for at, child in tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]:
        if not at:
            yield words, keys, node
        else:
            below = words if isinstance(node, Ranked) else (*words, word(at[0]))
            yield from _parameters(child, below, (*keys, *at))


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern names a path: ``*`` any part of it, "/" included, all else itself.

    >>> matches("embed/*", "embed/table"), matches("*/bias", "blocks/0/bias"), matches("w", "w2")
    (True, True, False)
    """
    return _compiled(pattern).fullmatch(path) is not None


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL)
