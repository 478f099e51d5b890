"""Among whom a collective goes, in terms of the mesh, and what it sends over which links."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from collc.receipts.hlo import Collective, CollectivePermute

Partners = tuple[tuple[int, ...], ...]  # groups, or pairs


def spanned(collective: Collective, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes along which devices that exchange something differ, in mesh order.

    ``sizes``: the axes of the mesh whose devices HLO numbers in order, outermost first. Raises
    ValueError where the mesh has fewer devices than the collective names.
    """
    return _spanned(collective.partners, tuple(sizes.items()))


@lru_cache(maxsize=256)
def _spanned(partners: Partners, sizes: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    devices = math.prod(n for _, n in sizes)
    highest = max((d for each in partners for d in each), default=0)
    if highest >= devices:
        raise ValueError(f"it has {devices} devices, and the program names device {highest}")
    varying = dict.fromkeys((axis for axis, _ in sizes), False)
    for width in {len(each) for each in partners}:
        grid = np.array([each for each in partners if len(each) == width], np.int64)
        for (axis, _), at in zip(sizes, np.unravel_index(grid, [n for _, n in sizes])):
            varying[axis] |= bool((at != at[:, :1]).any())
    return tuple(axis for axis, varies in varying.items() if varies)


@lru_cache(maxsize=256)
def canonical(partners: Partners, pairs: bool) -> bytes:
    """Equal for collectives among the same devices, in whatever order their text lists them."""
    each = [tuple(p) if pairs else tuple(sorted(p)) for p in partners]
    return repr(sorted(each)).encode()


@lru_cache(maxsize=256)
def everywhere(
    axes: tuple[str, ...],
    edges: Partners | None,
    sizes: tuple[tuple[str, int], ...],
) -> Partners:
    """Pairs or groups of ranks along some axes, as devices of the whole mesh, in all of its slices.

    ``edges`` are in ranks linear in ``axes``; None is the one group of all.

    >>> everywhere(("gpu",), ((0, 1),), (("host", 2), ("gpu", 2)))
    ((0, 1), (2, 3))
    """
    names = [axis for axis, _ in sizes]
    shape = [n for _, n in sizes]
    inside = [names.index(axis) for axis in axes]
    outside = [i for i in range(len(names)) if i not in inside]
    ids = np.arange(math.prod(shape)).reshape(shape).transpose(outside + inside)
    ids = ids.reshape(-1, math.prod(shape[i] for i in inside))
    listed = [tuple(range(ids.shape[1]))] if edges is None else edges
    return tuple(tuple(ids[i, list(edge)].tolist()) for i in range(len(ids)) for edge in listed)


# ---- links ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Links:
    """Bytes that all devices together send, in one call of the program."""

    nvlink: int
    network: int

    def __add__(self, other: "Links") -> "Links":
        return Links(self.nvlink + other.nvlink, self.network + other.network)


def links(collective: Collective, domains: NDArray[np.int64]) -> Links:
    """What a collective's executions send within NVLink domains, and between them.

    ``domains``: the domain of each device, [devices]. Pairs are exact. Of a group it is what NCCL's
    ring moves, led through each domain once: 2(n - 1)/n of the buffer over each of n links for an
    all-reduce, (n - 1)/n of the whole for a reduce-scatter or an all-gather, all of it over n - 1
    links for a broadcast; an all-to-all sends 1/n of the buffer to each. XLA's one-shot kernel sends
    the whole buffer to each peer.
    """
    size, total = collective.bytes, Links(0, 0)
    if isinstance(collective, CollectivePermute):
        if collective.pairs:
            pairs = np.array(collective.pairs)
            pairs = pairs[pairs[:, 0] != pairs[:, 1]]
            crossing = int((domains[pairs[:, 0]] != domains[pairs[:, 1]]).sum())
            total = Links((len(pairs) - crossing) * size, crossing * size)
    else:
        for group in collective.partners:
            own = np.unique(domains[list(group)], return_counts=True)[1].tolist()
            total += _group(collective, size, len(group), own)
    return Links(total.nvlink * collective.count, total.network * collective.count)


def _group(collective: Collective, size: int, n: int, own: list[int]) -> Links:
    """Of one group of n devices, ``own`` of which are in each domain that it touches."""
    kind = collective.kind
    if kind in ("all-to-all", "ragged-all-to-all") or collective.kernel == "one-shot":
        each = Fraction(size, n) if "all-to-all" in kind else Fraction(size)
        inside, all_of_them = sum(k * (k - 1) for k in own), n * (n - 1)
        return Links(round(inside * each), round((all_of_them - inside) * each))
    edges = n - 1 if kind == "collective-broadcast" else n
    crossing = len(own) if len(own) > 1 else 0
    if kind == "collective-broadcast":
        crossing = len(own) - 1
    each = {
        "all-reduce": Fraction(2 * (n - 1) * size, n),
        "all-gather": Fraction((n - 1) * size, n),
        "reduce-scatter": Fraction((n - 1) * size),  # size is of the result, 1/n of the whole
        "collective-broadcast": Fraction(size),
    }[kind]
    return Links(round((edges - crossing) * each), round(crossing * each))
