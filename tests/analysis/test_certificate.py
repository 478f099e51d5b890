"""What a certificate promises, and that it cannot be had otherwise."""

import dataclasses

import numpy as np
import pytest

import collc
from collc import language as cl
from collc.analysis.certificate import certify
from collc.errors import MeshError, ProofError, ScheduleError
from collc.language import add
from collc.language.algebra import Order
from collc.schedules import native, ring, server, tree


def test_it_comes_from_verify_alone():
    certificate = collc.verify(ring.all_reduce, n=4)
    with pytest.raises((ValueError, TypeError)):
        dataclasses.replace(certificate, rounds=1)
    fields = {f.name: getattr(certificate, f.name) for f in dataclasses.fields(certificate)}
    with pytest.raises(ProofError, match=r"comes from collc\.verify alone"):
        type(certificate)(**fields, token=object())
    assert "token" not in repr(certificate) and "object at" not in repr(certificate)


def test_an_order_that_was_redefined_is_proved_anew():
    def placed(function):
        return ring.all_reduce.relabel(order=Order("mine.order", function)) @ "x"

    one = placed(lambda n: np.arange(n))
    two = placed(lambda n: np.roll(np.arange(n), 1)[::-1])
    assert one == two  # by name
    assert collc.verify(one, x=4).digest != collc.verify(two, x=4).digest


def test_digests_tell_how_leaves_are_put_together():
    one, two = (
        collc.parse(text)
        for text in (
            "ring.all_reduce @ x | ring.all_reduce @ x",
            "ring.reduce_scatter @ x >> ring.all_gather @ x",
        )
    )
    assert collc.verify(one, x=4).digest != collc.verify(two, x=4).digest


def test_an_axis_may_be_called_n():
    assert certify(ring.all_reduce @ "n", {"n": 4}).rounds == 6
    assert collc.verify(ring.all_reduce @ "n", n=4).rounds == 6


@pytest.mark.parametrize(
    "error, message, call",
    [
        (ScheduleError, "verify takes a schedule", lambda: collc.verify("ring.all_reduce", n=4)),
        (ScheduleError, "parse takes text", lambda: collc.parse(3)),  # type: ignore[arg-type]
        (MeshError, "n=0: the size of an axis", lambda: collc.verify(native.all_reduce, n=0)),
        (MeshError, "x=-1: the size", lambda: collc.verify(ring.all_reduce @ "x", x=-1)),
        (MeshError, "n= has no meaning", lambda: collc.verify(ring.all_reduce @ "x", n=3, x=3)),
        (MeshError, "Did you mean gpu", lambda: collc.verify(ring.all_reduce @ "gpux", gpu=3)),
    ],
)
def test_bad_input(error, message, call):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    "order, message",
    [
        (lambda n: 1 / 0, r"mine\(4\) raised ZeroDivisionError"),
        (lambda n: np.arange(n).reshape(2, -1), "as n = 4 integers"),
        (lambda n: np.arange(n) + 0.0, "as n = 4 integers"),
        (lambda n: [0, [1, 2], 3], "as n = 4 integers"),
        (lambda n: [0, 1, 2, 2], "each of the ranks 0 to 3 once"),
    ],
)
def test_orders_that_are_none(order, message):
    schedule = tree.all_reduce.relabel(order=Order("mine", order))
    with pytest.raises(ScheduleError, match=message):
        collc.verify(schedule, n=4)


def test_schedules_of_one_name_in_two_files_differ():
    @cl.all_gather
    def all_gather(n):
        yield add(0, 0, 1)

    other = dataclasses.replace(all_gather, name="ring.all_gather")
    assert other != ring.all_gather and collc.parse(str(ring.all_gather)) == ring.all_gather


def test_sizes_are_integers_of_any_make():
    c = collc.verify(ring.all_reduce, n=np.int64(4))
    assert c.sizes == (("", 4),) and type(c.sizes[0][1]) is int
    for bad in (4.0, True, np.bool_(True), "4", 0, -1, None):
        with pytest.raises(MeshError, match="the size of an axis is a positive integer"):
            collc.verify(ring.all_reduce @ "gpu", gpu=bad)  # type: ignore[arg-type]


def test_more_ranks_than_can_be_proved():
    for schedule, sizes in [
        (ring.all_reduce, {"n": 10**6}),
        (ring.all_reduce @ ("x", "y"), {"x": 1000, "y": 1000}),
    ]:
        with pytest.raises(MeshError, match="1,000,000 ranks are more than the 65,536"):
            collc.verify(schedule, **sizes)


def test_one_step_is_one_step():
    assert "   1 step, 3 rounds, " in str(collc.verify(server.reduce, n=4))
    assert "   2 steps, 1 round" not in str(collc.verify(server.star, n=2))
    assert "   1 step, 1 round, " in str(collc.verify(server.reduce, n=2))


def test_a_certificate_in_one_line():
    made = collc.verify(ring.all_reduce @ "gpu", gpu=8)
    assert repr(made) == "<certificate 14 rounds ring.all_reduce @ gpu, gpu=8>"
    with pytest.raises(MeshError, match=r"no size here. Give it: verify\(s, gpu=8\)\."):
        collc.verify(ring.all_reduce @ "gpu")


def test_public_names_only():
    assert set(dir(collc)) == {*collc.__all__, "__version__"}


def test_a_native_leaf_does_not_hide_an_inconsistent_one():
    @cl.all_reduce
    def one_shot(n):
        r = np.arange(n)[:, None]
        yield add(cl.ALL, r, (r + np.arange(n)[None, 1:]) % n)

    mixed = one_shot @ "x" >> native.all_reduce @ "y"
    certificate = collc.verify(mixed, x=4, y=2)
    assert certificate.trusted and certificate.consistent is False and certificate.narrow is False
    assert (
        collc.verify(ring.all_reduce @ "x" >> native.all_reduce @ "y", x=4, y=2).consistent is None
    )
