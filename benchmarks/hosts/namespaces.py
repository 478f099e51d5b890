"""Network namespaces and who owns them: each is named after the process that made it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from ipaddress import IPv4Network, ip_network
from itertools import chain
from pathlib import Path

from collc.errors import CollcError

NETNS, FILES = Path("/run/netns"), Path("/etc/netns")
TOOLS = ("ip", "tc", "unshare", "hostname")
# All that a network needs of the kernel, in a namespace that is gone with the command.
PROBE = (
    "ip link add dev end0 type veth peer name end1 && ip link add dev middle type bridge && "
    "tc qdisc add dev end0 root tbf rate 1mbit burst 32kb latency 100ms"
)
END_S = 5.0  # within which processes that are killed are gone
_OWNED = re.compile(r"collc-(\d+)-(\d+)-\d+-\w+")


class NetworkError(CollcError):
    """An emulated network that cannot be made, or a host that it does not have."""


@cache
def missing() -> str | None:
    """Why there can be no emulated network on this machine; None where there can."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's, and this is {sys.platform}"
    if os.geteuid():
        return "network namespaces need root"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"no {', '.join(absent)} on the PATH (packages iproute2, util-linux, hostname)"
    try:
        run("unshare", "--net", "--uts", "--mount", "sh", "-c", PROBE)
    except NetworkError as error:
        return f"the kernel or the container refuses what is needed: {error}"
    return None


def run(*command: str) -> str:
    """What the command prints. Raises NetworkError, with what it says, where it fails.

    In a session of its own: Ctrl-C at the terminal does not end it halfway.
    """
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        raise NetworkError(
            f"{' '.join(command)} ends with {done.returncode}: {done.stderr.strip()}"
        )
    return done.stdout


def prefix(serial: int) -> str:
    """How the names of this process's namespaces begin: its id and when it started."""
    return f"collc-{os.getpid()}-{_started(os.getpid())}-{serial}-"


def names() -> list[str]:
    """The names of all namespaces, and those that files were written for."""
    found = {path.name for home in (NETNS, FILES) if home.is_dir() for path in home.iterdir()}
    return sorted(found)


def leftovers() -> list[str]:
    """The namespaces whose owner is gone."""
    owned = [(name, match) for name in names() if (match := _OWNED.fullmatch(name))]
    return [name for name, match in owned if _started(int(match[1])) != match[2]]


def remove_all(prefix: str) -> None:
    """Removes each namespace whose name begins so."""
    for name in names():
        if name.startswith(prefix):
            remove(name)


def remove(name: str) -> None:
    """Ends the processes of a namespace, and removes it and its files; some of it may be gone."""
    if (NETNS / name).exists():
        _end_processes(name)
        with suppress(NetworkError):
            run("ip", "netns", "delete", name)
        # What a process that was killed between making the file and mounting it has left.
        (NETNS / name).unlink(missing_ok=True)
    shutil.rmtree(FILES / name, ignore_errors=True)
    with suppress(OSError):  # others may have files there
        FILES.rmdir()


def private_range(hosts: int) -> IPv4Network:
    """A private range for that many hosts, to which no route of this machine leads but a default one."""
    routes = json.loads(run("ip", "-j", "-4", "route", "show", "table", "all"))
    ends = [ip_network(route["dst"]) for route in routes if route["dst"] != "default"]
    taken = [end for end in ends if end.prefixlen >= 8]  # shorter ones are a default in parts
    private = map(IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"))
    every = chain.from_iterable(whole.subnets(new_prefix=24) for whole in private)
    found = next((each for each in every if not any(map(each.overlaps, taken))), None)
    if found is None:
        raise NetworkError("routes lead to all private addresses. Remove some: ip -4 route.")
    if hosts > found.num_addresses - 2:
        raise NetworkError(f"a network has at most {found.num_addresses - 2} hosts, not {hosts}.")
    return found


def _end_processes(name: str) -> None:
    """Kills until none is left: one may have forked in between."""
    last = time.monotonic() + END_S
    while time.monotonic() < last:
        try:
            pids = run("ip", "netns", "pids", name).split()
        except NetworkError:
            return  # a name without a namespace behind it
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)


def _started(pid: int) -> str | None:
    """When a process started, in the kernel's ticks; None where it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
