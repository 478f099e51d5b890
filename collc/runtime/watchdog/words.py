"""How processes and where they are is said."""

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from collc.runtime.watchdog.beats import DONE, FAILED, Beat

if TYPE_CHECKING:
    from collc.runtime.watchdog.judge import View

MOST = 3  # that are named one by one


def ranges(processes: Iterable[int]) -> str:
    """
    >>> ranges([0, 2, 3, 4, 6, 7])
    '0, 2-4, 6, 7'
    """
    runs: list[list[int]] = []
    for process in sorted(processes):
        if runs and process == runs[-1][-1] + 1:
            runs[-1].append(process)
        else:
            runs.append([process])
    said = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(said)


def numbers(processes: Collection[int]) -> str:
    """
    >>> numbers([5]), numbers([5, 6, 7])
    ('process 5', 'processes 5-7')
    """
    return f"process{'es' * (len(processes) > 1)} {ranges(processes)}"


def name(process: int, beat: Beat) -> str:
    """One process, with its host."""
    return f"process {process} on host {beat.host}"


def names(beats: Mapping[int, Beat]) -> str:
    """Processes with their hosts, shortly where there are many or all are on one.

    >>> names({p: Beat(f"h{p // 2}", 1) for p in (2, 3)})
    'processes 2, 3 on host h1'
    >>> names({p: Beat(f"h{p // 2}", 1) for p in range(5)})
    'process 0 on host h0, process 1 on host h0, process 2 on host h1 and 2 more'
    """
    hosts = {beat.host for beat in beats.values()}
    if len(hosts) == 1:
        return f"{numbers(beats)} on host {hosts.pop()}"
    said = [name(process, beat) for process, beat in beats.items()]
    if len(said) > MOST:
        return f"{', '.join(said[:MOST])} and {len(said) - MOST} more"
    return f"{', '.join(said[:-1])} and {said[-1]}"


def places(beats: Iterable[Beat]) -> str:
    """Where they are, each place once."""
    said = sorted({(beat.step, beat.phase): str(beat) for beat in beats}.items())
    shown = [text for _, text in said[:MOST]] + ["..."] * (len(said) > MOST)
    return ", ".join(shown)


def has(processes: Collection[int]) -> str:
    """The verb of so many."""
    return "have" if len(processes) > 1 else "has"


def positions(beats: Mapping[int, Beat], culprits: Collection[int]) -> str:
    """Who is behind whom: "process 5 on host h2 has been at step 41 (input), the others at ..."."""
    here = {p: beat for p, beat in beats.items() if p in culprits}
    rest = {p: beat for p, beat in beats.items() if p not in culprits}
    if not here:
        return f"all {len(beats)} processes have been at {places(beats.values())}, none behind another,"
    said = f"{names(here)} {has(here)} been at {places(here.values())}"
    if not rest:
        return said
    return f"{said}, the other{'s' * (len(rest) > 1)} at {places(rest.values())}"


def table(view: "View", now: float) -> list[str]:
    """Who is where, a line for all that are alike; the fewest first, since they are the odd ones."""
    groups: dict[str, list[int]] = {}
    for process, seen in view.seen.items():
        ended = f", {seen.beat.state}" if seen.beat.state in (DONE, FAILED) else ""
        groups.setdefault(f"{seen.beat}{ended}", []).append(process)
    lines = []
    for place, processes in sorted(groups.items(), key=lambda group: len(group[1])):
        beats = {p: view.seen[p].beat for p in processes}
        who = names(beats) if len(processes) <= MOST else numbers(processes)
        moved = now - max(view.seen[p].moved for p in processes)
        heard = now - max(view.seen[p].heard for p in processes)
        lines.append(f"{who}: {place}, moved {moved:.0f} s ago, heard of {heard:.0f} s ago")
    missing = [p for p in range(view.n) if p not in view.seen]
    return lines + ([f"{numbers(missing)}: never heard of"] if missing else [])
