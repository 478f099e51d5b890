"""The order of devices, with devices that are only numbers."""

import re
from dataclasses import dataclass

import numpy as np
import pytest
from jax.sharding import AxisType

from collc.analysis.mesh import checked_axes
from collc.errors import MeshError
from collc.lowering.meshes import axis_types
from collc.runtime.hosts import asked, by_host, grid, named


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    slice_index: int | None = None


def job(*counts, slices=None):
    """Devices of processes 0, 1, ..., as many as said, with ids in order."""
    processes = [p for p, count in enumerate(counts) for _ in range(count)]
    return [Device(i, p, slices and slices[p]) for i, p in enumerate(processes)]


def ids(array):
    return np.vectorize(lambda device: device.id)(array).tolist()


def test_hosts_come_in_the_order_of_processes_not_of_names():
    devices = job(*[2] * 11)
    made, names = grid(devices[::-1], {p: f"h{p}" for p in range(11)})
    assert names == ("host", "gpu")
    assert ids(made) == [[2 * h, 2 * h + 1] for h in range(11)]


def test_a_process_for_each_gpu_gives_hosts_by_gpus():
    """As on Slurm and Open MPI; dealt out in blocks, or in turn."""
    devices = job(*[1] * 6)
    blocks, _ = grid(devices, {p: f"h{p // 3}" for p in range(6)})
    assert ids(blocks) == [[0, 1, 2], [3, 4, 5]]
    turns, _ = grid(devices, {p: f"h{p % 2}" for p in range(6)})
    assert ids(turns) == [[0, 2, 4], [1, 3, 5]]


def test_slices_come_first():
    """jax.make_mesh refuses several slices. Here hosts 0 and 2 share one, as a rack with NVLink."""
    devices = job(2, 2, 2, 2, slices=[0, 1, 0, 1])
    made, _ = grid(devices, {p: f"h{p}" for p in range(4)})
    assert ids(made) == [[0, 1], [4, 5], [2, 3], [6, 7]]


def test_a_host_in_two_slices_is_refused():
    with pytest.raises(MeshError, match=r"host h0 are in the slices \[0, 1\]"):
        by_host(job(1, 1, slices=[0, 1]), {0: "h0", 1: "h0"})


def test_other_axes_have_the_same_order():
    hosts = {p: f"h{p}" for p in range(4)}
    made, names = grid(job(2, 2, 2, 2), hosts, {"data": 2, "pipe": 2, "model": 2})
    assert names == ("data", "pipe", "model")
    assert ids(made) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    uneven, _ = grid(job(2, 1), {0: "h0", 1: "h1"}, {"data": 3})
    assert ids(uneven) == [0, 1, 2]


def test_uneven_hosts_are_named():
    hosts = {p: f"h{p}" for p in range(3)}
    with pytest.raises(MeshError, match="1 on h1, 2 on h0, h2"):
        grid(job(2, 1, 2), hosts)


def test_axes_that_the_devices_do_not_fill():
    said = "data=3 need 3 devices, but the job has 4 .*Give sizes whose product is 4"
    with pytest.raises(MeshError, match=said):
        grid(job(2, 2), {0: "h0", 1: "h1"}, {"data": 3})


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({}, "maps names to sizes"),
        ([("data", 4)], "maps names to sizes"),
        ({"data": 0}, "axis data has to be a positive integer, not 0"),
        ({"data": 4.0}, "axis data has to be a positive integer"),
        ({"data": True, "model": 4}, "axis data has to be a positive integer"),
        ({"n": 4}, "'n' cannot name an axis"),
        ({"a b": 4}, "'a b' cannot name an axis"),
    ],
)
def test_axes_that_cannot_be(axes, said):
    with pytest.raises(MeshError, match=said):
        checked_axes(axes)


def test_types_of_axes():
    auto, explicit = AxisType.Auto, AxisType.Explicit
    assert axis_types(None, 2) == axis_types(auto, 2) == axis_types([auto, auto], 2) == (auto, auto)
    assert axis_types(np.array([explicit, auto]), 2) == (explicit, auto)
    for wrong in ("Auto", (auto,), 7):
        with pytest.raises(
            MeshError, match=f"one for each of 2 axes, not {re.escape(repr(wrong))}"
        ):
            axis_types(wrong, 2)


def test_axes_are_compared_by_what_they_ask_for():
    auto, explicit = AxisType.Auto, AxisType.Explicit
    ab = checked_axes({"a": np.int32(2), "b": 3})
    assert asked(ab, (auto, auto)) == asked({"a": 2, "b": 3}, (auto, auto))
    assert asked(ab, (auto, auto)) != asked({"b": 3, "a": 2}, (auto, auto))
    assert asked(None, (auto, auto)) != asked({"host": 2, "gpu": 3}, (auto, auto))
    assert asked(None, (auto, explicit)) != asked(None, (explicit, auto))


def test_machines_of_one_name_are_hosts_of_their_own():
    said = {0: ("localhost", "a"), 1: ("localhost", "a"), 2: ("localhost", "b")}
    assert named(said) == {
        0: "localhost (process 0)",
        1: "localhost (process 0)",
        2: "localhost (process 2)",
    }
    emulated = {0: ("h0", "a"), 1: ("h1", "a")}  # one machine that plays two hosts
    assert named(emulated) == {0: "h0", 1: "h1"}
