"""Who never finishes, and whom each waits for, up to what is broken."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collc.language.ir import Ints
from collc.machine.simulation.jobs import Together
from collc.machine.simulation.tables import Desk
from collc.machine.simulation.track import Track
from collc.machine.topology import Floats, Machine


@dataclass(frozen=True)
class Stall:
    """A rank that never finishes.

    Attributes:
      rank: which one.
      title, step: the leaf and the step of it that it is never through with; "" where it is broken.
      waits: the rank for which it waits there; None where it is broken, or waits for a lost message.
      cause: what everybody up the chain waits for: "rank 5 is broken", or a link.
      share: the part of its steps that it has done.
    """

    rank: int
    title: str
    step: int
    waits: int | None
    cause: str
    share: float

    def __str__(self) -> str:
        if not self.title:
            return self.cause
        whom = "" if self.waits is None else f" waits for rank {self.waits}:"
        return (
            f"rank {self.rank}, {self.title} step {self.step},{whom} {self.cause}; "
            f"{self.share:.0%} of its steps done"
        )


@dataclass(frozen=True, eq=False)
class Stalls:
    """The ranks that never finish, as arrays of one length; iterating gives each as a ``Stall``.

    ``waits``: -1 is nobody; ``link``: the broken link at the end of the chain, -1 where it is a rank;
    ``origin``: the rank at the end of the chain.
    """

    machine: Machine
    titles: tuple[str, ...]
    rank: Ints
    title: Ints
    step: Ints
    waits: Ints
    link: Ints
    origin: Ints
    share: Floats

    def __len__(self) -> int:
        return len(self.rank)

    def __iter__(self) -> Iterator[Stall]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> Stall:
        at = int(self.title[i])
        waits = int(self.waits[i])
        return Stall(
            rank=int(self.rank[i]),
            title="" if at < 0 else self.titles[at],
            step=int(self.step[i]),
            waits=None if waits < 0 else waits,
            cause=self.cause(i),
            share=float(self.share[i]),
        )

    def cause(self, i: int) -> str:
        """What is at the end of the chain that a rank waits for."""
        if self.link[i] >= 0:
            return f"{self.machine.name(int(self.link[i]))} is broken"
        return f"rank {int(self.origin[i])} is broken"


def stalls(tracks: Sequence[Track], desk: Desk, finish: Floats) -> Stalls:
    """Who never finishes, whom each waits for, and what is at the end of the chain."""
    n = desk.ranks
    titles = dict.fromkeys(act.title for t in tracks for act in t.job.acts)
    number = {title: i for i, title in enumerate(titles)}
    title, step = np.full(n, -1), np.zeros(n, np.int64)
    waits, link = np.full(n, -1), np.full(n, -1)
    for track in tracks:
        stuck = np.flatnonzero(np.isfinite(track.start) & (title < 0))
        now = track.step(stuck)
        for k in np.unique(now).tolist():
            own = stuck[now == k]
            title[own] = number[track.job.act(k).title]
            step[own] = track.job.steps[k]
            here = np.zeros(n, bool)
            here[own] = True
            _blame(track, desk, k, here, waits, link)
    rank = np.flatnonzero(np.isinf(finish))
    # Follow the chain from each to its end, twice as far each time.
    origin = np.where(waits < 0, np.arange(n), waits)
    for _ in range(n.bit_length()):
        origin = origin[origin]
    total = np.sum([t.agenda.count for t in tracks], axis=0)
    done = np.sum([t.at for t in tracks], axis=0)
    share = (done / np.maximum(total, 1))[rank]
    own = (title[rank], step[rank], waits[rank], link[origin[rank]], origin[rank])
    return Stalls(desk.machine, tuple(titles), rank, *own, share)


def _blame(
    track: Track, desk: Desk, k: int, here: NDArray[np.bool_], waits: Ints, link: Ints
) -> None:
    """For ranks in a step that they are never through with: a lost message, else who has not sent."""
    act = track.job.act(k)
    every = np.arange(desk.ranks)
    present = track.step(every)
    # Sent: it is past this step, or in it with its messages gone.
    sent = (track.at >= track.agenda.count) | (present > k) | ((present == k) & track.gone)
    if isinstance(act, Together):
        for group in act.groups.T[here[act.groups[0]] | here[act.groups].any(0)]:
            absent = group[~sent[group]]
            waits[group[here[group]]] = absent[0]
        return
    table = desk.table(act)
    missing = np.flatnonzero(here[table.dst] & ~sent[table.src])[::-1]
    waits[table.dst[missing]] = table.src[missing]  # the first of several stays
    for row in np.flatnonzero(np.isinf(table.floor))[::-1].tolist():
        src, dst = int(table.src[row]), int(table.dst[row])
        for end in (src, dst) if sent[src] else ():
            if here[end]:
                waits[end], link[end] = -1, _broken(desk, src, dst)


def _broken(desk: Desk, src: int, dst: int) -> int:
    """The first broken link between two ranks."""
    a, b = (desk.placement.order[[rank]] for rank in (src, dst))
    links = desk.machine.paths(a, b).links[0]
    return next(k for k in links.tolist() if k >= 0 and desk.damage.broken[k])
