"""Where a device stands on the axes of a leaf, and how it sends to another."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from collc.language.algebra import Leaf
from collc.language.expand import permutation
from collc.language.ir import Ints
from collc.lowering.wire import Wire, rounded

COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lax.add,
    "max": lax.max,
    "min": lax.min,
}


def rank_in(order: Sequence[str], sizes: Mapping[str, int]) -> jax.Array:
    """This device's rank over some axes, linear in their given order, an int32 scalar."""
    rank = jnp.int32(0)
    for axis in order:
        rank = rank * sizes[axis] + lax.axis_index(axis)
    return rank


@dataclass(frozen=True, eq=False)
class Place:
    """A leaf's ranks on the device mesh, linear in the leaf's order of axes.

    ``sizes`` are the mesh's axes in mesh order: ``ppermute`` over axes in any other order routes
    wrongly and silently on jax 0.10. ``op`` is "sum", "max" or "min".
    """

    leaf: Leaf
    sizes: Mapping[str, int]
    op: str
    wire: Wire

    @property
    def combine(self) -> Callable[[Any, Any], Any]:
        return COMBINE[self.op]

    @cached_property
    def n(self) -> int:
        return int(np.prod([self.sizes[a] for a in self.leaf.axes]))

    @cached_property
    def names(self) -> Ints:
        """The rank that each rank of the program is, after relabelling, [n]."""
        return permutation(self.leaf.relabels, self.n)

    @property
    def moved(self) -> bool:
        return bool(self.leaf.relabels)

    def rank(self) -> jax.Array:
        """This device's rank, an int32 scalar."""
        return rank_in(self.leaf.axes, self.sizes)

    def before(self) -> jax.Array:
        """This device's rank in the program, before relabelling, an int32 scalar."""
        if not self.moved:
            return self.rank()
        return jnp.asarray(np.argsort(self.names), jnp.int32)[self.rank()]

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The leaf's axes in mesh order."""
        return tuple(a for a in self.sizes if a in self.leaf.axes)

    @cached_property
    def linear(self) -> Ints:
        """The rank in mesh order of each rank in the leaf's order, [n]."""
        own = self.leaf.axes
        grid = np.arange(self.n).reshape([self.sizes[a] for a in self.axes])
        return grid.transpose([self.axes.index(a) for a in own]).reshape(-1)

    def send(self, values: list[jax.Array], src: Ints, dst: Ints, name: str) -> list[jax.Array]:
        """One round: each value from rank ``src[i]`` to rank ``dst[i]``; others receive zeros.

        ``name`` is the round's for profilers, such as r3, or r0-6 for those of a loop.
        """
        pairs = list(zip(self.linear[src].tolist(), self.linear[dst].tolist(), strict=True))
        axes = self.axes[0] if len(self.axes) == 1 else self.axes

        def one(value: jax.Array) -> jax.Array:
            packed = self.wire.pack(value)
            arrived = jax.tree.map(lambda x: lax.ppermute(x, axes, pairs), packed)
            return self.wire.unpack(arrived, value)

        with jax.named_scope(name):
            return [one(value) for value in values]

    def kept(self, values: list[jax.Array]) -> list[jax.Array]:
        """What a rank that copies values out keeps of them, so that all replicas are equal."""
        return [rounded(self.wire, value) for value in values]
