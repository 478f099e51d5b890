"""Plans: what they choose, how they are compared, explained, saved and loaded."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import collc
from collc.errors import MeshError, PlanError
from collc.language.library import load
from collc.language.states import COLLECTIVES
from collc.schedules import ring

RING = """
from collc import language as cl
from collc.language import add, copy, ranks


@cl.reduce_scatter
def scatter(n):
    c = ranks(n)
    for t in range(1, n):
        yield add(c, (c + {step} * t) % n, (c + {step} * (t + 1)) % n)


@cl.all_gather
def gather(n):
    c = ranks(n)
    for t in range(n - 1):
        yield copy(c, (c + {step} * t) % n, (c + {step} * (t + 1)) % n)


mine = scatter >> gather
"""


def make_mesh(*sizes, names=("host", "gpu"), devices=None):
    kinds = (AxisType.Auto,) * len(sizes)
    devices = devices or jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, names, axis_types=kinds, devices=devices)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(2, 4)


@pytest.fixture(scope="module")
def plan(mesh):
    return collc.plan(mesh, {"gpu": "ring", "host": "tree"})


# -- which schedule -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "axes, all_reduce",
    [
        (
            {"gpu": "ring", "host": "tree"},
            "ring.reduce_scatter @ gpu >> tree.all_reduce @ host >> ring.all_gather @ gpu",
        ),
        ({"host": "ring", "gpu": "tree"}, "tree.all_reduce @ gpu >> ring.all_reduce @ host"),
        ({"host": "ring", "gpu": "server"}, "server.star @ gpu >> ring.all_reduce @ host"),
        (
            {"host": "tree.double_all_reduce", "gpu": "server.shards(2)"},
            "server.shards(2) @ gpu >> tree.double_all_reduce @ host",
        ),
        (
            {"host": "native", "gpu": "native"},
            "native.reduce_scatter @ gpu >> native.all_reduce @ host >> native.all_gather @ gpu",
        ),
        ({"gpu": "ring"}, "ring.all_reduce @ gpu"),
        ({"host": ring.all_reduce}, "ring.all_reduce @ host"),
    ],
)
def test_what_an_all_reduce_takes(mesh, axes, all_reduce):
    plan = collc.plan(mesh, axes)
    assert str(plan.schedule("all_reduce")) == all_reduce
    assert plan.axes == tuple(axis for axis in ("host", "gpu") if axis in axes)
    for collective in COLLECTIVES:
        schedule = plan.schedule(collective)
        assert schedule.collective.name == collective
        assert set(schedule.axes) == set(axes)


def test_inner_axes_scatter_first_and_gather_last(mesh):
    plan = collc.plan(mesh, {"host": "ring", "gpu": "ring"})
    told = {c: str(plan.schedule(c)) for c in COLLECTIVES}
    assert told["reduce_scatter"] == "ring.reduce_scatter @ gpu >> ring.reduce_scatter @ host"
    assert told["all_gather"] == "ring.all_gather @ host >> ring.all_gather @ gpu"
    assert str(plan.schedule("all_reduce", ("gpu",))) == "ring.all_reduce @ gpu"
    assert plan.schedule("all_reduce", ("gpu", "host")) == plan.schedule("all_reduce")


def test_three_levels():
    plan = collc.plan(
        make_mesh(2, 2, 2, names=("pod", "host", "gpu")),
        {"pod": "tree", "host": "server", "gpu": "ring"},
    )
    assert str(plan.schedule("all_reduce")) == (
        "ring.reduce_scatter @ gpu >> server.star @ host >> tree.all_reduce @ pod >> "
        "ring.all_gather @ gpu"
    )


@pytest.mark.parametrize("inner", ["ring", "tree", "server", "native"])
def test_every_choice_sums(mesh, inner):
    plan = collc.plan(mesh, {"gpu": inner, "host": "server.shards(2)"})
    x = np.arange(56, dtype=np.float32).reshape(8, 7)
    step = collc.schedule(plan, batch="x")(
        lambda x: (collc.psum(x), collc.Ranked(collc.psum(x, "gpu"), ("host",)))
    )
    whole, hosts = jax.jit(step)(x)
    np.testing.assert_array_equal(whole, x.sum(0, keepdims=True))
    np.testing.assert_array_equal(hosts.value, x.reshape(2, 4, 1, 7).sum(1))


def test_an_algorithm_without_an_all_reduce(mesh, tmp_path):
    plan = collc.plan(mesh, {"gpu": "pairwise", "host": "ring"})
    assert "all_reduce" not in plan.collectives and len(plan.collectives) == len(COLLECTIVES) - 1
    told = "pairwise has no all-reduce; name another schedule for gpu, or native"
    for axes in (None, ("gpu",)):
        with pytest.raises(PlanError, match=told):
            plan.schedule("all_reduce", axes)
    with pytest.raises(PlanError, match=told):
        jax.jit(collc.schedule(plan, batch="x")(lambda x: collc.psum(x.sum())))(np.ones(8))
    assert str(plan.schedule("all_reduce", ("host",))) == "ring.all_reduce @ host"
    assert (
        str(plan.schedule("all_to_all")) == "pairwise.all_to_all @ gpu >> native.all_to_all @ host"
    )
    assert str(plan.schedule("all_gather")) == "ring.all_gather @ host >> native.all_gather @ gpu"
    assert re.search(r"^all_reduce +none( +-){6}$", plan.explain(), re.MULTILINE)
    plan.save(tmp_path / "plan.txt")
    assert "\nall_reduce = none\n" in plan.text
    assert collc.Plan.load(tmp_path / "plan.txt", mesh) == plan


# -- refused --------------------------------------------------------------------------------------


def test_bad_arguments(mesh, plan):
    with pytest.raises(MeshError, match=r"the mesh has no axis 'gpus'\. Did you mean gpu\?"):
        collc.plan(mesh, {"gpus": "ring"})
    with pytest.raises(PlanError, match=r"there is no schedule 'rign'\. Did you mean ring\?"):
        collc.plan(mesh, {"gpu": "rign"})
    with pytest.raises(PlanError, match="at least one axis"):
        collc.plan(mesh, {})
    with pytest.raises(MeshError, match="a plan is for a jax mesh, not"):
        collc.plan({"gpu": 4}, {"gpu": "ring"})
    for half in ("ring.all_gather", "ring.reduce_scatter", "tree.reduce", "tree.broadcast"):
        with pytest.raises(
            PlanError, match=f"{half} alone is no plan for gpu: .* an all-reduce takes"
        ):
            collc.plan(mesh, {"gpu": half})
    with pytest.raises(PlanError, match=r"does not schedule axis 'gpus'\. Did you mean gpu\?"):
        plan.schedule("all_reduce", ("gpus",))
    with pytest.raises(PlanError, match="Did you mean all_reduce"):
        plan.schedule("all_redcue")
    with pytest.raises(PlanError, match=r"all_reduce over no axis\. Name one of host, gpu\."):
        plan.schedule("all_reduce", ())


def test_the_order_of_axes_is_the_meshes(plan):
    """In lax, `all_gather` over ("gpu", "host") numbers chunks gpu first: not silently otherwise."""
    with pytest.raises(PlanError, match="a plan numbers ranks in the mesh's order, host, gpu"):
        plan.schedule("all_gather", ("gpu", "host"))
    assert plan.schedule("all_gather", ("host", "gpu")) == plan.schedule("all_gather")


# -- equality -------------------------------------------------------------------------------------


def test_plans_are_equal_where_they_send_the_same(mesh, plan):
    same = collc.plan(make_mesh(2, 4), {"host": "tree", "gpu": "ring"})
    assert plan == same and hash(plan) == hash(same) and plan.digest == same.digest
    other = collc.plan(mesh, {"gpu": "ring", "host": "ring"})
    assert plan != other and plan.digest != other.digest
    assert plan != collc.plan(make_mesh(4, 2), {"gpu": "ring", "host": "tree"})
    assert {plan: 1}[same] == 1


def test_plans_for_other_devices_differ(plan):
    turned = make_mesh(2, 4, devices=jax.devices()[:8][::-1])
    other = collc.plan(turned, {"gpu": "ring", "host": "tree"})
    assert plan.digest == other.digest  # processes compare it: their programs are the same
    assert plan != other  # jit must not take one for the other

    @jax.jit
    def run(x):
        return collc.schedule(other, batch="x")(lambda x: collc.psum(x))(x)

    assert run(np.ones(8, np.float32)).sharding.mesh == turned


def test_one_that_travels_through_jit_as_a_constant(plan):
    count = []

    def step(plan, x):
        count.append(plan)
        return collc.schedule(plan, batch="x")(lambda x: collc.psum(x.sum()))(x)

    jitted = jax.jit(step, static_argnums=0)
    x = np.ones(8, np.float32)
    assert jitted(plan, x) == 8
    assert jitted(collc.plan(plan.mesh, {"gpu": "ring", "host": "tree"}), x) == 8
    assert len(count) == 1
    assert jitted(collc.plan(plan.mesh, {"gpu": "tree"}), x[:4]) == 4
    assert len(count) == 2


# -- in words -------------------------------------------------------------------------------------


def test_explain(plan, golden):
    text = plan.explain()
    golden("plan.txt", text)
    assert max(map(len, text.splitlines())) <= 100


def test_explain_stays_narrow(tmp_path):
    (tmp_path / "a_schedule_file_with_quite_a_long_name.py").write_text(RING.format(step=1))
    source = f"{tmp_path}/a_schedule_file_with_quite_a_long_name.py:mine"
    mesh = AbstractMesh((4, 16, 8), ("superpod", "host", "gpu"))
    plan = collc.plan(mesh, {"superpod": source, "host": "server", "gpu": "native"})
    text = plan.explain()
    table = text[text.index("collective ") :]  # the plan's own source stays in one piece
    assert max(map(len, table.splitlines())) <= 100
    assert "XLA's own (native, trusted) is one of the steps, but none of the rounds." in text


def test_without_devices():
    plan = collc.plan(AbstractMesh((64, 8), ("host", "gpu")), {"gpu": "ring", "host": "tree"})
    assert plan.ranks == 512
    assert plan.certificate("all_reduce").rounds == 36
    assert "512 ranks (host 64 x gpu 8)" in plan.explain()
    assert collc.plan(AbstractMesh((64, 8), ("host", "gpu")), {"gpu": "ring"}) != plan


def test_the_rest_is_left_to_xla():
    plan = collc.plan(make_mesh(2, 4, names=("data", "model")), {"data": "ring"})
    assert plan.axes == ("data",) and plan.ranks == 2
    assert plan.explain().endswith("Left to XLA: model.")


# -- text -----------------------------------------------------------------------------------------


def test_save_and_load(mesh, plan, tmp_path):
    path = tmp_path / "plan.txt"
    plan.save(path)
    back = collc.Plan.load(path, mesh)
    assert back == plan and back.text == plan.text == path.read_text()
    assert str(back) == 'collc.plan(mesh(host=2, gpu=4), {"host": "tree", "gpu": "ring"})'
    golden = [line for line in plan.text.splitlines() if line.startswith(("mesh", "axis"))]
    assert [re.sub(r" [0-9a-f]{16} ", " ", line) for line in golden] == [
        "mesh host=2 gpu=4",
        "axis host = tree",
        "axis gpu = ring",
    ]
    path.write_text(f"\n# a remark\n{plan.text}\n")
    assert collc.Plan.load(path, mesh) == plan


def test_another_mesh(plan, tmp_path):
    plan.save(tmp_path / "plan.txt")
    with pytest.raises(PlanError, match="for the mesh host=2 gpu=4, but this one is host=4 gpu=2"):
        collc.Plan.load(tmp_path / "plan.txt", make_mesh(4, 2))


def test_a_schedule_file_that_has_changed(mesh, tmp_path):
    file, saved = tmp_path / "own.py", tmp_path / "plan.txt"
    file.write_text(RING.format(step=1))
    plan = collc.plan(mesh, {"gpu": f"{file}:mine", "host": "tree"})
    plan.save(saved)
    assert collc.Plan.load(saved, mesh) == plan
    file.write_text("# a remark changes nothing\n" + RING.format(step=1))
    assert collc.Plan.load(saved, mesh) == plan
    file.write_text(RING.format(step=-1))  # right, but the other way round
    with pytest.raises(PlanError) as caught:
        collc.Plan.load(saved, mesh)
    message = str(caught.value)
    assert message.startswith(f"{saved}: ") and f"{file}:mine does something else on gpu" in message
    assert message.endswith("or make a new plan.")
    file.write_text(RING.format(step=2))  # wrong
    with pytest.raises(PlanError, match=r"its schedules cannot be used any more: .*own"):
        collc.Plan.load(saved, mesh)
    file.unlink()
    with pytest.raises(PlanError, match=r"there is no schedule file .*own\.py"):
        collc.Plan.load(saved, mesh)


def test_a_schedule_object_is_named_by_its_module(mesh, tmp_path):
    file = tmp_path / "loaded.py"
    file.write_text(RING.format(step=1))
    plan = collc.plan(mesh, {"gpu": load(file).mine})
    assert str(plan.schedule("all_reduce")) == "loaded.mine @ gpu"
    # By that name alone nobody finds it again: refused now, not when the run is resumed.
    with pytest.raises(
        PlanError, match=r"cannot be saved: .*'loaded'.* as 'path/to/file\.py:name'"
    ):
        plan.save(tmp_path / "plan.txt")
    assert not (tmp_path / "plan.txt").exists()


def loaded(text, mesh, tmp_path):
    path = tmp_path / "plan.txt"
    path.write_text(text)
    return collc.Plan.load(path, mesh)


def test_every_truncation_is_refused(mesh, plan, tmp_path):
    text = plan.text
    for end in range(len(text) - 1):  # but for the last newline
        with pytest.raises(PlanError):
            loaded(text[:end], mesh, tmp_path)
    assert loaded(text[:-1], mesh, tmp_path) == plan


@pytest.mark.parametrize(
    "before, after, message",
    [
        ("collc-plan 1", "collc-plan 2", "is no plan of collc"),
        ("mesh host=2", "mesh host=two", "is damaged"),
        ("= ring\n", "= rign\n", "Did you mean ring"),
        ("axis gpu", "axis gqu", "Did you mean gpu"),
        ("= ring\n", "= tree\n", "tree does something else on gpu today"),
        ("all_gather ", "all_gatherer ", "is damaged"),
        ("axis gpu ", "axis gpu 0", "ring does something else on gpu today"),
        ("tree.all_reduce @ host", "tree.allreduce @ host", "is damaged, or of another version"),
    ],
)
def test_damaged_text(mesh, plan, tmp_path, before, after, message):
    assert before in plan.text
    with pytest.raises(PlanError, match=message):
        loaded(plan.text.replace(before, after), mesh, tmp_path)


def test_files_that_are_no_text(mesh, tmp_path):
    with pytest.raises(PlanError, match="cannot read the plan"):
        collc.Plan.load(tmp_path / "missing.txt", mesh)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="cannot read the plan"):
        collc.Plan.load(tmp_path / "binary", mesh)


def test_places_that_cannot_be_written_or_read(mesh, plan, tmp_path):
    for place in (tmp_path, tmp_path / "missing" / "plan.txt", "/dev/full", None):
        with pytest.raises(PlanError, match="cannot write the plan"):
            plan.save(place)
    with pytest.raises(PlanError, match="cannot read the plan None"):
        collc.Plan.load(None, mesh)
    plan.save(tmp_path / "plan.txt")
    with pytest.raises(MeshError, match="a plan is for a jax mesh, not None"):
        collc.Plan.load(tmp_path / "plan.txt", None)


def test_collectives_inside_take_the_axes_of_the_plan(mesh):
    plan = collc.plan(mesh, {"gpu": "ring"})
    x = np.arange(8, dtype=np.float32)
    step = jax.jit(collc.schedule(plan, batch="x")(lambda x: collc.psum(x.sum())))
    assert step(jax.device_put(x, jax.NamedSharding(mesh, P("host")))) == 28
    with pytest.raises(PlanError, match=r"does not schedule axis 'host'\. Known: gpu\."):
        jax.jit(collc.schedule(plan, batch="x")(lambda x: collc.psum(x, "host")))(x)


def test_only_making_and_loading_compare_processes(mesh, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr("collc.planning.plan.compare", lambda topic, facts: seen.append(facts))
    plan = collc.plan(mesh, {"gpu": "ring"})
    plan.save(tmp_path / "plan.txt")  # as process 0 alone does
    assert len(seen) == 1
    collc.Plan.load(tmp_path / "plan.txt", mesh)
    assert len(seen) == 2 and seen[0] == seen[1]
