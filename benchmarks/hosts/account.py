"""What a compiled program sends over each host's link, by its receipt."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collc.receipts.hlo import CollectivePermute
from collc.receipts.receipt import Receipt
from collc.receipts.spans import sent


def crossing(receipt: Receipt, host_of: NDArray[np.int64]) -> dict[str, Any]:
    """Bytes of one call that each host receives and sends over its link, [hosts] each.

    ``host_of``: the host of each device of the mesh, [devices]. Permutes are exact. XLA's own count
    as rings that lead through each host once, as gloo's do where the mesh is in the order of hosts.
    """
    hosts = int(host_of.max()) + 1
    found = {}
    for way in ("received", "sent"):
        total = np.zeros(hosts)
        for entry in receipt.entries:
            one = entry.collective
            if way == "received" and isinstance(one, CollectivePermute):
                one = replace(one, pairs=tuple((b, a) for a, b in one.pairs))
            total += np.bincount(host_of, sent(one, host_of)[1], hosts)
        found[way] = total.tolist()
    return found
