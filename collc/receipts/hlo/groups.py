"""Replica groups as HLO text writes them, written out.

The forms, and what wrote them::

    {{0,1},{2,3}}                        written out: jax 0.10, and what has no shorter form
    {}                                   all devices
    [2,4]<=[8]    [4,2]<=[2,4]T(1,0)     an iota, (transposed and) reshaped
    mesh['h'=2,'g'=4] {'g'}              jax 0.12: along mesh axes, in the order given
    mesh['a'=4,'b'=2], device_ids=([2,2,2]T(0,2,1)) {'a':(2)2}    a part of an axis
"""

import math
import re
from functools import lru_cache
from itertools import pairwise

import numpy as np

_END = r"(?=, |$)"
_LISTED = re.compile(r"\{((?:\{\d+(?:,\d+)*\}(?:,(?=\{))?)*)\}" + _END)
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?" + _END)
_AXIS = r"(?:'[^']*'|\w+)"
_MESH = re.compile(
    rf"mesh\[((?:{_AXIS}=\d+,?)+)\](?:, device_ids=\(([\[\]\d,]+)(?:T\(([\d,]+)\))?\))?"
    rf" \{{((?:{_AXIS}(?::\(\d+\)\d+)?,?)*)\}}" + _END
)


def listed(text: str) -> tuple[tuple[int, ...], ...] | None:
    """A list of lists at the start of text, or None if there is none.

    >>> listed("{{0,1},{2,3}}, metadata={}")
    ((0, 1), (2, 3))
    """
    found = _LISTED.match(text)
    return _lists(found[1]) if found else None


@lru_cache(maxsize=64)  # long lists are the same in many lines: the rounds of a ring
def _lists(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(_ints(t) for t in re.findall(r"\{([\d,]*)\}", text))


def replica_groups(
    text: str, replica_count: int = 1, num_partitions: int = 1
) -> tuple[tuple[int, ...], ...]:
    """The groups of devices that text, an attribute's value and what follows it, starts with.

    >>> replica_groups("[4,2]<=[2,4]T(1,0)")
    ((0, 4), (1, 5), (2, 6), (3, 7))

    Raises:
      ValueError: the text is none of the known forms, or its sizes do not fit.
    """
    groups = listed(text)
    if groups == ():
        if replica_count > 1 and num_partitions > 1:
            raise ValueError("{} says nothing where there are both replicas and partitions")
        return (tuple(range(replica_count * num_partitions)),)
    if groups is not None:
        return groups
    if found := _IOTA.match(text) or _MESH.match(text):
        return _short(found[0])
    raise ValueError("it has none of the known forms")


@lru_cache(maxsize=64)
def _short(text: str) -> tuple[tuple[int, ...], ...]:
    if found := _IOTA.fullmatch(text):
        grouped = _iota(_ints(found[2]), found[3]).reshape(_ints(found[1]))
    elif found := _MESH.fullmatch(text):
        grouped = _mesh_groups(*found.groups())
    else:
        raise ValueError("it is neither an iota nor of a mesh")
    return tuple(tuple(group) for group in grouped.tolist())


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(t) for t in text.split(",") if t)


def _iota(shape: tuple[int, ...], transposed: str | None) -> np.ndarray:
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose(_ints(transposed)) if transposed else ids


def _mesh_groups(
    axes: str, device_ids: str | None, transposed: str | None, grouped: str
) -> np.ndarray:
    """Groups along mesh axes; `'a':(p)s` is the part of axis `a` of size s, to the right of size p.

    >>> _mesh_groups("'h'=2,'g'=4", None, None, "'g':(2)2").tolist()
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    """
    sizes = {name: int(size) for name, size in re.findall(rf"({_AXIS})=(\d+)", axes)}
    if device_ids is None:
        ids = np.arange(math.prod(sizes.values()))
    elif device_ids.startswith("["):
        ids = _iota(_ints(device_ids.strip("[]")), transposed)
    else:
        ids = np.array(_ints(device_ids))
    parts = [
        (name, int(pre or 1), int(size or sizes.get(name, 1)))
        for name, pre, size in re.findall(rf"({_AXIS})(?::\((\d+)\)(\d+))?", grouped)
    ]
    if unknown := {name for name, _, _ in parts} - sizes.keys():
        raise ValueError(f"the mesh has no axis {min(unknown)}")
    # Cut each axis where a part of it begins or ends: the pieces become dimensions of their own.
    dims: list[int] = []
    pieces: list[tuple[str, int]] = []
    for name, size in sizes.items():
        cuts = sorted({1, size} | {c for n, pre, s in parts if n == name for c in (pre, pre * s)})
        for low, high in pairwise(cuts):
            if low < 1 or high % low or high > size:
                raise ValueError(f"the parts of axis {name} do not divide it")
            pieces.append((name, low))
            dims.append(high // low)
    inside = [
        i
        for name, pre, s in parts
        for i, (n, low) in enumerate(pieces)
        if n == name and pre <= low < pre * s
    ]
    outside = [i for i in range(len(dims)) if i not in inside]
    width = math.prod(dims[i] for i in inside)
    return ids.reshape(dims).transpose(outside + inside).reshape(-1, width)
