"""Among whom a collective goes, in terms of the mesh, and what it sends over which links."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
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


@lru_cache(maxsize=1024)
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


@lru_cache(maxsize=1024)
def canonical(partners: Partners, pairs: bool) -> Partners:
    """Equal for collectives among the same devices, in whatever order their text lists them."""
    return tuple(sorted(p if pairs else tuple(sorted(p)) for p in partners))


@lru_cache(maxsize=1024)
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
    """Bytes that devices send in one call of the program, within NVLink domains and between them."""

    nvlink: int
    network: int


def sent(collective: Collective, domains: NDArray[np.int64]) -> NDArray[np.float64]:
    """What each device sends in all executions: over NVLink in row 0, over the network in row 1.

    ``domains``: the domain of each device, [devices]. Returns bytes, [2, devices]. Pairs are exact.
    Of a group it is what NCCL's rings move, led through each domain once: 2(n - 1)/n of the buffer
    over each of n hops in an all-reduce, (n - 1)/n of the whole in a reduce-scatter or an all-gather,
    all of it over n - 1 hops in a broadcast; the devices of a domain share that alike, since there are
    as many rings as NICs, and each leaves by another device. In an all-to-all each device sends 1/n
    of the buffer to each; XLA's one-shot kernel sends the whole buffer to each.
    """
    moved = np.zeros((2, len(domains)))
    if isinstance(collective, CollectivePermute):
        hops = np.array([pair for pair in collective.pairs if pair[0] != pair[1]], np.int64)
        if hops.size:
            src, dst = hops.T
            over = (domains[src] != domains[dst]).astype(int)
            np.add.at(moved, (over, src), float(collective.bytes))
        return moved * collective.count
    everyone = "all-to-all" in collective.kind or collective.kernel == "one-shot"
    for group in collective.partners:
        members, n = np.array(group), len(group)
        own, inverse, alike = np.unique(domains[members], return_inverse=True, return_counts=True)
        k = alike[inverse]  # the devices of the group in each one's domain
        if everyone:
            each = collective.bytes * (1 / n if "all-to-all" in collective.kind else 1.0)
            moved[0, members] += (k - 1) * each
            moved[1, members] += (n - k) * each
            continue
        each = collective.bytes * _share(collective.kind, n)
        leaves = np.full(n, float(len(own) > 1))
        if collective.kind == "collective-broadcast":
            leaves[inverse == len(own) - 1] = 0.0  # nothing goes on from the last
        closed = len(own) == 1 and collective.kind != "collective-broadcast"
        moved[0, members] += each * (1.0 if closed and n > 1 else (k - 1) / k)
        moved[1, members] += each * leaves / k
    return moved * collective.count


def _share(kind: str, n: int) -> float:
    """What goes over one hop of a ring, of the bytes of the result."""
    return {
        "all-reduce": 2 * (n - 1) / n,
        "all-gather": (n - 1) / n,
        "reduce-scatter": n - 1,  # of which the result is 1/n
        "collective-broadcast": 1.0,
    }[kind]
