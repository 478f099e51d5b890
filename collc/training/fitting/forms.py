"""Where two trees of arrays differ first, and in what."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path

MISSING = "missing"

Difference = tuple[tuple[Any, ...], str, str]


def form(x: Any) -> str:
    """A node as errors say it: ``float32[7, 3]``, ``a Python int``, ``a list of 2``. A text is one
    already, so that trees of forms can be compared.
    """
    if isinstance(x, str):
        return x
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}{list(x.shape)}"
    if isinstance(x, bool | int | float | complex):
        return f"a Python {type(x).__name__}"
    children = _children(x)
    if x is None or children is None:
        return "None" if x is None else f"a {type(x).__name__}"
    return f"a {type(x).__name__} of {len(children)}"


def difference(was: Any, now: Any) -> Difference | None:
    """The first path at which two trees have other nodes, shapes or dtypes, and what is there; None
    where they are alike.

    >>> difference({"a": 1, "b": [2]}, {"a": 1, "b": (2,)})
    ((DictKey(key='b'),), 'a list of 1', 'a tuple of 1')
    """
    one, other = _children(was), _children(now)
    if one is None and other is None:
        return None if form(was) == form(now) else ((), form(was), form(now))
    if one is None or other is None or type(was) is not type(now):
        return (), form(was), form(now)
    for key in dict.fromkeys([*one, *other]):
        if key not in one or key not in other:
            said = [form(own[key]) if key in own else MISSING for own in (one, other)]
            return (key,), said[0], said[1]
        if found := difference(one[key], other[key]):
            path, *said = found
            return (key, *path), said[0], said[1]
    nodes = [jax.tree.structure(x, is_leaf=_below(x)) for x in (was, now)]
    return None if nodes[0] == nodes[1] else ((), str(nodes[0]), str(nodes[1]))


def is_number(dtype: Any) -> bool:
    """Whether it is a dtype of numbers or truth values, which devices hold."""
    return jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool)


def path_of(keys: tuple[Any, ...]) -> str:
    """A path as patterns write it: ``blocks/0/kernel``."""
    return keystr(keys, simple=True, separator="/")


def _children(node: Any) -> dict[Any, Any] | None:
    """What is right below a node, by its key; None for a leaf."""
    found = tree_flatten_with_path(node, is_leaf=_below(node))[0]
    if len(found) == 1 and not found[0][0]:
        return None
    return {keys[0]: child for keys, child in found}


def _below(node: Any) -> Any:
    return lambda x: x is not node
