"""Rounds: a step cut into partial permutations, by edge colouring."""

from dataclasses import dataclass

import numpy as np

from collc.language.ir import Ints, Program, Step


@dataclass(frozen=True, eq=False)
class Round:
    """Sends in which a rank sends to at most one rank and receives from at most one: one ``ppermute``.

    ``sends`` has the fields of its step, restricted; equal (source, destination) pairs travel together.
    """

    step: int
    sends: Step


def rounds(program: Program) -> list[Round]:
    """The program's rounds, in order: as many for a step as its busiest rank has partners."""
    return [
        Round(t, step.pick(colour == k))
        for t, step in enumerate(program.steps)
        for colour in [colours(program, step)]
        for k in range(int(colour.max(initial=-1)) + 1)
    ]


def colours(program: Program, step: Step) -> Ints:
    """The round, within its step, of each send, [m].

    An orbit's sends to distance d are a permutation of all ranks, so each distance is a round.
    Elsewhere König: a bipartite graph has an edge colouring with as many colours as its degree.
    """
    if step.orbit:
        pair = step.dst
    else:
        pair = step.src * program.n + step.dst
    _, first, index = np.unique(pair, return_index=True, return_inverse=True)
    # Pairs in the order of their first send, so that the order in the source is what counts.
    order = np.argsort(first)
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    if step.orbit:
        return position[index]
    edges = first[order]
    return colouring(step.src[edges], step.dst[edges])[position[index]]


def colouring(src: Ints, dst: Ints) -> Ints:
    """A proper edge colouring of a bipartite multigraph with the fewest colours, [edges]."""
    colour = np.zeros(len(src), np.int64)
    if len(np.unique(src)) == len(src) and len(np.unique(dst)) == len(dst):
        return colour
    # at[side, node] maps a colour to the edge that has it there.
    at: dict[tuple[int, int], dict[int, int]] = {}
    for e, (s, d) in enumerate(zip(src.tolist(), dst.tolist(), strict=True)):
        left, right = at.setdefault((0, s), {}), at.setdefault((1, d), {})
        a, b = _free(left), _free(right)
        if a in right and b not in left:
            a = b  # free at both ends: rounds in the order of the source, where that can be
        elif a in right:
            _swap(at, colour, src, dst, (1, d), a, b)
        left[a] = right[a] = e
        colour[e] = a
    return colour


def _free(used: dict[int, int]) -> int:
    k = 0
    while k in used:
        k += 1
    return k


def _swap(
    at: dict[tuple[int, int], dict[int, int]],
    colour: Ints,
    src: Ints,
    dst: Ints,
    node: tuple[int, int],
    a: int,
    b: int,
) -> None:
    """Exchange the colours a and b along the path from ``node`` that begins with a."""
    path: list[int] = []
    here, want = node, a
    while (e := at[here].get(want)) is not None:
        path.append(e)
        here = (0, int(src[e])) if here[0] else (1, int(dst[e]))
        want = b if want == a else a
    for e in path:
        for end in ((0, int(src[e])), (1, int(dst[e]))):
            del at[end][int(colour[e])]
        colour[e] = b if colour[e] == a else a
    # Written after all are removed: on the path, neighbours hold each other's new colours.
    for e in path:
        for end in ((0, int(src[e])), (1, int(dst[e]))):
            at[end][int(colour[e])] = e
