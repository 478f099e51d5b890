"""What goes wrong on a machine: ranks that are late, slow or broken, links that are slow or broken.

    fault ::= "late rank" R "by" TIME    it starts so much later        late rank 3 by 5ms
            | "slow rank" R "x"TIMES     all that it does takes longer  slow rank 3 x2
            | "broken rank" R            it never sends                 broken rank 3
            | "slow link" NAME "x"TIMES  bytes take longer over it      slow link node1/gpu0 -> switch x4
            | "broken link" NAME         what goes over it never comes  broken link rack1 up
            | "slow nic" I "of node" J "x"TIMES | "broken nic" I "of node" J, both directions

NAME is what ``Machine.name`` says, or the beginning of several, as node1 or node1/nic0.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collc.errors import MachineError, nearest
from collc.machine.placement import Placement
from collc.machine.topology import Floats, Machine
from collc.machine.units import parse_time, seconds

MOST_TIMES = 1e6
EXAMPLES = (
    "late rank 3 by 5ms, slow rank 3 x2, broken rank 3, slow link node1/nic0 x4, "
    "broken link node1/nic0, slow nic 0 of node 1 x4, broken nic 0 of node 1"
)


@dataclass(frozen=True)
class LateRank:
    """A rank that starts ``seconds`` after the others."""

    rank: int
    seconds: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise MachineError(f"late by {self.seconds} s is not late. Give more than 0 s.")

    def __str__(self) -> str:
        return f"late rank {self.rank} by {seconds(self.seconds)}"


@dataclass(frozen=True)
class SlowRank:
    """A rank for which all that it sends, adds and computes takes ``times`` as long."""

    rank: int
    times: float

    def __post_init__(self) -> None:
        _slower(self.times)

    def __str__(self) -> str:
        return f"slow rank {self.rank} x{self.times:g}"


@dataclass(frozen=True)
class BrokenRank:
    """A rank that never does anything."""

    rank: int

    def __str__(self) -> str:
        return f"broken rank {self.rank}"


@dataclass(frozen=True)
class SlowLink:
    """Links over which bytes take ``times`` as long: one name, or the beginning of several."""

    name: str
    times: float

    def __post_init__(self) -> None:
        _slower(self.times)

    def __str__(self) -> str:
        return f"slow {_called(self.name)} x{self.times:g}"


@dataclass(frozen=True)
class BrokenLink:
    """Links over which nothing ever arrives: one name, or the beginning of several."""

    name: str

    def __str__(self) -> str:
        return f"broken {_called(self.name)}"


Fault = LateRank | SlowRank | BrokenRank | SlowLink | BrokenLink
_NIC = r"nic (\d+) of node (\d+)"
_TIMES = r"x([0-9]+(?:\.[0-9]+)?)"


def parse_fault(text: str) -> Fault:
    """A fault from its text: see the module. Raises MachineError.

    >>> parse_fault("slow rank 3 x2")
    SlowRank(rank=3, times=2.0)
    >>> str(parse_fault("broken nic 0 of node 1"))
    'broken nic 0 of node 1'
    """
    words = " ".join(text.split())
    if found := re.fullmatch(r"late rank (\d+) by (.+)", words, re.ASCII):
        return LateRank(int(found[1]), parse_time(found[2]))
    if found := re.fullmatch(rf"slow rank (\d+) {_TIMES}", words, re.ASCII):
        return SlowRank(int(found[1]), float(found[2]))
    if found := re.fullmatch(r"broken rank (\d+)", words, re.ASCII):
        return BrokenRank(int(found[1]))
    if found := re.fullmatch(rf"slow (?:link (\S.*)|({_NIC})) {_TIMES}", words, re.ASCII):
        return SlowLink(found[1] or found[2], float(found[5]))
    if found := re.fullmatch(rf"broken (?:link (\S.*)|({_NIC}))", words, re.ASCII):
        return BrokenLink(found[1] or found[2])
    raise MachineError(f"{text!r} is no fault. Write one as in: {EXAMPLES}.")


def _slower(times: float) -> None:
    if not 1 < times <= MOST_TIMES:
        raise MachineError(
            f"x{times:g} cannot be. Give how often as long: more than 1, and at most {MOST_TIMES:g}; or "
            "say broken."
        )


def _called(name: str) -> str:
    return name if re.fullmatch(_NIC, name) else f"link {name}"


@dataclass(frozen=True, eq=False)
class Damage:
    """What faults do to ranks and links of a machine.

    Attributes:
      late: seconds by which each rank starts later, [ranks].
      slow: how often as long each rank takes, [ranks].
      dead: ranks that do nothing, [ranks].
      beta: seconds per byte of every link, [links].
      broken: links over which nothing arrives, [links].
      links: of each fault the links that it is about.
    """

    late: Floats
    slow: Floats
    dead: NDArray[np.bool_]
    beta: Floats
    broken: NDArray[np.bool_]
    links: tuple[tuple[int, ...], ...]


def damage(faults: Sequence[Fault], placement: Placement) -> Damage:
    """The damage of several faults at once. Raises MachineError for what is not there."""
    machine, n = placement.machine, len(placement.order)
    late, slow, dead = np.zeros(n), np.ones(n), np.zeros(n, bool)
    beta, broken = machine.beta.copy(), np.zeros(len(machine.beta), bool)
    about = []
    for fault in faults:
        links: tuple[int, ...] = ()
        if isinstance(fault, SlowLink | BrokenLink):
            links = links_named(machine, fault.name)
        elif not 0 <= fault.rank < n:
            raise MachineError(f"{fault}: there is no such rank. Name one from 0 to {n - 1:,}.")
        match fault:
            case LateRank(rank, by):
                late[rank] += by
            case SlowRank(rank, times):
                slow[rank] *= times
            case BrokenRank(rank):
                dead[rank] = True
            case SlowLink(_, times):
                beta[list(links)] *= times
            case BrokenLink(_):
                broken[list(links)] = True
        about.append(links)
    return Damage(late, slow, dead, beta, broken, tuple(about))


def links_named(machine: Machine, name: str) -> tuple[int, ...]:
    """The links of that name, or whose names begin with it as a whole word. Raises MachineError."""
    if found := re.fullmatch(_NIC, name):
        links = _nic(machine, int(found[1]), int(found[2]))
    else:
        links = [k for k in _near(machine, name) if _begins(machine.name(k), name)]
    if not links:
        known = [machine.name(k) for k in _near(machine, name)]
        raise MachineError(f"{machine} has no link {name!r}. {nearest(name, _few(name, known))}")
    return tuple(links)


def _begins(whole: str, name: str) -> bool:
    return whole == name or whole.startswith((f"{name} ", f"{name}/"))


def _near(machine: Machine, name: str) -> Iterable[int]:
    """The links among which it can be: a machine of 65,536 ranks has half a million."""
    own = len(machine.node.links)
    total, uplinks = len(machine.beta), range(own * machine.nodes, len(machine.beta))
    if name.startswith("rack") and uplinks:
        return uplinks
    found = re.match(r"node(\d+)", name)
    node = int(found[1]) if found and int(found[1]) < machine.nodes else 0
    return (*range(node * own, node * own + own), *(uplinks if total < 1000 else ()))


def _few(name: str, known: list[str]) -> list[str]:
    """Whole names and their beginnings, so that near ones of either are found."""
    starts = {k.split(" ")[0] for k in known} if " " not in name else set()
    return sorted(starts or known)[:64]


def _nic(machine: Machine, nic: int, node: int) -> list[int]:
    """Out of a NIC and into it, as the devices use it."""
    own = np.flatnonzero(machine.node.nic == nic)
    if node >= machine.nodes or not len(own):
        raise MachineError(
            f"{machine} has no NIC {nic} of node {node} that a device uses: "
            f"nodes are 0 to {machine.nodes - 1:,}, NICs of a node "
            f"{', '.join(str(k) for k in np.unique(machine.node.nic) if k >= 0) or 'none'}. "
            "Name one of them."
        )
    device, base = int(own[0]), node * len(machine.node.links)
    leave, enter = machine.node.leave[device], machine.node.enter[device]
    return [base + int(leave[leave >= 0][-1]), base + int(enter[enter >= 0][0])]
