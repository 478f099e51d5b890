"""Emulated hosts are apart, as slow as said, and gone afterwards, whatever happens."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ..emulated import BENCHMARKS, Network, NetworkError, namespaces

real = pytest.mark.newest_only
MIB = 1 << 20

# Run in a host: sends that many bytes to another, which says how many came and in how many seconds.
TAKE = """
import socket, sys, time
with socket.create_server((socket.gethostbyname(socket.gethostname()), 7000)) as server:
    print("ready", flush=True)
    taken, _ = server.accept()
    began, count = time.perf_counter(), 0
    while data := taken.recv(1 << 20):
        count += len(data)
    print(count, time.perf_counter() - began)
"""
GIVE = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[3])) as given:
    given.sendall(bytes(int(sys.argv[2])))
"""
# A process that has a network, and in it a host that is busy.
OWNER = f"""
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # which who runs the tests may ignore
signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.path.insert(0, {str(BENCHMARKS)!r})
from hosts.network import Network
with Network(hosts=2) as network:
    busy = subprocess.Popen([*network.prefix("h1"), "sleep", "600"])
    print(network._prefix, busy.pid, network._guardian._process.pid, flush=True)
    {{then}}
"""


@pytest.fixture(scope="module")
def network():
    if why := namespaces.missing():
        pytest.skip(f"no emulated network: {why}")
    with Network(hosts=3, rate="100mbit") as network:
        yield network


def inside(network, host, code, *arguments):
    return subprocess.Popen(
        [*network.prefix(host), sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def moved(network, source, target, count, patience=20):
    """(bytes, seconds) that the target saw; None where the source could not reach it."""
    taker = inside(network, target, TAKE)
    assert taker.stdout.readline() == "ready\n", taker.communicate()
    giver = inside(network, source, GIVE, network.address(target), count, patience)
    _, said = giver.communicate(timeout=60)
    if giver.returncode:
        assert "timed out" in said or "No route to host" in said, said
        taker.kill()
        taker.communicate()
        return None
    out, _ = taker.communicate(timeout=60)
    return int(out.split()[0]), float(out.split()[1])


def ours(begin):
    return [name for name in namespaces.names() if name.startswith(begin)]


@real
def test_a_host_has_its_own_name_and_address_and_knows_the_others(network):
    code = "import socket; print([socket.gethostname(), *map(socket.gethostbyname, ('h0', 'h2'))])"
    for host in network.hosts:
        out, err = inside(network, host, code).communicate()
        assert out == f"{[host, network.address('h0'), network.address('h2')]}\n", err


@real
def test_the_machines_own_network_is_not_touched(network):
    for what in ("link", "address", "route"):
        shown = namespaces.run("ip", "-4", what)
        assert "collc" not in shown and network.address("h0") not in shown
    assert not any(f" {host}@" in namespaces.run("ip", "link") for host in network.hosts)


@real
def test_a_link_is_as_slow_as_said_and_counts_what_crosses_it(network):
    before = {host: network.counters(host) for host in network.hosts}
    count, seconds = moved(network, "h0", "h1", 4 * MIB)
    crossed = {
        host: [a - b for a, b in zip(network.counters(host), before[host], strict=True)]
        for host in network.hosts
    }
    assert count == 4 * MIB
    assert crossed["h0"][1] == pytest.approx(count, rel=0.05)
    assert crossed["h1"][0] == pytest.approx(count, rel=0.05)
    assert crossed["h1"][1] < count / 20 and sum(crossed["h2"]) < count / 100
    wire = 8 * count / 100e6
    assert 0.95 * wire < seconds < 4 * wire  # a busy machine is no faster than the link


@real
def test_a_link_carries_both_directions_at_once(network):
    network.set_rate("h0", "10mbit")
    try:
        with ThreadPoolExecutor() as both:
            there = both.submit(moved, network, "h0", "h1", MIB)
            back = both.submit(moved, network, "h1", "h0", MIB)
    finally:
        network.set_rate("h0", "100mbit")
    wire = 8 * MIB / 10e6
    taken = [way.result()[1] for way in (there, back)]
    assert 0.9 * wire < min(taken) < 1.3 * wire  # the other's acknowledgements wait behind its data
    assert max(taken) < 1.9 * wire


@real
def test_the_rate_of_one_host_can_be_changed(network):
    network.set_rate("h1", "20mbit")
    try:
        _, into = moved(network, "h0", "h1", MIB // 2)
        _, out = moved(network, "h1", "h2", MIB // 2)
    finally:
        network.set_rate("h1", "100mbit")
    wire = 8 * (MIB // 2) / 20e6
    assert into > 0.8 * wire and out > 0.8 * wire


@real
def test_a_host_that_is_cut_off_is_out_of_reach_until_it_is_mended(network):
    network.cut("h2")
    try:
        assert moved(network, "h0", "h2", 100, patience=0.5) is None
    finally:
        network.mend("h2")
    assert moved(network, "h0", "h2", 100)[0] == 100


@real
def test_nothing_is_left_after_an_exception(network):
    with pytest.raises(ZeroDivisionError), Network(hosts=2) as other:
        begin = other._prefix
        assert len(ours(begin)) == 3
        assert other.address("h0") == network.address("h0")  # apart, so they may be alike
        1 / 0
    assert not ours(begin)


@real
def test_nothing_is_left_when_it_cannot_be_built(network, monkeypatch):
    other = Network(hosts=2)
    monkeypatch.setattr(Network, "_shape", lambda *_: namespaces.run("false"))
    with pytest.raises(NetworkError, match="false"), other:
        pass
    assert not ours(other._prefix)


@pytest.fixture
def owner():
    """A process that has a network; what the network's names begin with, a busy host, a guardian."""
    code = OWNER.format(then="time.sleep(600)")
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        begin, *pids = owner.stdout.readline().split()
        assert len(ours(begin)) == 3
        yield owner, begin, *map(int, pids)
    finally:
        owner.kill()
        owner.communicate(timeout=60)  # the pipes are the busy host's, too: they end with it


@real
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_after_a_signal(network, owner, number):
    process, begin, busy, guardian = owner
    process.send_signal(number)
    assert process.wait(timeout=60) == {signal.SIGINT: -2}.get(number, 128 + number)
    assert not ours(begin)
    assert not running(busy) and not running(guardian)


@real
def test_the_guardian_removes_what_a_process_that_is_killed_leaves(network, owner):
    process, begin, busy, guardian = owner
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(guardian, number)  # which it ignores
    process.kill()
    process.wait()
    assert not running(guardian, within_s=10)
    assert not ours(begin) and not running(busy)


@real
def test_the_next_network_removes_what_is_left_where_the_guardian_is_killed_too(network, owner):
    process, begin, busy, guardian = owner
    os.kill(guardian, signal.SIGKILL)
    process.kill()
    process.wait()
    assert len(ours(begin)) == 3 and running(busy)
    with Network(hosts=1):
        pass
    assert not ours(begin)
    assert not running(busy)


def running(pid, within_s=1.0):
    """Whether it is still there after that long."""
    last = time.monotonic() + within_s
    while time.monotonic() < last:
        if namespaces._started(pid) is None:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("rate", ["fast", "0mbit", "1 gbit", "1gbit; true", "-1mbit"])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(NetworkError, match="a rate is a number of bits per second, as 200mbit"):
        Network(rate=rate)


def test_hosts_that_are_not_there_are_refused():
    with pytest.raises(NetworkError, match="at least 1 host"):
        Network(hosts=0)
    with pytest.raises(NetworkError, match=r"no host 'h7'\. It has none: it is used outside"):
        Network(hosts=2).address("h7")


def test_it_says_what_is_missing(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(namespaces.sys, "platform", "darwin")
        assert "darwin" in namespaces.missing.__wrapped__()
    monkeypatch.setattr(namespaces.sys, "platform", "linux")
    with monkeypatch.context() as patch:
        patch.setattr(namespaces.os, "geteuid", lambda: 1000)
        assert namespaces.missing.__wrapped__() == "network namespaces need root"
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert namespaces.missing.__wrapped__().startswith("no tc on the PATH")


def test_addresses_are_none_that_a_route_leads_to(monkeypatch):
    routes = '[{"dst":"default"},{"dst":"0.0.0.0/1"},{"dst":"10.0.0.0/16"},{"dst":"10.1.0.7"}]'
    monkeypatch.setattr(namespaces, "run", lambda *_: routes)
    assert str(namespaces.private_range(4)) == "10.1.1.0/24"
    with pytest.raises(NetworkError, match="at most 254 hosts, not 255"):
        namespaces.private_range(255)
