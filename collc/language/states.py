"""The states of an axis, and the collectives that lead from one to another.

partial   every rank: the whole buffer, its own addend
shard     rank c: chunk c of n, finished
replica   every rank: the whole, finished
root      one rank: the whole, finished; or k ranks, rank c: chunk c of k
outbox    rank r: the chunks (r, .)
inbox     rank r: the chunks (., r)
"""

from dataclasses import dataclass
from typing import Final

PARTIAL: Final = "partial"
SHARD: Final = "shard"
REPLICA: Final = "replica"
ROOT: Final = "root"
OUTBOX: Final = "outbox"
INBOX: Final = "inbox"


@dataclass(frozen=True)
class Kind:
    """A collective: the state that it needs, the one that it leaves, and its dual's name.

    ``scatters``: whether chunk c belongs to rank c, so that there are n of them. Where not, a
    leaf may cut the buffer in as many chunks as it likes.
    """

    name: str
    before: str
    after: str
    dual: str
    scatters: bool

    def __str__(self) -> str:
        return self.name


KINDS: Final[dict[str, Kind]] = {
    kind.name: kind
    for kind in (
        Kind("all_reduce", PARTIAL, REPLICA, "all_reduce", scatters=False),
        Kind("reduce_scatter", PARTIAL, SHARD, "all_gather", scatters=True),
        Kind("all_gather", SHARD, REPLICA, "reduce_scatter", scatters=True),
        Kind("reduce", PARTIAL, ROOT, "broadcast", scatters=False),
        Kind("broadcast", ROOT, REPLICA, "reduce", scatters=False),
        Kind("gather", SHARD, ROOT, "scatter", scatters=True),
        Kind("scatter", ROOT, SHARD, "gather", scatters=True),
        Kind("all_to_all", OUTBOX, INBOX, "all_to_all", scatters=True),
    )
}


# Those that have a function of their own in lax, so that they can be planned, called and timed.
COLLECTIVES: Final = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")


def kind_between(before: str, after: str) -> Kind | None:
    """The collective that leads from one state to the other, if there is one."""
    return next((k for k in KINDS.values() if (k.before, k.after) == (before, after)), None)
