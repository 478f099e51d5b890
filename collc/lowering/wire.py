"""What a send carries: the seam between a schedule and the bytes on the wire.

Lowering asks the format to pack and unpack; it does not know dtypes by name. A format that loses
something says so, and then a rank that copies a chunk out keeps the value as it was received.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp


class Wire(Protocol):
    """A frozen, hashable value. ``pack`` gives a pytree of arrays, each sent as one message."""

    @property
    def lossy(self) -> bool: ...

    def pack(self, x: jax.Array) -> Any: ...

    def unpack(self, packed: Any, like: jax.Array) -> jax.Array: ...


@dataclass(frozen=True)
class Plain:
    """The value itself."""

    lossy: bool = False

    def pack(self, x: jax.Array) -> Any:
        return x

    def unpack(self, packed: Any, like: jax.Array) -> jax.Array:
        return packed


@dataclass(frozen=True)
class Widened(Plain):
    """The value itself; what its transpose sums is kept in ``dtype``, and travels so.

    Of what moves values about, such as a gather, whose transpose is a sum of cotangents.
    """

    dtype: str = "float32"


@dataclass(frozen=True)
class Cast:
    """Floating-point values in a narrower dtype, by name: ``Cast("bfloat16")``.

    All others, integers too, travel as they are.
    """

    dtype: str
    lossy: bool = True

    def pack(self, x: jax.Array) -> Any:
        to = jnp.dtype(self.dtype)
        narrows = jnp.issubdtype(x.dtype, jnp.floating) and to.itemsize < x.dtype.itemsize
        return x.astype(to) if narrows else x

    def unpack(self, packed: Any, like: jax.Array) -> jax.Array:
        return packed.astype(like.dtype)


def rounded(wire: Wire, x: jax.Array) -> jax.Array:
    """The value as the other end of the wire sees it."""
    return wire.unpack(wire.pack(x), x) if wire.lossy else x
