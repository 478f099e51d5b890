"""Plans that a sweep chooses: by size, kept for the next time, never by luck."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import collc
from collc.errors import MeshError, PlanError
from collc.planning import tune
from collc.receipts.hlo import parse_hlo

OWN = "native.all_reduce @ gpu"
HALVES = "(native.reduce_scatter >> native.all_gather) @ gpu"


def make_mesh(*sizes, names=("host", "gpu")):
    devices = jax.devices()[: int(np.prod(sizes))]
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, names[-len(sizes) :], axis_types=kinds, devices=devices)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Ratios by size and schedule stand in for the sweep; what was asked for is counted."""
    asked: list[int] = []
    table: dict[int, dict[str, float]] = {}

    def ratios(mesh, axes, use, options, size):
        asked.append(size)
        found = {options[0]: tune.WORTH}
        named = {str(s): s for s in options}
        return found | {named[text]: x for text, x in table.get(size, {}).items() if text in named}

    monkeypatch.setenv("COLLC_CACHE", str(tmp_path))
    monkeypatch.setattr(tune, "_ratios", ratios)
    return asked, table


def test_native_where_nothing_is_faster(measured):
    plan = collc.plan(make_mesh(4), "auto")
    assert str(plan) == 'collc.plan(mesh(gpu=4), {"gpu": "auto"}, use="fresh")'
    for collective in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"):
        assert str(plan.schedule(collective)) == f"native.{collective} @ gpu"


def test_by_size_and_in_between(measured):
    """From the size on at which, log-linear between two swept ones, the ratio crosses 1."""
    asked, table = measured
    small, mid, large = tune.SIZES[0], tune.SIZES[2], tune.SIZES[3]
    table[small] = {"ring.all_reduce @ gpu": 0.5}
    table[large] = {HALVES: 0.7}
    table[tune.SIZES[4]] = {HALVES: 0.6, "ring.all_reduce @ gpu": 0.9}
    plan = collc.plan(make_mesh(4), "auto", use="donated")
    assert asked == list(tune.SIZES)
    at = [str(plan.schedule("all_reduce", size=size)) for size in (1, small, mid, large, 1 << 40)]
    assert at == ["ring.all_reduce @ gpu", "ring.all_reduce @ gpu", OWN, HALVES, HALVES]
    (_, _), (leaves, _), (comes, _) = plan.tuned.entries
    assert small < leaves < tune.SIZES[1] and mid < comes < large
    before, after = np.log(4 / 3), np.log(tune.WORTH / 0.7)
    assert comes == round(mid * (large / mid) ** (before / (before + after)))
    # Unknown sizes, such as in explain's certificate, are large ones.
    assert str(plan.schedule("all_reduce")) == HALVES


def test_kept_for_the_next_time(measured):
    asked, table = measured
    table[tune.SIZES[4]] = {HALVES: 0.5}
    first = collc.plan(make_mesh(4), "auto")
    count = len(asked)
    assert collc.plan(make_mesh(4), {"gpu": "auto"}) == first
    assert len(asked) == count  # not swept again
    for other in (
        lambda: collc.plan(make_mesh(4), "auto", use="intermediate"),
        lambda: collc.plan(make_mesh(2), "auto"),
        lambda: collc.plan(make_mesh(2, 2), "auto"),
        lambda: collc.plan(make_mesh(2, 2), {"gpu": "auto"}),
    ):
        other()
        count += len(tune.SIZES)
        assert len(asked) == count
    path = first.tuned.where
    with open(path) as f:
        kept = f.read().splitlines()
    assert kept[0] == f"# {tune.SIZES[0]} bytes, to {OWN}: all others were hopeless"
    assert kept[4] == f"# {tune.SIZES[4]} bytes, to {OWN}: {HALVES} 0.50"
    for damage in (
        "",
        "0 = rnig.all_reduce @ gpu\n",
        "5 = native.all_reduce @ gpu\n",
        "0 = ring.all_gather @ gpu\n",  # no candidate of the sweep
        "0 = allpairs.one_shot @ gpu\n",
        "0 = server.shards({[]: 1}) @ gpu\n",
        "\0",
        "x",
    ):
        with open(path, "w") as f:
            f.write(damage)
        assert collc.plan(make_mesh(4), "auto") == first
        count += len(tune.SIZES)
        assert len(asked) == count
    assert re.search(
        r"Chosen for fresh values.*What was measured: ", " ".join(first.explain().split())
    )


def test_saved_and_loaded(measured, tmp_path):
    measured[1][tune.SIZES[3]] = {HALVES: 0.5}
    mesh = make_mesh(4)
    plan = collc.plan(mesh, "auto", use="donated")
    plan.save(tmp_path / "plan.txt")
    loaded = collc.Plan.load(tmp_path / "plan.txt", mesh)
    assert loaded == plan and loaded.tuned.choices == plan.tuned.choices
    assert loaded.text == plan.text
    text = (tmp_path / "plan.txt").read_text()
    for old, new in (
        (r"(tuned donated \w+) 0 =", r"\1 1 ="),
        (r"(tuned donated \w+ 0 = native)", r"\1e"),
        (r"(tuned donated \w+) 0", r"\1 zero"),
        (r"tuned donated (\w+) 0", r"tuned fresh \1 0"),
        (r"tuned donated \w+ 0", "tuned donated 0123456789abcdef 0"),  # what it was then
    ):
        changed, count = re.subn(old, new, text)
        assert count == 1
        (tmp_path / "plan.txt").write_text(changed)
        with pytest.raises(PlanError, match=r"plan\.txt"):
            collc.Plan.load(tmp_path / "plan.txt", mesh)


def test_a_step_takes_what_fits_its_size(measured):
    """Where XLA's own is chosen, the program is that of lax.psum, op for op."""
    mesh = make_mesh(2, 2)
    both = "(native.reduce_scatter >> native.all_gather) @ (host, gpu)"
    measured[1][tune.SIZES[4]] = {both: 0.5}
    plan = collc.plan(mesh, "auto")

    def compiled(body, count):
        x = {"w": jnp.ones(count, jnp.float32), "b": jnp.ones((3, 2), jnp.float32)}
        f = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        return parse_hlo(jax.jit(f).lower(x).compile().as_text())

    def kinds(found):
        return [(c.kind, c.shapes) for c in found]

    plain = lambda x: jax.lax.psum(x, ("host", "gpu"))  # noqa: E731
    auto = lambda x: collc.psum(x, plan)  # noqa: E731
    assert kinds(compiled(auto, 100)) == kinds(compiled(plain, 100))
    assert len(kinds(compiled(plain, 100))) >= 1
    large = {kind for kind, _ in kinds(compiled(auto, tune.SIZES[4] // 4))}
    assert large == {"reduce-scatter", "all-gather"}


@pytest.mark.parametrize("names", [("gpu",), ("host", "gpu")])
def test_what_is_compared(names):
    """XLA's own first; all proved, and none whose replicas might drift apart."""
    mesh = make_mesh(*(2,) * len(names), names=names)
    found = list(tune.candidates(mesh, names))
    assert found[0] == collc.parse("native.all_reduce") @ names
    assert len(set(found)) == len(found) > 5
    for schedule in found:
        certificate = collc.verify(schedule, **dict(mesh.shape))
        assert certificate.narrow is not False
        assert schedule.axes and set(schedule.axes) == set(names)


@pytest.mark.parametrize("use", ["fresh", "donated", "intermediate"])
def test_a_real_sweep(monkeypatch, tmp_path, use):
    monkeypatch.setenv("COLLC_CACHE", str(tmp_path))
    monkeypatch.setattr(tune, "SIZES", (256, 4096))
    monkeypatch.setattr(tune, "TURNS", (1, 2))
    monkeypatch.setattr(tune, "ALONE", tune.ALONE[:2])
    plan = collc.plan(make_mesh(2), "auto", use=use)
    assert plan.tuned.use == use
    x = np.arange(2 * 5, dtype=np.float32).reshape(2, 5)
    f = jax.shard_map(
        lambda x: collc.psum(x, plan), mesh=plan.mesh, in_specs=P("gpu"), out_specs=P("gpu"),
        check_vma=False,
    )  # fmt: skip
    np.testing.assert_array_equal(jax.jit(f)(x), np.broadcast_to(x.sum(0), x.shape))


def test_what_is_slower_now_and_then_does_not_replace(monkeypatch):
    """Three quarters of the turns have to be faster, and the median by 5 %."""
    mesh = make_mesh(2)
    options = list(tune.candidates(mesh, ("gpu",)))[:3]
    steady, lucky = (str(s) for s in options[1:])

    def in_turns(calls, turns, warmup=3):
        times = {
            str(options[0]): np.ones(turns),
            steady: np.full(turns, 0.9),
            lucky: np.full(turns, 0.8),
        }
        times[lucky][: turns // 3] = 1.1
        return {name: times[name] for name in calls}

    monkeypatch.setattr(tune, "in_turns", in_turns)
    found = tune._ratios(mesh, ("gpu",), "fresh", options, 64)
    assert {str(s): x for s, x in found.items()} == {
        str(options[0]): tune.WORTH,
        steady: 0.9,
        lucky: 1.0,
    }


def test_nothing_to_choose_on_one_rank(measured):
    plan = collc.plan(make_mesh(1), "auto")
    assert measured[0] == [] and str(plan.schedule("all_reduce", size=5)) == OWN


def test_a_sweep_needs_to_run_programs(monkeypatch, tmp_path):
    monkeypatch.setenv("COLLC_CACHE", str(tmp_path))
    monkeypatch.setattr(tune, "SIZES", (256, 4096))
    monkeypatch.setattr(tune, "TURNS", (1, 1))
    monkeypatch.setattr(tune, "ALONE", tune.ALONE[:1])
    mesh = make_mesh(2)
    with pytest.raises(PlanError, match="make the plan outside of jit and shard_map"):
        jax.jit(lambda x: (collc.plan(mesh, "auto"), x)[1])(1.0)
    with jax.disable_jit(), pytest.raises(PlanError, match="without jax_disable_jit"):
        collc.plan(mesh, "auto")
    with jax.set_mesh(make_mesh(4)):  # another one
        assert collc.plan(mesh, "auto").axes == ("gpu",)


def test_refusals():
    mesh = make_mesh(2, 2)
    for axes, use, error, why in (
        ({"gpu": "ring"}, "fresh", PlanError, "use='fresh' has an effect on \"auto\" only"),
        ({"gpu": "ring", "host": "auto"}, None, PlanError, '"auto" chooses for all axes of a plan'),
        ("auto", "", PlanError, "use is fresh, donated, intermediate, not ''"),
        ("auto", "donate", PlanError, "use is fresh, donated, intermediate, not 'donate'"),
        (
            "ring",
            None,
            PlanError,
            'as in {"gpu": "ring"}, or "auto"; not \'ring\'. A schedule over',
        ),
        ({"gup": "auto"}, None, MeshError, "the mesh has no axis 'gup'. Did you mean gpu?"),
    ):
        with pytest.raises(error, match=re.escape(why)):
            collc.plan(mesh, axes, use=use)
    abstract = AbstractMesh((2,), ("gpu",), axis_types=(AxisType.Auto,))
    with pytest.raises(PlanError, match="runs schedules on the devices"):
        collc.plan(abstract, "auto")
