"""Servers, each with its queue: first come, first served."""

import numpy as np

from collc.language.ir import Ints
from collc.machine.topology import Floats


def serve(wanted: Ints, service: Floats, come: Floats, free: Floats) -> Floats:
    """When each of a batch of messages is served by each of its servers, [m, k].

    Args:
      wanted: the servers of each message, in the order in which they come; -1 is none. [m, k]
      service: for how long, [m, k].
      come: when each comes, ascending, [m].
      free: when each server is free, [servers]; brought up to date.

    A server is never idle while one of its messages is there, and no server waits for another. The
    sums are those of a queue that is served message by message, so they are equal to the last digit.
    """
    m, k = wanted.shape
    begin = np.repeat(come, k)
    flat = wanted.reshape(-1)
    some = np.flatnonzero(flat >= 0)
    some = some[np.argsort(flat[some], kind="stable")]
    server, length = flat[some], service.reshape(-1)[some]
    if not len(server):
        return begin.reshape(m, k)
    first = np.flatnonzero(np.concatenate([[True], server[1:] != server[:-1]]))
    count = np.diff(np.append(first, len(server)))
    here = np.maximum(begin[some[first]], free[server[first]])
    begin[some[first]] = here
    end = here + length[first]
    for i in range(1, int(count.max())):
        more = np.flatnonzero(count > i)
        if len(more) <= 4:  # a few long queues: quicker one by one
            for j in more.tolist():
                rows = some[first[j] + i : first[j] + count[j]]
                begin[rows], end[j] = _one(
                    begin[rows], length[first[j] + i : first[j] + count[j]], end[j]
                )
            break
        at = first[more] + i
        here = np.maximum(begin[some[at]], end[more])
        begin[some[at]] = here
        end[more] = here + length[at]
    free[server[first]] = end
    return begin.reshape(m, k)


def _one(come: Floats, length: Floats, free: float) -> tuple[list[float], float]:
    begin = []
    for t, s in zip(come.tolist(), length.tolist()):
        t = t if t > free else float(free)
        begin.append(t)
        free = t + s
    return begin, free
