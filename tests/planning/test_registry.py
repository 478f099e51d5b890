"""Names of algorithms: collc's own, those of packages, expressions, files."""

import importlib.metadata
import sys
import types

import jax
import pytest

import collc
from collc.errors import PlanError, ScheduleError
from collc.language import library
from collc.planning.registry import algorithm
from collc.schedules import tree


def forms(source):
    return {kind: str(schedule) for kind, schedule in algorithm(source).schedules}


def test_a_module_is_all_that_it_has():
    assert forms("ring") == {
        "reduce_scatter": "ring.reduce_scatter",
        "all_gather": "ring.all_gather",
        "all_reduce": "ring.all_reduce",
    }
    # tree has two all-reduces: the one that bears the name is taken.
    assert forms("tree")["all_reduce"] == "tree.all_reduce"
    # None bears the name here: the first of its kind.
    assert forms("server") == {
        "reduce": "server.reduce",
        "broadcast": "server.broadcast",
        "scatter": "server.scatter",
        "gather": "server.gather",
        "all_reduce": "server.star",
    }


def test_anything_else_is_one_schedule():
    assert forms("tree.double_all_reduce") == {"all_reduce": "tree.double_all_reduce"}
    # A scatter and a gather one after the other are forms of their own, so that inner axes scatter.
    assert forms("ring.all_reduce.relabel(shift=1)") == {
        "all_reduce": "ring.all_reduce.relabel(shift=1)",
        "reduce_scatter": "ring.reduce_scatter.relabel(shift=1)",
        "all_gather": "ring.all_gather.relabel(shift=1)",
    }
    assert forms("ring.two_way_all_reduce") == {
        "all_reduce": "ring.two_way_all_reduce",
        "reduce_scatter": "ring.reduce_scatter | ring.all_gather.reversed()",
        "all_gather": "ring.all_gather | ring.reduce_scatter.reversed()",
    }
    assert forms("server.star") == {"all_reduce": "server.star"}
    assert forms("ring.all_reduce | tree.all_reduce").keys() == {"all_reduce"}
    assert algorithm(tree.all_reduce) == algorithm("tree.all_reduce")
    assert algorithm("ring").get("all_to_all") is None


@pytest.mark.parametrize(
    "source, error, message",
    [
        ("rnig", PlanError, r"there is no schedule 'rnig'\. Did you mean ring\?"),
        ("ring.all_reduec", ScheduleError, r"Did you mean ring\.all_reduce"),
        ("ring.all_reduce @ gpu", PlanError, "names its axes already"),
        ("ring.reduce_scatter >> ring.all_gather >> ring.all_reduce", ScheduleError, "replica"),
        ("hierarchical", PlanError, "takes parameters"),
        ("missing.py:mine", ScheduleError, r"there is no schedule file missing\.py"),
        ("", ScheduleError, "cannot read the schedule"),
        (None, PlanError, "an axis takes the name of a schedule or a schedule, not None"),
        (7, PlanError, "an axis takes the name of a schedule or a schedule, not 7"),
    ],
)
def test_names_that_cannot_be(source, error, message):
    with pytest.raises(error, match=message):
        algorithm(source)


@pytest.fixture
def packages(monkeypatch):
    """`packages(name=module)`: what other packages bring by entry points."""

    def bring(**brought):
        entries = []
        for name, module in brought.items():
            monkeypatch.setitem(sys.modules, module.__name__, module)
            group = "collc.schedules"
            entries.append(importlib.metadata.EntryPoint(name, module.__name__, group))
        monkeypatch.setattr(
            importlib.metadata,
            "entry_points",
            lambda group: entries if group == "collc.schedules" else [],
        )
        library.modules.cache_clear()

    yield bring
    monkeypatch.undo()
    library.modules.cache_clear()


def own_module(name):
    """A module with a schedule of its own: rank 0 gathers and spreads, whole."""
    module = types.ModuleType(name)
    source = (
        "from collc import language as cl\n"
        "from collc.language import ALL, add, copy, ranks\n"
        "@cl.reduce\n"
        "def push(n):\n"
        "    yield add(ALL, ranks(n)[1:], 0)\n"
        "all_reduce = push >> push.reversed()\n"
    )
    exec(compile(source, f"{name}.py", "exec"), module.__dict__)
    return module


def test_a_package_brings_its_own(packages):
    packages(foreign=own_module("somewhere.foreign"))
    assert forms("foreign")["all_reduce"] == "foreign.all_reduce"
    mesh = jax.make_mesh((4,), ("gpu",), devices=jax.devices()[:4])
    plan = collc.plan(mesh, {"gpu": "foreign"})
    assert str(plan.schedule("all_reduce")) == "foreign.all_reduce @ gpu"
    assert collc.parse("foreign.all_reduce @ gpu") == plan.schedule("all_reduce")
    with pytest.raises(PlanError, match="Did you mean foreign"):
        algorithm("foriegn")


def test_two_of_one_name(packages):
    packages(ring=own_module("somewhere.ring"))
    with pytest.raises(ScheduleError, match=r"ring = somewhere\.ring has the name of another"):
        algorithm("tree")
