"""Axes and links, against what one counts on one's fingers."""

import numpy as np
import pytest

from collc.receipts.hlo import (
    AllGather,
    AllReduce,
    AllToAll,
    CollectiveBroadcast,
    CollectivePermute,
    ReduceScatter,
)
from collc.receipts.spans import canonical, everywhere, sent, spanned

MESH = {"host": 2, "gpu": 4}
HOSTS = np.repeat([0, 1], 4)
GPU, HOST = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))
ALL = (tuple(range(8)),)


def made(cls, among, elements=8, count=1, kernel="nccl"):
    own = {"pairs": among} if cls is CollectivePermute else {"groups": among}
    if cls in (AllReduce, ReduceScatter):
        own["reduction"] = "add"
    return cls(
        name="a",
        dtypes=("f32",),
        shapes=((elements,),),
        operands=(),
        count=count,
        asynchronous=False,
        kernel=kernel,
        op_name="",
        beside=(),
        **own,
    )


@pytest.mark.parametrize(
    "cls, among, axes",
    [
        (AllReduce, GPU, ("gpu",)),
        (AllReduce, HOST, ("host",)),
        (AllReduce, ALL, ("host", "gpu")),
        (AllReduce, ((0, 1), (2, 3), (4, 5), (6, 7)), ("gpu",)),  # a part of the axis
        (AllReduce, ((0, 5), (1, 2, 3)), ("host", "gpu")),
        (AllReduce, ((0,), (1,)), ()),
        (CollectivePermute, ((0, 4), (1, 5)), ("host",)),
        (CollectivePermute, ((0, 1),), ("gpu",)),
        (CollectivePermute, ((0, 1), (1, 5)), ("host", "gpu")),
        (CollectivePermute, ((3, 4),), ("host", "gpu")),
        (CollectivePermute, (), ()),
    ],
)
def test_axes(cls, among, axes):
    assert spanned(made(cls, among), MESH) == axes


def test_a_mesh_that_is_too_small():
    with pytest.raises(ValueError, match="4 devices, and the program names device 7"):
        spanned(made(AllReduce, ALL), {"gpu": 4})


def test_partners_in_all_slices():
    sizes = (("a", 2), ("b", 3), ("c", 2))
    assert everywhere(("b",), ((0, 2),), sizes) == ((0, 4), (1, 5), (6, 10), (7, 11))
    assert everywhere(("a", "c"), None, sizes) == ((0, 1, 6, 7), (2, 3, 8, 9), (4, 5, 10, 11))
    assert canonical(((1, 0), (3, 2)), False) == canonical(((2, 3), (0, 1)), False)
    assert canonical(((1, 0),), True) != canonical(((0, 1),), True)


# 8 elements are 32 bytes.
@pytest.mark.parametrize(
    "collective, expected",
    [
        (made(CollectivePermute, ((0, 1), (3, 4), (4, 3), (5, 5))), (32, 64)),
        (made(CollectivePermute, ((0, 1),), count=7), (224, 0)),
        # A ring of n sends 2(n - 1)/n of 32 bytes over each of n links.
        (made(AllReduce, GPU), (2 * 4 * 48, 0)),
        (made(AllReduce, HOST), (0, 4 * 2 * 32)),
        (made(AllReduce, ALL), (6 * 56, 2 * 56)),
        (made(AllReduce, ((0, 4, 1, 5, 2, 6, 3, 7),)), (6 * 56, 2 * 56)),  # NCCL sorts by host
        (made(AllReduce, GPU, kernel="one-shot"), (2 * 4 * 3 * 32, 0)),
        (made(AllReduce, GPU, kernel="two-shot"), (2 * 4 * 48, 0)),
        (made(AllGather, GPU), (2 * 4 * 24, 0)),
        (made(ReduceScatter, GPU), (2 * 4 * 96, 0)),  # the result is a quarter
        (made(AllToAll, ALL), (2 * 4 * 3 * 4, 2 * 16 * 4)),
        (made(CollectiveBroadcast, ALL), (6 * 32, 32)),
        (made(AllReduce, ((0,), (1,))), (0, 0)),
    ],
)
def test_links(collective, expected):
    assert tuple(sent(collective, HOSTS).sum(axis=1).round()) == expected


def test_each_device_sends_its_own():
    star = made(CollectivePermute, ((0, 1), (0, 4), (5, 4)), count=2)
    assert sent(star, HOSTS).tolist() == [[64, 0, 0, 0, 0, 64, 0, 0], [64, 0, 0, 0, 0, 0, 0, 0]]
    # A ring leaves each host once, each of several by another device.
    assert sent(made(AllReduce, ALL), HOSTS).tolist() == [[42.0] * 8, [14.0] * 8]
    assert sent(made(CollectiveBroadcast, ALL), HOSTS)[1].tolist() == [8.0] * 4 + [0.0] * 4
