"""What runs in each host: the programs in turns, and what crosses the link meanwhile."""

import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import collc
from hosts import programs
from hosts.names import STEP
from hosts.network import INTERFACE, Counters
from hosts.programs import Program

# Bytes for each device, how often it is called in a turn, and its share of the turns.
SIZES = {64 << 10: (8, 1.0), 1 << 20: (2, 1.0), 16 << 20: (1, 1 / 3)}


def work(coordinator: str, hosts: int, me: int, turns: int) -> None:
    """Measures once for each line of the standard input, and answers each with a line of JSON."""
    mesh = collc.init(coordinator, hosts, me)
    barrier = programs.barrier(mesh)
    jobs: dict[str, tuple[dict[str, Program], int, float]] = {
        str(size): (programs.reductions(mesh, size), *often) for size, often in SIZES.items()
    }
    jobs[STEP] = (programs.steps(mesh), 1, 1.0)
    for key, (these, _, _) in jobs.items():  # connects, and finds memory
        in_turns(these, 1, 1, barrier)
        if me == 0:
            print(f"{key} is warm", file=sys.stderr)
    for _ in sys.stdin:
        found = {
            key: {
                "times": in_turns(these, calls, math.ceil(share * turns), barrier),
                "account": {name: program.account for name, program in these.items()},
                "unlike": [name for name, program in these.items() if not program.alike],
            }
            for key, (these, calls, share) in jobs.items()
        }
        print(json.dumps(found), flush=True)


def in_turns(
    these: Mapping[str, Program], calls: int, turns: int, barrier: Any
) -> dict[str, dict[str, list[float]]]:
    """Of every program, turn by turn and for one call: seconds, bytes received and bytes sent here.

    All hosts begin a program's calls together, in the same random order, after all have ended the
    one before; so what the counters say in between is this program's.
    """
    names, order = list(these), np.random.default_rng(0)
    found: dict[str, dict[str, list[float]]] = {
        name: {"seconds": [], "received": [], "sent": []} for name in names
    }
    last = {name: program.start for name, program in these.items()}
    for _ in range(turns):
        for name in order.permutation(names).tolist():
            barrier()
            before, began = counters(), time.perf_counter()
            for _ in range(calls):
                last[name] = these[name].call(last[name])
            seconds = time.perf_counter() - began
            barrier()
            after = counters()
            found[name]["seconds"].append(seconds / calls)
            found[name]["received"].append((after.received - before.received) / calls)
            found[name]["sent"].append((after.sent - before.sent) / calls)
    return found


def counters() -> Counters:
    """What has crossed the link of the host that this process is in."""
    for line in Path("/proc/self/net/dev").read_text(encoding="utf-8").splitlines():
        name, _, rest = line.strip().partition(":")
        if name == INTERFACE:
            numbers = rest.split()
            return Counters(int(numbers[0]), int(numbers[8]))
    raise RuntimeError(f"this process is in no emulated host: it has no {INTERFACE}")
