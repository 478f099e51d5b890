"""Where a process listens: at the address that reaches the coordinator, and nowhere else. No jax."""

import errno
import ipaddress
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from collc.errors import PlanError
from collc.runtime.patience import patience

KNOCK_S = 0.25  # between attempts to reach the coordinator


@dataclass(frozen=True)
class Endpoint:
    """A host, by name or number, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def endpoint(text: str) -> Endpoint:
    """Reads ``host:port``. Raises PlanError for other texts.

    >>> endpoint("[::1]:1234")
    Endpoint(host='::1', port=1234)
    """
    host, colon, port = str(text).rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    digits = port.isascii() and port.isdigit() and len(port) < 6
    if not colon or not bare or (":" in bare and bare == host) or not digits:
        raise PlanError(
            f"the coordinator's address {text!r} is not of the form host:port. Write it as "
            "10.0.0.1:1234, or as [::1]:1234."
        )
    if "%" in bare:
        raise PlanError(
            f"the coordinator's address {text!r} is link-local, and means something else on each "
            "interface. Give another address of that host."
        )
    if not 0 < int(port) < 65536:
        raise PlanError(
            f"the coordinator's port {port} is not one of 1 to 65535. Choose a free one."
        )
    return Endpoint(bare, int(port))


def resolved(host: str) -> list[str]:
    """The addresses of a host, those of IPv4 first. Raises OSError for an unknown name."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda info: info[0] != socket.AF_INET)
    return list(dict.fromkeys(str(info[4][0]) for info in found))


def towards(coordinator: str) -> str:
    """This host's own address on the way to the coordinator. Nothing is sent.

    Raises PlanError where its name is unknown here, or there is no way.

    >>> towards("127.0.0.1:1234")
    '127.0.0.1'
    """
    at = endpoint(coordinator)
    why = ""
    try:
        for number in resolved(at.host):
            with socket.socket(family(number), socket.SOCK_DGRAM) as way:
                try:
                    way.connect((number, at.port))
                    return str(way.getsockname()[0])
                except OSError as error:
                    why = f"{number}: {error.strerror}"
    except OSError as error:
        why = f"its name is unknown here: {error.strerror}"
    raise PlanError(
        f"this host ({socket.gethostname()}) has no way to the coordinator {at} ({why}). See that the "
        "address is right, and that the network is up."
    )


def bind_address(coordinator: str) -> Endpoint:
    """Where the coordinator itself, process 0, listens: at the number of its own name.

    Raises PlanError where the name is unknown here, the number is not one of this host, or the port
    is in use.
    """
    at = endpoint(coordinator)
    try:
        found = resolved(at.host)
    except OSError as error:
        raise PlanError(
            f"process 0 is the coordinator, but its address {at} is unknown on this host "
            f"({socket.gethostname()}): {error}. Give an address of this host."
        ) from error
    for number in found:
        why = _listens(number, at.port)
        if why is None:
            return Endpoint(number, at.port)
        if why.errno != errno.EADDRNOTAVAIL:
            # Without this, gRPC would share the port with another job's coordinator.
            raise PlanError(
                f"process 0 is the coordinator, but cannot listen at {Endpoint(number, at.port)}: "
                f"{why.strerror}. Choose a free port above 1023; or end what is left of an earlier job."
            )
    raise PlanError(
        f"process 0 is the coordinator, but {at} ({', '.join(found)}) is not an address of this host "
        f"({socket.gethostname()}). Start process 0 there; or, where that address is forwarded to this "
        "host, say where to listen: coordinator_bind_address='ADDRESS:PORT'."
    )


def only_here(coordinator: str, bound: Endpoint) -> str | None:
    """What to warn of where a host's own name means loopback to itself, None if all is well."""
    name = endpoint(coordinator).host
    if name == "localhost" or is_number(name) or not is_loopback(bound.host):
        return None
    return (
        f"on this host the name {name} means {bound.host}, which no other host reaches, and the "
        "coordinator listens there only. If there are other hosts, take that line out of /etc/hosts, "
        "or give the number of a network interface as the coordinator's address."
    )


def reach(coordinator: str, timeout_s: float, tell: Callable[[str], None]) -> str:
    """Waits until the coordinator answers, and returns this host's own address on the way there.

    Nothing is said to it. ``tell`` gets a line when the wait becomes long. Raises PlanError, which
    names the address and what was found, if it does not answer in time.
    """
    at, start, told = endpoint(coordinator), time.monotonic(), False
    while True:
        own, why = _knock(at)
        if own is not None:
            return own
        waited = time.monotonic() - start
        if waited >= timeout_s:
            raise PlanError(
                f"the coordinator {at} has not answered within {timeout_s:g} s ({why}). It is "
                "process 0: look at its log; and see that the address is right, that all processes "
                "have the same, that process 0 listens there rather than at loopback, and that no "
                "firewall is between."
            )
        if waited >= patience(timeout_s) and not told:
            told = True
            tell(
                f"waiting for the coordinator {at} for {waited:.0f} s ({why}), at most {timeout_s:g} s"
            )
        time.sleep(min(KNOCK_S, max(0.0, timeout_s - waited)))


def _knock(at: Endpoint) -> tuple[str | None, str]:
    """This host's address on a connection that the other side took, or None and why there is none."""
    try:
        found = resolved(at.host)
    except OSError as error:
        return None, f"its name is unknown here: {error.strerror}"
    why = ""
    for number in found:
        try:
            with socket.create_connection((number, at.port), timeout=3.0) as way:
                # On loopback a socket can get the very port that it calls, and meet itself.
                if way.getsockname() != way.getpeername():
                    return str(way.getsockname()[0]), ""
        except OSError as error:
            why = f"{number}: {error.strerror or error}"
    return None, why


def _listens(number: str, port: int) -> OSError | None:
    """Why a socket cannot listen there, None if it can."""
    with socket.socket(family(number), socket.SOCK_STREAM) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after a restart
        try:
            own.bind((number, port))
            own.listen()
        except OSError as error:
            return error
    return None


def family(number: str) -> socket.AddressFamily:
    """IPv4 or IPv6."""
    return socket.AF_INET6 if ":" in number else socket.AF_INET


def is_loopback(host: str) -> bool:
    """Whether it is this host to itself.

    >>> is_loopback("localhost"), is_loopback("127.0.1.1"), is_loopback("h0")
    (True, True, False)
    """
    return host == "localhost" or (is_number(host) and ipaddress.ip_address(host).is_loopback)


def is_number(host: str) -> bool:
    """Whether it is an address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
