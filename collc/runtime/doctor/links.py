"""Links: which one is much slower than its peers. Pure; ``sweep`` measures them."""

from collections.abc import Mapping

from collc.machine import units
from collc.runtime.doctor.finding import Finding, note, ok, warning

CHECK = "links"
SLOW = 2.0  # times what the fastest quarter takes at most
Link = tuple[str, str]  # from, to

HOST = (
    "ethtool INTERFACE shows the speed that it has negotiated, ibstat an RDMA port's; see the cable and "
    "the switch port, and leave {} out until it is repaired."
)
DEVICE = "See nvidia-smi topo -m and nvidia-smi nvlink --status for how these GPUs are connected."


def rounds(n: int, together: bool) -> list[list[tuple[int, int]]]:
    """All pairs of 0 to n - 1, those of a round without an end in common (the circle method).

    >>> rounds(4, together=True)
    [[(0, 3), (1, 2)], [(0, 2), (3, 1)], [(0, 1), (2, 3)]]
    >>> rounds(3, together=False)
    [[(1, 2)], [(0, 2)], [(0, 1)]]
    """
    ring = [*range(n), *([None] if n % 2 else [])]
    found = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        found.append([(a, b) for a, b in pairs if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found if together else [[pair] for pairs in found for pair in pairs]


def usual(seconds: Mapping[Link, float]) -> float:
    """What a link takes that is well: of the fastest quarter the slowest.

    Not the median: of few hosts, one that is slow is at one end of half of all links.
    """
    times = sorted(seconds.values())
    return times[(len(times) - 1) // 4]


def suspects(seconds: Mapping[Link, float]) -> list[Link]:
    """The links that take more than twice the usual time."""
    least = usual(seconds) if seconds else 0.0
    return [link for link, taken in seconds.items() if taken > SLOW * least]


def judge(
    seconds: Mapping[Link, float], size: int, kind: str = "host", shared: bool = False
) -> list[Finding]:
    """Findings on the time that each link, in one direction, takes for ``size`` bytes.

    An end all of whose links are slow is named itself, all others by their two ends.
    ``kind``: what ends are, host or device. ``shared``: all are on one machine's cores, so that a slow
    link is a busy core.
    """
    ends = list(dict.fromkeys(end for link in seconds for end in link))
    if not seconds:
        remedy = "Start it on several hosts (collc launch, srun, mpirun) to have theirs measured."
        return [note(CHECK, f"a single {kind} has none to measure", remedy)]
    if shared:
        least, most = (
            units.seconds(taken) for taken in (min(seconds.values()), max(seconds.values()))
        )
        what = (
            f"{len(seconds)} links of {len(ends)} {kind}s, {least} to {most} for {units.size(size)}. "
            f"The {kind}s share this machine and its cores, so the times tell nothing of a network"
        )
        return [
            note(CHECK, what, "Start it on the machines of the run to have their links measured.")
        ]
    if len(ends) < 3:
        each = ", ".join(f"{a} -> {b} {shown(taken, size)}" for (a, b), taken in seconds.items())
        what = f"{each}. Two {kind}s have no peers that would tell whether that is slow"
        return [note(CHECK, what, "Compare it with what the network is for, or start a third.")]
    slow = suspects(seconds)
    if not slow:
        a, b = max(seconds, key=lambda link: seconds[link])
        what = (
            f"{len(seconds)} links of {len(ends)} {kind}s alike: {shown(usual(seconds), size)}, the "
            f"slowest, {a} -> {b}, {units.seconds(seconds[a, b])}"
        )
        return [ok(CHECK, what)]
    found, rest = [], list(slow)
    for end in ends:
        out = [link for link in seconds if link[0] == end]
        into = [link for link in seconds if link[1] == end]
        ways = [way for way in (out, into) if all(link in slow for link in way)]
        if not ways:
            continue
        links = [link for way in ways for link in way]
        what = (
            "all that it sends and receives"
            if len(ways) == 2
            else ("all that it sends" if ways[0] is out else "all that it receives")
        )
        middle = sorted(seconds[link] for link in links)[len(links) // 2]
        found.append(_slow(f"{kind} {end}, {what},", middle, seconds, size, _on(kind, end)))
        rest = [link for link in rest if link not in links]
    pairs: dict[frozenset[str], list[Link]] = {}
    for link in rest:
        pairs.setdefault(frozenset(link), []).append(link)
    for links in pairs.values():
        a, b = links[0]
        arrow = "<->" if len(links) == 2 else "->"
        taken = max(seconds[link] for link in links)
        found.append(_slow(f"link {a} {arrow} {b}", taken, seconds, size, _on(kind, a, b)))
    return found


def shown(taken: float, size: int) -> str:
    """A time with its rate.

    >>> shown(0.0084, 1 << 20)
    '8.4 ms for 1 MiB (125 MB/s)'
    """
    return f"{units.seconds(taken)} for {units.size(size)} ({units.bandwidth(size / taken)})"


def _on(kind: str, *ends: str) -> str:
    """Where to look, and at what."""
    out = "the host" if len(ends) == 1 else "one of them"
    return f"On {' and '.join(ends)}: {HOST.format(out)}" if kind == "host" else DEVICE


def _slow(
    what: str, taken: float, seconds: Mapping[Link, float], size: int, remedy: str
) -> Finding:
    least = usual(seconds)
    text = (
        f"{what} takes {shown(taken, size)}, {taken / least:.1f} times what the others take "
        f"({units.seconds(least)})"
    )
    return warning(CHECK, text, remedy)
