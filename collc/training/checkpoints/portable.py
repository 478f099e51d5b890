"""Trees as plain arrays whose meaning does not depend on the number of devices, and back.

Shard         [layers..., parts of all ranks in a row]; what follows the leaf's end is padding
Ranked        as it is, [size of each axis..., shape...]
random keys   their data, as uint32
numbers, arrays of size 0, empty nodes: in their record only
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from collc.errors import CheckpointError
from collc.lowering.operands import names_in
from collc.lowering.shards import Shard, is_shard
from collc.training.checkpoints.flat import flat_shape, flattened, layers_of, ranks_of_shard
from collc.training.checkpoints.resize import splits, words
from collc.training.kinds import Ranked, differs, rank_axes
from collc.training.paths import is_wrapped, word

NUMBERS = (bool, int, float, complex)


@dataclass(frozen=True)
class Record:
    """What a leaf is, in words that do not depend on devices, and how it lay when it was saved.

    kind: "array", "shard", "ranked", "number", or "nothing", an empty node of the tree, whose type
    is in ``dtype``. shape: of the whole leaf, or of each rank's own. lay: of a ranked leaf the sizes
    of its axes, of a shard how many ranks and how many numbers with padding. value: of a number.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...] = ()
    lay: tuple[int, ...] = field(default=(), compare=False)
    value: str = field(default="", compare=False)

    @property
    def text(self) -> str:
        """As errors say it: ``float32[7, 3] in shards``."""
        ends = {"shard": " in shards", "ranked": " on each rank"}
        if self.kind == "nothing":
            return f"{self.dtype} without values"
        if self.kind == "number":
            return f"a Python {self.dtype}"
        return f"{self.dtype}{list(self.shape)}{ends.get(self.kind, '')}"

    @property
    def ranks(self) -> int:
        """How many ranks a ranked leaf had."""
        return math.prod(self.lay)

    @property
    def stored(self) -> bool:
        """Whether it has an array of its own; this record is all there is of others."""
        return self.kind not in ("number", "nothing") and 0 not in (*self.shape, *self.lay)

    def fits(self, other: "Record") -> bool:
        """Whether it is the same leaf, maybe on other devices."""
        if self.kind == other.kind == "ranked" and self.dtype == other.dtype:
            cut = splits((self.ranks, *self.shape), (other.ranks, *other.shape))
            return self.shape == other.shape or cut
        return self == other


@dataclass(frozen=True)
class Place:
    """A leaf or Shard of a tree, or an empty node: its path, and the axes that it is ranked over."""

    path: str
    node: Any
    axes: tuple[str, ...] | None = None
    empty: bool = False

    @property
    def name(self) -> str:
        """The path as a name for Orbax, each of its own: ``blocks.0.kernel``, ``_`` for the root's."""
        if self.path in ("", "_"):
            return "%5F" if self.path else "_"
        return quote(self.path, safe="/").replace(".", "%2E").replace("/", ".")


def places(tree: Any) -> list[Place]:
    """Leaves, Shards and empty nodes in the order of the tree. CheckpointError if paths collide."""
    found = list(_walk(tree, (), None))
    seen: set[str] = set()
    for place in found:
        if place.path in seen:
            raise CheckpointError(
                f"Two leaves of the state have the path {place.path!r}. Rename one of them: a "
                "checkpoint finds them by their paths."
            )
        seen.add(place.path)
    return found


def _walk(node: Any, words: tuple[str, ...], axes: tuple[str, ...] | None) -> Iterator[Place]:
    path = "/".join(words)
    if is_shard(node):
        yield Place(path, node)
        return
    axes = rank_axes(node) if differs(node) else axes
    children, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if not children:
        yield Place(path, type(node).__name__, empty=True)
    wrapped = is_wrapped(node) or isinstance(node, Ranked)
    for keys, child in children:
        if not keys:
            yield Place(path, node, axes)
        elif wrapped:
            yield from _walk(child, words, axes)
        else:
            yield from _walk(child, (*words, word(keys[0])), axes)


def is_key(x: Any) -> bool:
    """Whether a leaf holds typed random keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def record(place: Place) -> Record:
    """The record of a leaf. Raises CheckpointError for what is no array and no number."""
    path, x = words(place.path), place.node
    if place.empty:
        return Record("nothing", x)
    if isinstance(x, Shard):
        value = x.value
        shape = (*layers_of(x), *x.shape)
        lay = (ranks_of_shard(x), flat_shape(x)[-1])
        return Record("shard", str(value.dtype), shape, lay)
    if type(x) in NUMBERS:
        return Record("number", type(x).__name__, value=repr(x))
    arrays = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)
    if not isinstance(x, arrays) or x.dtype.name in ("object", "str", "bytes"):
        raise CheckpointError(
            f"{path} is a {type(x).__name__}: a checkpoint holds arrays and numbers. Leave it out of "
            "the state, or keep it in notes."
        )
    if place.axes is None:
        return Record("array", str(x.dtype), tuple(x.shape))
    n = len(place.axes) or _leading(x)
    if not 0 < n <= len(x.shape):
        raise CheckpointError(
            f"{path} is ranked, but nothing says which of its dimensions {list(x.shape)} are the "
            "ranks'. Make it with collc.ranked, or name its axes."
        )
    return Record("ranked", str(x.dtype), tuple(x.shape[n:]), tuple(x.shape[:n]))


def _leading(x: Any) -> int:
    """How many leading dimensions are sharded: a Ranked node need not name its axes."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return 0
    named = [bool(names_in(entry)) for entry in sharding.spec]
    return [*named, False].index(False)


def portable(tree: Any) -> tuple[dict[str, Any], dict[str, Record]]:
    """The plain arrays of a tree by name, sharded where they were, and the records by path.

    Raises CheckpointError for leaves that cannot be held.
    """
    found = [(place, record(place)) for place in places(tree)]
    arrays = {place.name: _array(place) for place, record in found if record.stored}
    return arrays, {place.path: record for place, record in found}


def _array(place: Place) -> Any:
    x = place.node
    if isinstance(x, Shard):
        x = flattened(words(place.path), x)
    elif is_key(x):
        x = jax.random.key_data(x)
    # Of several processes' own arrays of the same name Orbax takes the first one's, as numpy only.
    own = isinstance(x, jax.Array) and x.is_fully_addressable and jax.process_count() > 1
    return np.asarray(x) if own else x


def rebuilt(like: Any, leaves: Mapping[str, Any]) -> Any:
    """``like`` with other leaves, by path."""
    tree = jax.tree.structure(like, is_leaf=is_shard)
    return jax.tree.unflatten(tree, [leaves[p.path] for p in places(like) if not p.empty])
