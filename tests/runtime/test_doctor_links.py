"""The sweep of links: which link is named, which pairs meet, and a sweep of virtual devices."""

import time
from dataclasses import replace
from itertools import combinations, permutations
from threading import Event

import jax
import pytest

from collc.runtime.doctor import sweep as sweeping
from collc.runtime.doctor.links import judge, rounds, suspects, usual
from collc.runtime.doctor.sweep import Ends, ends, measured, sweep

from .planted import only

MIB = 1 << 20


def times(n: int, slow=lambda a, b: False, factor: float = 5.0) -> dict[tuple[str, str], float]:
    """Seconds of all links of n hosts, about 8.4 ms, and some of them longer."""
    return {
        (f"h{a}", f"h{b}"): (8.4e-3 + 1e-6 * a) * (factor if slow(a, b) else 1.0)
        for a, b in permutations(range(n), 2)
    }


def test_links_that_are_alike():
    only(judge(times(4), MIB), "ok", "12 links of 4 hosts alike", "8.4 ms for 1 MiB (125 MB/s)")
    only(judge(times(4, lambda a, b: (a, b) == (1, 3), factor=1.9), MIB), "ok", "h1 -> h3")
    only(judge(times(4, lambda a, b: (a, b) == (1, 3), factor=2.1), MIB), "warning", "h1 -> h3")


@pytest.mark.parametrize("n", [3, 4, 8, 16])
def test_a_link_that_is_slow_is_named(n):
    one = judge(times(n, lambda a, b: (a, b) == (0, 2)), MIB)
    only(one, "warning", "link h0 -> h2 takes 42 ms", "times what the others", "cable")
    assert one[0].remedy.startswith("On h0 and h2: ethtool INTERFACE")
    assert "leave one of them out" in one[0].remedy
    both = judge(times(n, lambda a, b: {a, b} == {0, 2}), MIB)
    only(both, "warning", "link h0 <-> h2", "On h0 and h2: ethtool")


@pytest.mark.parametrize("n", [3, 4, 8, 16])
def test_a_host_all_of_whose_links_are_slow_is_named_alone(n):
    """Of 3 and 4 hosts, its links are half of all and more: the median would be slow."""
    found = judge(times(n, lambda a, b: 1 in (a, b)), MIB)
    only(found, "warning", "host h1, all that it sends and receives,", "leave the host out")
    assert found[0].remedy.startswith("On h1: ethtool INTERFACE")
    only(judge(times(n, lambda a, b: a == 1), MIB), "warning", "host h1, all that it sends,")
    only(judge(times(n, lambda a, b: b == 1), MIB), "warning", "host h1, all that it receives,")


def test_a_slow_host_and_a_slow_link_apart_from_it():
    found = judge(times(6, lambda a, b: 5 in (a, b) or {a, b} == {0, 1}), MIB)
    assert [f.found.split(" takes ")[0] for f in found] == [
        "host h5, all that it sends and receives,",
        "link h0 <-> h1",
    ]
    devices = judge(times(4, lambda a, b: {a, b} == {0, 1}), MIB, "device")
    only(devices, "warning", "link h0 <-> h1", "nvidia-smi topo -m")


def test_too_few_peers_to_tell():
    only(judge(times(2, lambda a, b: a == 0), MIB), "note", "h0 -> h1 42 ms", "no peers")
    only(judge({}, MIB), "note", "a single host has none")
    assert usual(times(3, lambda a, b: 2 in (a, b))) < 9e-3
    assert suspects({}) == []


def test_links_within_one_machine_are_no_network():
    """A link is slow there because its two ends had no core: nobody is to see to a cable."""
    for n in (2, 4):
        found = judge(times(n, lambda a, b: (a, b) == (0, 1)), MIB, "host", shared=True)
        only(found, "note", f"{n * (n - 1)} links of {n} hosts, 8.4 ms to 42 ms for 1 MiB", "cores")
        assert not any(word in found[0].remedy for word in ("cable", "ethtool", "nvidia-smi"))
    devices = judge(times(3), MIB, "device", shared=True)
    only(devices, "note", "3 devices", "The devices share this machine and its cores")
    only(judge({}, MIB, shared=True), "note", "a single host has none")


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 9])
def test_each_pair_meets_once_and_no_end_twice_in_a_round(n):
    found = rounds(n, together=True)
    pairs = [tuple(sorted(pair)) for round in found for pair in round]
    assert sorted(pairs) == list(combinations(range(n), 2))
    for round in found:
        assert len({end for pair in round for end in pair}) == 2 * len(round)
    assert [[pair] for round in found for pair in round] == rounds(n, together=False)


def test_ends_are_hosts_or_the_devices_of_one():
    class Device:
        def __init__(self, id: int, process: int, platform: str):
            self.id, self.process_index, self.platform = id, process, platform

    hosts = {0: "a", 1: "a", 2: "b"}
    devices = [Device(i, i // 2, "cpu") for i in range(6)]
    several = ends(devices, hosts, across=True)
    assert (several.names, several.kind, several.shared) == (("a", "b"), "host", False)
    assert several.devices == (devices[0], devices[4])
    assert ends(devices, hosts, across=False).shared
    one = ends(devices[:2], {0: "a"}, across=False)
    assert (one.names, one.kind, one.shared) == (("device 0", "device 1"), "device", True)
    gpus = [Device(i, 0, "gpu") for i in range(2)]
    assert not ends(gpus, {0: "a"}, across=False).shared


def test_a_sweep_of_virtual_devices():
    own = jax.devices()[:3]
    found = measured(ends(own, {0: "a"}, False), 1 << 16, time.monotonic() + 60)
    assert found.keys() == {(f"device {a}", f"device {b}") for a, b in permutations(range(3), 2)}
    assert all(0 < taken < 10 for taken in found.values())
    only(sweep(ends(own[:1], {0: "a"}, False), 10), "note", "a single device")


@pytest.mark.parametrize("turn", [1, 2])
def test_a_link_that_was_slow_only_once_is_not_named(monkeypatch, turn):
    asked = []

    def measure(between, size, end):
        asked.append(size)
        # Another link the first time, so that there is a second one.
        return times(4, lambda a, b: (a, b) == ((0, 1) if len(asked) == turn else (2, 3)))

    monkeypatch.setattr(sweeping, "measured", measure)
    between = Ends(("h0", "h1", "h2", "h3"), tuple(jax.devices()[:4]), "host")
    only(sweep(between, 10), "ok", "12 links")
    assert asked == [MIB, MIB]
    asked.clear()
    only(sweep(replace(between, shared=True), 10), "note", "12 links")  # nothing to be sure of
    assert asked == [MIB]


def test_links_that_fail_or_hang_are_one_finding(monkeypatch):
    def fail(between, size):
        raise RuntimeError("UNAVAILABLE: Gloo\nconnection closed")

    two = ends(jax.devices()[:2], {0: "a"}, False)
    monkeypatch.setattr(sweeping, "_mine", fail)
    only(sweep(two, 10), "error", "process 0: RuntimeError: UNAVAILABLE: Gloo; connection closed")
    release = Event()
    monkeypatch.setattr(sweeping, "_mine", lambda between, size: release.wait(60))
    only(sweep(two, 0.1), "error", "process 0: not done in the time of --timeout", "firewalls")
    (thread,) = sweeping.left_behind
    monkeypatch.setattr(sweeping, "left_behind", [])
    release.set()
    thread.join(10)


def test_quick_links_are_measured_with_more_bytes(monkeypatch):
    asked = []

    def measure(between, size, end):
        asked.append(size)
        return {link: taken / 100 for link, taken in times(4).items()}

    monkeypatch.setattr(sweeping, "measured", measure)
    between = Ends(("h0", "h1", "h2", "h3"), tuple(jax.devices()[:4]), "host")
    only(sweep(between, 10), "ok", "for 8 MiB")
    assert asked == [MIB, 8 * MIB]
