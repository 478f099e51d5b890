"""What a send carries: the seam between a schedule and the bytes on the wire.

Lowering asks the format to pack and unpack; it does not know dtypes by name. A format that loses
something says so, and then a rank that copies a chunk out keeps the value as it was received.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np


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
class Cast:
    """The value in another dtype, by name: ``Cast("bfloat16")``."""

    dtype: str
    lossy: bool = True

    def pack(self, x: jax.Array) -> Any:
        return x.astype(np.dtype(jnp.dtype(self.dtype)))

    def unpack(self, packed: Any, like: jax.Array) -> jax.Array:
        return packed.astype(like.dtype)


def rounded(wire: Wire, x: jax.Array) -> jax.Array:
    """The value as the other end of the wire sees it."""
    return wire.unpack(wire.pack(x), x) if wire.lossy else x
