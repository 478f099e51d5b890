"""Data that tells where it came from, and a count of the elements that are not what they should be.

All of it is integers which the dtype, and their sums too, hold exactly: so the comparison with
NumPy is exact.

    what moves     every element of every device has a number of its own; a pass carries as many of
                   its digits as fit in the dtype, so that the passes together spell it
    what is added  every element is a hash of that number, since of consecutive numbers a shift up
                   and a shift down cancel out; in narrow dtypes some of the ranks at a time
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from collc.analysis.reference import collective as meaning

Function = Callable[[jax.Array], jax.Array]

SUMS = ("all_reduce", "reduce_scatter")
VALUES = 256  # at least as many different ones, so that two elements seldom look alike
MOST_TURNS = 64  # in which the ranks carry data


@dataclass(frozen=True)
class TellTale:
    """What is asked of a collective over ``axes``, in the order of the ranks, of every device.

    ``length``: elements of a device's input. ``scaled``: as in a program that hands in x + x and
    doubles what it gets.
    """

    mesh: Mesh
    collective: str
    axes: tuple[str, ...]
    length: int
    dtype: str
    scaled: bool = False

    @property
    def groups(self) -> NDArray[np.int64]:
        """The devices, numbered in mesh order, [groups, ranks]."""
        names = list(self.mesh.axis_names)
        numbers = np.arange(self.mesh.devices.size).reshape(self.mesh.devices.shape)
        others = [i for i, name in enumerate(names) if name not in self.axes]
        own = [names.index(axis) for axis in self.axes]
        ranks = math.prod(self.mesh.shape[axis] for axis in self.axes)
        return numbers.transpose(*others, *own).reshape(-1, ranks)

    def passes(self) -> Iterator[NDArray[Any]]:
        """The inputs, [devices, length] each."""
        return self._sums() if self.collective in SUMS else self._digits()

    def expected(self, x: NDArray[Any]) -> NDArray[Any]:
        """What the devices have to return, [devices, ...], by NumPy."""
        done: Any = None
        for group in self.groups:
            y = meaning(self.collective, x[group] + x[group] if self.scaled else x[group])
            if done is None:
                done = np.empty((len(x), *y.shape[1:]), y.dtype)
            done[group] = y * y.dtype.type(2) if self.scaled else y
        return done

    def wrong(self, functions: Mapping[str, Function]) -> dict[str, int]:
        """Elements, over all devices, that a function got wrong in any pass.

        The functions take and return global arrays that are sharded over all of the mesh.
        """
        sharding = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        found: dict[str, Any] = {}
        for x in self.passes():
            right = self.expected(x)
            for name, function in functions.items():
                # A copy: what is donated would else be overwritten under the next one's feet.
                given = jax.device_put(x.reshape(-1), sharding, may_alias=False)
                y = np.asarray(jax.block_until_ready(function(given))).reshape(right.shape)
                off = y != right  # NaN too
                found[name] = off if name not in found else found[name] | off
        return {name: int(np.count_nonzero(off)) for name, off in found.items()}

    def _digits(self) -> Iterator[NDArray[Any]]:
        bits = _bits(self.dtype)
        last = self.mesh.devices.size * self.length  # numbers begin at 1: zero is nobody's
        for shift in range(0, last.bit_length(), bits):

            def digit(number: Any, device: int, shift: int = shift) -> Any:
                return number >> shift & (1 << bits) - 1

            yield self._rows(digit)

    def _sums(self) -> Iterator[NDArray[Any]]:
        groups = self.groups
        ranks = groups.shape[1]
        rank = np.empty(groups.size, np.int64)
        rank[groups] = np.arange(ranks)
        bits = _bits(self.dtype)
        room = 1 << bits
        if jax.numpy.issubdtype(self.dtype, np.integer):  # their sums wrap round, exactly
            for salt in range(-(-16 // bits)):
                yield self._hashes(salt, room, rank >= 0)
            return
        turns = min(-(-ranks // max(room // VALUES, 1)), MOST_TURNS, ranks)
        for turn in range(turns):
            yield self._hashes(turn, room // -(-ranks // turns), rank % turns == turn)
        if turns > 1:  # all at once, which tells a sum from the largest
            yield self._hashes(turns, room // ranks + 1, rank < room)

    def _hashes(self, salt: int, most: int, carries: NDArray[np.bool_]) -> NDArray[Any]:
        """Hashes from 1 to below ``most`` on the devices that carry something, zeros elsewhere."""

        def of(number: NDArray[np.uint64], device: int) -> NDArray[np.uint64]:
            if not carries[device]:
                return np.zeros_like(number)
            mixed = number + np.uint64((salt * 0x9E3779B97F4A7C15) % 2**64)
            for by, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):  # splitmix64's
                mixed = (mixed ^ mixed >> np.uint64(shift)) * np.uint64(by)
            return 1 + (mixed >> np.uint64(33)) % max(most - 1, 1)

        return self._rows(of)

    def _rows(self, of: Callable[[Any, int], Any]) -> NDArray[Any]:
        devices, length = self.mesh.devices.size, self.length
        rows = np.empty((devices, length), jax.numpy.dtype(self.dtype))
        for device in range(devices):
            number = np.arange(device * length + 1, (device + 1) * length + 1, dtype=np.uint64)
            rows[device] = of(number, device)
        return rows


def _bits(dtype: str) -> int:
    """All integers of so many bits are exact in the dtype."""
    found = jax.numpy.dtype(dtype)
    if jax.numpy.issubdtype(found, np.integer):
        return min(jax.numpy.iinfo(found).bits - 1, 52)
    return min(jax.numpy.finfo(found).nmant + 1, 52)
