"""Hosts on one machine: network namespaces, joined by a switch through links of a chosen rate.

    with Network(hosts=4, rate="1gbit") as network:
        subprocess.run([*network.prefix("h1"), "ping", "-c", "1", network.address("h0")])

Each host has an interface, an address and a host name of its own; the switch is a namespace too, so
that nothing of the machine's own network is touched. It needs root, ``ip`` and ``tc``.
"""

import itertools
import json
import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

from hosts import namespaces
from hosts.guardian import Guardian
from hosts.namespaces import NetworkError, run

SWITCH = "switch"
INTERFACE = "eth0"
# After a pause a link lets this much pass at once: little, so that small messages are slow too.
BURST = 32 << 10
# The largest packet that a host hands to its link; TCP cuts it into segments of the MTU as it says.
PACKET = 16 << 10
QUEUE = "100ms"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_serials = itertools.count()


class Counters(NamedTuple):
    """Bytes that an interface has received and sent, with all headers."""

    received: int
    sent: int


@dataclass(frozen=True)
class _Host:
    name: str
    namespace: str
    address: str


class Network:
    """``hosts`` hosts h0, h1, … on one switch; ``rate``: of each link, in each direction.

    A context manager. When it ends, by an exception or by a signal too, all processes in the hosts
    are killed and all is removed. Where this process is killed, its guardian does that; if that one was
    killed too, the next network does. Raises NetworkError where the machine cannot have one.
    """

    def __init__(self, hosts: int = 4, rate: str = "1gbit"):
        if hosts < 1:
            raise NetworkError(f"a network has at least 1 host, not {hosts}")
        self.rate = _checked(rate)
        self._prefix = namespaces.prefix(next(_serials))
        self._hosts = hosts
        self._made: dict[str, _Host] = {}
        self._signals: dict[signal.Signals, Any] = {}
        self._guardian: Guardian | None = None

    def __enter__(self) -> "Network":
        if why := namespaces.missing():
            raise NetworkError(f"there can be no emulated network here: {why}.")
        self._catch_signals()
        try:
            for name in namespaces.leftovers():
                namespaces.remove(name)
            self._guardian = Guardian(self._prefix)
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills the hosts' processes and removes the network; signals wait until that is done."""
        with _held(self._signals):
            namespaces.remove_all(self._prefix)
            if self._guardian:
                self._guardian.leave()
            self._made, self._signals, self._guardian = {}, {}, None

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts."""
        return tuple(self._made)

    def prefix(self, host: str) -> tuple[str, ...]:
        """The words before a command that has to run in that host, under its name.

        The process that is started becomes the command: its id and signals are the command's.
        """
        where = self._of(host)
        named = 'hostname "$0" && exec "$@"'
        return (
            *("ip", "netns", "exec", where.namespace),
            *("unshare", "--uts", "sh", "-c", named, where.name),
        )

    def address(self, host: str) -> str:
        """The address that the host's name resolves to in every host."""
        return self._of(host).address

    def set_rate(self, host: str, rate: str) -> None:
        """Changes the rate of a host's link, in both directions; what is under way goes on."""
        self._shape(self._of(host), _checked(rate))

    def cut(self, host: str) -> None:
        """Pulls the host's cable out of the switch. Nothing arrives, and no one is told."""
        self._port(self._of(host), "down")

    def mend(self, host: str) -> None:
        """Puts it back."""
        self._port(self._of(host), "up")

    def counters(self, host: str) -> Counters:
        """What has crossed the host's link since the network was made."""
        namespace = self._of(host).namespace
        shown = run("ip", "-n", namespace, "-j", "-s", "link", "show", "dev", INTERFACE)
        found = json.loads(shown)[0]["stats64"]
        return Counters(found["rx"]["bytes"], found["tx"]["bytes"])

    def _of(self, host: str) -> _Host:
        if host not in self._made:
            has = ", ".join(self._made) or "none: it is used outside of its with block"
            raise NetworkError(f"the network has no host {host!r}. It has {has}.")
        return self._made[host]

    def _build(self) -> None:
        switch = self._prefix + SWITCH
        addresses = namespaces.private_range(self._hosts)
        made = [
            _Host(f"h{i}", f"{self._prefix}h{i}", str(addresses[i + 1])) for i in range(self._hosts)
        ]
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "dev", "bridge", "addrgenmode", "none", "up")
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in made)]
        for host in made:
            files = namespaces.FILES / host.namespace
            files.mkdir(parents=True)
            (files / "hosts").write_text("\n".join(lines) + "\n", encoding="utf-8")
            own = ("ip", "-n", host.namespace)
            link = ("address", f"{host.address}/{addresses.prefixlen}", "dev", INTERFACE)
            run("ip", "netns", "add", host.namespace)
            run(
                *("ip", "link", "add", INTERFACE, "netns", host.namespace, "type", "veth"),
                *("peer", "name", host.name, "netns", switch),
            )
            # Without addresses of IPv6 nothing but what the hosts say crosses the links.
            quiet = ("addrgenmode", "none", "up")
            run("ip", "-n", switch, "link", "set", "dev", host.name, "master", "bridge", *quiet)
            run(*own, "link", "set", "dev", INTERFACE, "gso_max_size", str(PACKET), *quiet)
            run(*own, "link", "set", "dev", "lo", "up")
            run(*own, *link[:1], "add", *link[1:])
            self._shape(host, self.rate)
        self._made = {host.name: host for host in made}

    def _shape(self, host: _Host, rate: str) -> None:
        """The host's own end limits what it sends, the switch's end what it receives."""
        ends = ((host.namespace, INTERFACE), (self._prefix + SWITCH, host.name))
        for namespace, device in ends:
            limit = ("tbf", "rate", rate, "burst", str(BURST), "latency", QUEUE)
            run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *limit)

    def _port(self, host: _Host, state: str) -> None:
        run("ip", "-n", self._prefix + SWITCH, "link", "set", "dev", host.name, state)

    def _catch_signals(self) -> None:
        """Signals that would end the process without a word end it through ``__exit__``."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS[1:]:  # Python's own SIGINT raises already
            if signal.getsignal(number) is signal.SIG_DFL:
                self._signals[number] = signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _checked(rate: str) -> str:
    if not re.fullmatch(r"[1-9]\d*(?:\.\d+)?[kmg]?bit", rate):
        raise NetworkError(
            f"a rate is a number of bits per second, as 200mbit or 1gbit, not {rate!r}"
        )
    return rate


@contextmanager
def _held(afterwards: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Signals that come within are handled after it, by these handlers or those that there were."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in {**before, **afterwards}.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(came):
            os.kill(os.getpid(), number)
