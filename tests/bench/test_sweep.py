"""The sweep: what is measured, in which terms, and what is refused."""

import jax
import numpy as np
import pytest

from collc.bench import memory
from collc.bench import sweep as sweeps
from collc.bench.plot import plot, writable
from collc.bench.sweep import one_group, prepare, sweep
from collc.bench.table import WIDTH, Table, as_json
from collc.errors import CollcError, DataError, MeshError, ScheduleError

RING = "ring.all_reduce @ gpu"


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2), ("host", "gpu"), devices=jax.devices()[:4])


@pytest.fixture(scope="module")
def rows(mesh):
    return sweep(mesh, {"ring": RING}, [1024, 4099], iterations=3, warmup=1)


def test_rows_are_in_the_terms_of_nccl_tests(rows):
    assert [(r.size, r.use, r.schedule) for r in rows[:4]] == [
        (1024, "fresh", "lax.psum"),
        (1024, "fresh", "ring"),
        (1024, "donated", "lax.psum"),
        (1024, "donated", "ring"),
    ]
    assert {(r.size, r.count) for r in rows} == {(1024, 256), (4096, 1024)}
    for r in rows:
        assert r.wrong == 0 and 0 < r.median <= r.p99 and r.variation >= 0
        assert r.algbw == pytest.approx(r.size / r.median)
        assert r.busbw == pytest.approx(r.algbw * 2 * (2 - 1) / 2)
        assert r.ratio == 1 if r.schedule == "lax.psum" else r.ratio > 0


def test_a_wrong_function_is_noticed_in_every_use(mesh, monkeypatch):
    right = sweeps.per_device

    def mutant(collective, on):
        own = right(collective, on)
        return own if isinstance(on, tuple) else lambda x: own(x).at[0].add(1)

    monkeypatch.setattr(sweeps, "per_device", mutant)
    uses = ("fresh", "donated", "intermediate")
    found = sweep(mesh, [RING], [64], iterations=1, warmup=0, uses=uses)
    assert {(r.use, r.schedule): r.wrong for r in found} == {
        (use, label): count for use in uses for label, count in (("lax.psum", 0), (RING, 4))
    }


def test_a_group_alone(mesh):
    alone = one_group(mesh, ("host",))
    assert dict(alone.shape) == {"host": 2, "gpu": 1}
    assert [d.id for d in alone.devices.flat] == [mesh.devices[0, 0].id, mesh.devices[1, 0].id]
    found = sweep(
        mesh, ["ring.all_reduce @ host"], [64], iterations=1, warmup=0, uses=["fresh"],
        groups=["all", "alone"],
    )  # fmt: skip
    assert [(r.groups, r.wrong) for r in found] == [("all", 0)] * 2 + [("alone", 0)] * 2


def test_a_use_that_is_not_possible_is_empty(mesh):
    what = prepare(mesh, ["ring.all_gather @ gpu"], [64], iterations=1, warmup=0)
    fresh, donated = what.blocks()
    assert all(r.median and r.wrong == 0 for r in fresh)
    assert all(r.median is None and r.busbw is None and r.wrong is None for r in donated)
    table = Table(what)
    assert any("not possible" in line for line in table.header())
    assert len(table.lines(donated)) == 1 and table.lines(donated)[0].split()[:3] == [
        "64", "donated", "-",
    ]  # fmt: skip


def test_replicas_that_may_differ_are_named(mesh):
    both = ["allpairs.one_shot @ (host, gpu)", "ring.all_reduce @ (host, gpu)"]
    said = [line for line in Table(prepare(mesh, both, [64])).header() if "replicas" in line]
    assert len(said) == 1 and "allpairs.one_shot" in said[0] and "ring" not in said[0]
    assert not any("replicas" in line for line in Table(prepare(mesh, [RING], [64])).header())


def test_it_can_be_stopped(mesh):
    class Stop(Exception):
        pass

    calls = 0

    def going():
        nonlocal calls
        calls += 1
        if calls == 14:  # a block takes 1 + 2 to compile + 2 to check + 4
            raise Stop

    what = prepare(mesh, [RING], [64, 128, 256], iterations=2, warmup=0, uses=["fresh"])
    done = []
    with pytest.raises(Stop):
        for block in what.blocks(going):
            done.append(block)
    assert len(done) == 1 and calls == 14


@pytest.mark.parametrize(
    "schedules, options, error, needed",
    [
        ([], {}, ScheduleError, "no schedule to measure"),
        (["ring.all_reduce"], {}, ScheduleError, "ring.all_reduce is not placed"),
        (["ring.all_reduce @ x"], {}, MeshError, "mesh does not have"),
        (["server.push_pull @ gpu"], {}, ScheduleError, "server"),
        (["tree.reduce @ gpu"], {}, ScheduleError, "is a reduce: jax.lax has nothing"),
        ([RING, "ring.all_gather @ gpu"], {}, ScheduleError, "two runs"),
        ([RING, "ring.all_reduce @ host"], {}, ScheduleError, "two runs"),
        (
            ["ring.all_gather @ (host, gpu)", "ring.all_gather @ (gpu, host)"],
            {},
            ScheduleError,
            "different orders",
        ),
        ({"lax.psum": RING}, {}, ScheduleError, "another name"),
        ([RING], {"iterations": 0}, DataError, "at least 1"),
        ([RING], {"uses": ["frsh"]}, DataError, "Did you mean fresh"),
        ([RING], {"uses": ["fresh", "fresh"]}, DataError, "each of them once"),
        ([RING], {"dtype": "float64"}, DataError, "JAX_ENABLE_X64"),
        (["ring.all_gather @ gpu"], {"uses": ["donated"]}, DataError, "Take fresh"),
        (
            ["ring.all_reduce @ (host, gpu)"],
            {"groups": ["alone"]},
            MeshError,
            "a single group of .host, gpu.",
        ),
    ],
)
def test_what_is_refused(mesh, schedules, options, error, needed):
    with pytest.raises(error, match=needed):
        prepare(mesh, schedules, [64], **options)


def test_orders_do_not_matter_where_nothing_is_cut(mesh):
    prepare(mesh, ["ring.all_reduce @ (host, gpu)", "ring.all_reduce @ (gpu, host)"], [64])


def test_memory(mesh, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 1 << 30)
    prepare(mesh, [RING], [1 << 20])
    with pytest.raises(DataError, match=r"1G bytes on each of 4 devices .* has 1.0 GiB left"):
        prepare(mesh, [RING], [64, 1 << 30])
    monkeypatch.setattr(memory, "available", lambda: None)
    prepare(mesh, [RING], [1 << 30])


def test_available_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "LIMIT", tmp_path / "max")
    monkeypatch.setattr(memory, "USED", tmp_path / "used")
    assert (memory.available() or 1) > 0
    (tmp_path / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable:     500 kB\n")
    assert memory.available() == 500 * 1024
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "used").write_text("1000\n")
    assert memory.available() == 500 * 1024
    (tmp_path / "max").write_text("9000\n")
    assert memory.available() == 8000


def test_the_table_fits(mesh, rows):
    long = f"{RING} | ring.all_reduce @ gpu | ring.all_reduce @ gpu"
    uses = ["fresh", "donated", "intermediate"]
    what = prepare(mesh, {"ring": RING, long: RING}, [1 << 20], uses=uses)
    table = Table(what)
    times = dict(median=12.345, p99=98.765, mean=13, variation=3.21, algbw=1e12, busbw=1e12)
    block = [
        sweeps.Row("all", 1 << 30, 1 << 28, "intermediate", label, ratio=12.34, wrong=1, **times)
        for label in what.labels
    ]
    lines = [*table.header(), *table.titles("all"), *table.titles("alone"), *table.lines(block)]
    assert max(map(len, lines)) <= WIDTH
    text = "\n".join(lines)
    assert "mesh host=2,gpu=2: 4 x cpu; jax" in text and "busbw = algbw x 1" in text
    assert "2 groups of gpu, all at once" in text and "one group of gpu alone, of 2" in text
    assert "CPU times say nothing about the ranking on GPUs" in text
    assert f"# [2] {long[:30]}" in text and "  [2]  " in text
    assert len({len(line) for line in table.lines(block)}) == 1
    assert table.footer(rows) == "# wrong elements: 0 OK"
    assert table.footer(block) == "# wrong elements: 3 FAILED"
    assert table.footer([]) == "# wrong elements: not checked"


def test_json_is_in_si_units(mesh, rows):
    what = prepare(mesh, {"ring": RING}, [1024, 4099], iterations=3, warmup=1)
    found = as_json(what, rows)
    assert (found["collective"], found["ranks"], found["groups"]) == ("all_reduce", 2, 2)
    assert found["schedules"]["ring"]["schedule"] == RING and found["base"] == "lax.psum"
    assert found["wrong"] == 0 and found["complete"] and found["machine"]["platform"] == "cpu"
    assert found["rows"][1]["median_s"] == rows[1].median
    assert found["rows"][1]["busbw_bytes_per_s"] == rows[1].busbw
    assert all(not isinstance(v, np.generic) for row in found["rows"] for v in row.values())


@pytest.mark.newest_only
def test_plot(rows, tmp_path):
    for name in ("out.svg", "out.PNG"):
        writable(tmp_path / name)
        plot(tmp_path / name, rows, "a title")
    drawn = (tmp_path / "out.svg").read_text()
    assert (tmp_path / "out.PNG").read_bytes().startswith(b"\x89PNG")
    for word in ("ring", "lax.psum", "fresh", "donated", "a title", "busbw in GB/s", "4K"):
        assert f"<!-- {word} -->" in drawn, word
    with pytest.raises(DataError, match="nothing to show"):
        plot(tmp_path / "out.svg", [], "")


@pytest.mark.filterwarnings("error")
def test_a_plot_of_one_rank(tmp_path):
    mesh = jax.make_mesh((1,), ("gpu",), devices=jax.devices()[:1])
    found = sweep(mesh, [RING], [64], iterations=1, warmup=0)
    assert {r.busbw for r in found} == {0}
    plot(tmp_path / "one.png", found, "one")


def test_plots_that_cannot_be(tmp_path, monkeypatch):
    for path, needed in (
        ("x.foo", "png.*and .foo is none of them"),
        ("x", "it has no ending"),
        ("no/x.png", "no folder .*no. Make it"),
    ):
        with pytest.raises(DataError, match=needed):
            writable(tmp_path / path)
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(DataError, match="Choose another place"):
        writable(tmp_path / "folder.png")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CollcError, match=r'pip install "collc\[plot\]"'):
        writable(tmp_path / "x.png")
