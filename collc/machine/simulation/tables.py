"""An act on a machine: which servers each message wants and for how long, faults included."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from collc.errors import MachineError
from collc.language.ir import Ints
from collc.machine import nccl
from collc.machine.placement import Placement
from collc.machine.simulation.faults import (
    BrokenLink,
    BrokenRank,
    Damage,
    Fault,
    LateRank,
    SlowLink,
    SlowRank,
    damage,
)
from collc.machine.simulation.jobs import Job, Model, Sends, Together
from collc.machine.topology import NETWORK, Floats

_KEPT = 128  # tables: of a pairwise exchange among thousands each is as large as all ranks


@dataclass(frozen=True, eq=False)
class Table:
    """The messages of an act, [m], in the order in which they come when all leave at once.

    Attributes:
      src, dst, bytes: as in ``jobs.Load``.
      key: by which messages that leave at the same time are ordered.
      servers: what serves each: the port out, the links of its way, the port in; -1 is none. [m, k]
      service: for how long each of them does, [m, k].
      passing: and how long it takes until the message is through, its latency included, [m, k].
      floor: how long a message takes that waits for nobody; inf for one that never arrives.
      latency: the part of it that is latency; link: the link on which its bytes take longest, [m].
      need, sends: how many messages each rank receives, and whether it sends any, [ranks].
      adding: seconds for which each rank adds what it has received, [ranks].
      least: seconds that the act takes a rank at least, [ranks].
      look: how soon after a rank's sends have left anybody can go on because of them, [ranks].
      crossed: the links that any of them crosses, [links].
      active: the ranks that send or add, [ranks].
    """

    src: Ints
    dst: Ints
    bytes: Floats
    key: Ints
    servers: Ints
    service: Floats
    passing: Floats
    floor: Floats
    latency: Floats
    link: Ints
    need: Ints
    sends: NDArray[np.bool_]
    adding: Floats
    least: Floats
    look: Floats
    crossed: NDArray[np.bool_]
    active: NDArray[np.bool_]


class Desk:
    """Makes the tables of acts, and keeps those used last."""

    def __init__(self, placement: Placement, faults: Sequence[Fault], model: Model) -> None:
        self.placement, self.machine, self.faults = placement, placement.machine, tuple(faults)
        self.damage: Damage = damage(faults, placement)
        self.ranks = len(placement.order)
        self.links = len(self.machine.beta)
        self.servers = self.links + 2 * self.machine.devices
        self.constants = nccl.constants(self.machine) if model == "lowered" else None
        self.beta = self.damage.beta
        if self.constants:
            self.beta = self.beta / self.constants.efficiency(self.machine)
        self.table = lru_cache(maxsize=_KEPT)(self._table)

    def _table(self, act: Sends) -> Table:
        load, machine, ports = act.messages(), self.machine, self.machine.ports
        n, m = self.ranks, len(load.src)
        a, b = self.placement.order[load.src], self.placement.order[load.dst]
        paths = machine.paths(a, b)
        slow = self.damage.slow[load.src]
        latency = self._latency(paths.latency, machine.node_of(a) != machine.node_of(b)) * slow
        links, on = paths.links, paths.links >= 0
        bytes = np.where(on, load.bytes[:, None] * self.beta[links] * slow[:, None], 0.0)
        # With one port the messages of a device are serial: its own links are busy for the latency too.
        rows, hops = np.arange(m), links.shape[1]
        ends = np.zeros(on.shape, bool)
        ends[rows, on.argmax(1)] = ends[rows, hops - 1 - on[:, ::-1].argmax(1)] = True
        port = (latency / ports)[:, None]
        served = np.where(ends, bytes + port, bytes)
        passed = np.where(on & ~ends, bytes + latency[:, None], served)
        servers = np.concatenate(
            [self.links + 2 * a[:, None], links, self.links + 2 * b[:, None] + 1], axis=1
        )
        service = np.concatenate([port, served, port], axis=1)
        floor = latency + bytes.max(1, initial=0.0)
        lost = (self.damage.broken[links] & on).any(1)
        servers[lost] = -1
        floor[lost] = np.inf
        crossed, active = np.zeros(self.links, bool), np.zeros(n, bool)
        crossed[links[on]] = True
        active[load.src] = active[load.dst[load.added > 0]] = True
        adding = np.bincount(load.dst, load.added, n) * machine.gamma * self.damage.slow
        least, leaves, soon = np.zeros(n), np.full(n, -np.inf), np.full(n, np.inf)
        if self.constants:
            np.maximum.at(least, load.src, latency)
            np.maximum.at(least, load.dst, latency)
        np.maximum.at(leaves, load.src[~lost], service[~lost, :-1].max(1))
        np.minimum.at(soon, load.src[~lost], floor[~lost])
        look = np.where(np.isfinite(soon), np.minimum(leaves, soon), 0.0)
        return Table(
            src=load.src,
            dst=load.dst,
            bytes=load.bytes,
            key=(load.round * n + load.src) * n + load.dst,
            servers=servers,
            service=service,
            passing=np.concatenate([port, passed, port], axis=1),
            floor=floor,
            latency=latency,
            link=links[rows, bytes.argmax(1)],
            need=np.bincount(load.dst, minlength=n),
            sends=np.bincount(load.src, minlength=n) > 0,
            adding=adding,
            least=least,
            look=look,
            crossed=crossed,
            active=active,
        )

    def _latency(self, latency: Floats, far: NDArray[np.bool_]) -> Floats:
        """Of a message's own; lowered, what its round takes beside its bytes."""
        if self.constants is None:
            return latency
        pairs, index = np.unique(np.stack([latency, far]), axis=1, return_inverse=True)
        each = [self.constants.round(late, bool(out)) for late, out in pairs.T.tolist()]
        return np.array(each)[index.reshape(-1)]

    def seconds(self, act: Together) -> Floats:
        """What each group takes: as long as its slowest rank, or as a slow link lets it, [groups].

        XLA's own is taken to spread its bytes alike over the links of a class, as NCCL does over its
        rings and NICs, so that the slowest holds up all.
        """
        slow = self.damage.slow[act.groups].max(0)
        if act.bytes is None:
            return act.seconds * slow
        worse = slow.copy()
        for link, groups in self.felt(act):
            times = self.damage.beta[link] / self.machine.beta[link]
            worse[groups] = np.maximum(worse[groups], times)
        return (act.seconds - act.bytes) * slow + act.bytes * worse

    def felt(self, act: Together) -> Iterator[tuple[int, NDArray[np.bool_]]]:
        """The slow links that one of XLA's own may use, and which of its groups do."""
        if not act.sends:
            return
        machine, own = self.machine, len(self.machine.node.links)
        devices = self.placement.order[act.groups]
        for link in sorted({k for links in self.damage.links for k in links}):
            inside = link < own * machine.nodes
            place = link // own if inside else (link - own * machine.nodes) // 2
            places = machine.node_of(devices) if inside else machine.rack_of(devices)
            here, apart = (places == place).any(0), (places != places[:1]).any(0)
            leaves = not inside or machine.node.links[link % own].kind == NETWORK
            yield link, here & apart if leaves else here

    def allowed(self, made: Sequence[Job]) -> None:
        """Raises MachineError where a link is broken that XLA's own collectives may use."""
        own = [
            act.title for job in made for act in job.acts if isinstance(act, Together) and act.sends
        ]
        bad = [str(f) for f in self.faults if isinstance(f, BrokenLink)]
        if own and bad:
            raise MachineError(
                f"{bad[0]}: nobody knows what {own[0]} does without it; NCCL ends the job, as a rule. "
                "Give slow links or faults of ranks, or a schedule without XLA's own collectives."
            )

    def without_effect(self, agendas: Iterable["Agenda"]) -> tuple[Fault, ...]:
        """The faults of what no job uses."""
        crossed, active = np.zeros(self.links, bool), np.zeros(self.ranks, bool)
        for own in agendas:
            crossed |= own.crossed
            active |= own.active

        def felt(fault: Fault, links: tuple[int, ...]) -> bool:
            match fault:
                case SlowRank(rank, _):
                    return bool(active[rank])
                case SlowLink() | BrokenLink():
                    return bool(crossed[list(links)].any())
                case LateRank() | BrokenRank():
                    return True  # the rank itself is late, or never done

        return tuple(f for f, k in zip(self.faults, self.damage.links) if not felt(f, k))


@dataclass(frozen=True, eq=False)
class Agenda:
    """Which steps of a job each rank takes part in: ``count`` of them, [ranks].

    ``crossed``: the links that its messages cross, [links]; ``active``: the ranks that send, add or
    compute in it, [ranks].
    """

    count: Ints
    first: Ints
    steps: Ints | None
    crossed: NDArray[np.bool_]
    active: NDArray[np.bool_]

    def step(self, rank: Ints, at: Ints) -> Ints:
        """The step that is the at-th of a rank; beyond its last, any."""
        if self.steps is None or not len(self.steps):
            return at
        return self.steps[np.minimum(self.first[rank] + at, len(self.steps) - 1)]


def agenda(job: Job, desk: Desk) -> Agenda:
    """The agenda of a job; where all ranks take part in every step, without a list."""
    n = desk.ranks
    busy = []
    crossed, active = np.zeros(desk.links, bool), np.zeros(n, bool)
    for act in job.acts:
        if isinstance(act, Together):
            taking = np.zeros(n, bool)
            taking[act.groups.reshape(-1)] = True
            active |= taking
            for link, groups in desk.felt(act):
                crossed[link] |= groups.any()
        else:
            table = desk.table(act)
            taking = table.sends | (table.need > 0)
            crossed |= table.crossed
            active |= table.active
        busy.append(taking)
    if all(b.all() for b in busy):
        whole = np.full(n, len(job.order)), np.zeros(n, np.int64)
        return Agenda(*whole, None, crossed, active)
    own = [np.flatnonzero(b) for b in busy]
    rank = np.concatenate([own[a] for a in job.order.tolist()])
    step = np.repeat(np.arange(len(job.order)), [len(own[a]) for a in job.order.tolist()])
    count = np.bincount(rank, minlength=n)
    order = np.argsort(rank, kind="stable")
    return Agenda(count, np.cumsum(count) - count, step[order], crossed, active)
