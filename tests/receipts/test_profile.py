"""Profiles of real runs on virtual CPU devices, a handwritten one of GPUs, and files that are none."""

import gzip
import json
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from collc.analysis.certificate import verify
from collc.errors import DataError, MeshError, ScheduleError
from collc.language.parse import parse
from collc.lowering.collectives import psum
from collc.lowering.lower import scope_of
from collc.lowering.sends import title
from collc.receipts import measured
from collc.receipts.measured import measure
from collc.receipts.profile import Profile, Span, names, read_profile, trace

HIERARCHICAL = "ring.reduce_scatter @ gpu >> ring.all_reduce @ host >> ring.all_gather @ gpu"
# And S in bytes, which was to be 100: whole float32, for each rank where the collective cuts it.
SCHEDULES = {
    "all_reduce": ("tree.all_reduce @ (gpu, host)", 100),
    "reduce_scatter": ("ring.reduce_scatter @ gpu", 96),
    "all_gather": ("ring.all_gather @ (host, gpu)", 96),
    "all_to_all": ("pairwise.all_to_all @ gpu", 96),
    "broadcast": ("tree.broadcast @ gpu", 100),
}


def mesh_of(hosts, gpus):
    devices = jax.devices()[: hosts * gpus]
    kinds = (AxisType.Auto,) * 2
    return jax.make_mesh((hosts, gpus), ("host", "gpu"), axis_types=kinds, devices=devices)


@pytest.fixture(scope="module")
def small():
    return mesh_of(2, 2)


@pytest.fixture(scope="module")
def recorded(small, tmp_path_factory):
    """The folder of a profile of 3 calls of a program, its trace, and its HLO text."""

    def block(x):
        with jax.named_scope("mlp"):
            x = jnp.outer(x, x) @ x
        return psum(x, parse("ring.all_reduce @ (host, gpu)"))

    def step(x):
        return jax.shard_map(block, mesh=small, in_specs=P(("host", "gpu")), out_specs=P())(x)

    # On the devices already: each call would move it there, in programs of their own.
    x = jax.device_put(jnp.ones(64), NamedSharding(small, P(("host", "gpu"))))
    compiled = jax.jit(step).lower(x).compile()
    jax.block_until_ready(compiled(x))
    folder = tmp_path_factory.mktemp("profile")
    with jax.profiler.trace(str(folder)):
        for _ in range(3):
            jax.block_until_ready(compiled(x))
    (file,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    return folder, file, compiled.as_text()


def rounds(spans, device):
    return [(s.title, s.round) for s in spans if s.device == device and s.round]


def test_a_hierarchical_schedule_is_measured():
    """Every device runs the certificate's rounds, leaf after leaf; loops name all of theirs."""
    found = measure(HIERARCHICAL, mesh_of(2, 4), 1030, runs=4)
    schedule = parse(HIERARCHICAL)
    leaves = [title(scope_of(leaf)) for leaf in schedule.normal.leaves()]
    assert leaves == [
        "ring.reduce_scatter @ gpu",
        "ring.reduce_scatter @ host",
        "ring.all_gather @ host",
        "ring.all_gather @ gpu",
    ]
    numbers = ["r0-2"] * 3, ["r0"], ["r0"], ["r0-2"] * 3
    want = [(t, r) for t, each in zip(leaves, numbers, strict=True) for r in each]
    assert len(want) == verify(schedule, host=2, gpu=4).rounds
    for device in range(8):
        assert rounds(found.spans, device) == want
    assert {s.device for s in found.spans} == set(range(8))
    assert {s.run for s in found.spans} == {found.run} and len(found.seconds) == 4
    assert found.seconds[found.run] == sorted(found.seconds)[1]
    assert min(s.start for s in found.spans) == 0 and all(s.seconds >= 0 for s in found.spans)
    assert max(s.end for s in found.spans) < found.seconds[found.run]
    assert (found.collective, found.size, found.platform) == ("all_reduce", 1028, "cpu")
    assert f"8 virtual devices, threads that share {found.cores} cores" in found.caveat
    assert replace(found, cores=None).caveat == ""


@pytest.mark.parametrize("collective", SCHEDULES)
def test_every_collective_is_measured(small, collective):
    text, size = SCHEDULES[collective]
    found, schedule = measure(text, small, 100, runs=1), parse(text)
    assert (found.collective, found.size) == (collective, size)
    for device in range(4):
        ran = rounds(found.spans, device)
        assert len(ran) == verify(schedule, host=2, gpu=2).rounds
        assert {t for t, _ in ran} == {title(scope_of(leaf)) for leaf in schedule.normal.leaves()}


def test_xla_s_own_collective_has_a_title_and_no_rounds(small):
    found = measure("native.all_reduce @ gpu", small, 64, runs=1)
    assert Counter((s.device, s.title) for s in found.spans if s.plan) == {
        (device, "native.all_reduce @ gpu"): 1 for device in range(4)
    }


@pytest.mark.parametrize(
    "schedule, size, runs, error, message",
    [
        (
            "ring.all_reduce",
            64,
            1,
            ScheduleError,
            "not placed on an axis. Say ring.all_reduce @ gpu",
        ),
        ("ring.all_reduce @ rack", 64, 1, MeshError, "on rack, which the mesh does not have"),
        ("tree.reduce @ gpu", 64, 1, ScheduleError, "is a reduce. What can be run: all_reduce, "),
        ("ring.all_gather @ gpu", 7, 1, DataError, "for each of 2 ranks: 8 or more is needed"),
        ("ring.all_reduce @ gpu", 0, 1, DataError, "size_bytes is 0, which is not one float32: 4"),
        ("ring.all_reduce @ gpu", 64, 0, DataError, "runs is 0: a number of 1 or more"),
        ("ring.all_reduce @ gpu", 64, True, DataError, "runs is True: a number of 1 or more"),
    ],
)
def test_what_cannot_be_measured(small, schedule, size, runs, error, message):
    with pytest.raises(error, match=message):
        measure(schedule, small, size, runs)


def test_one_rank_alone_has_nothing_to_measure():
    with pytest.raises(MeshError, match="one rank alone"):
        measure("ring.all_reduce @ gpu", mesh_of(2, 1), 64)


def test_a_profiler_that_runs_is_left_alone(small, tmp_path):
    with (
        jax.profiler.trace(str(tmp_path)),
        pytest.raises(DataError, match="profiler cannot be started"),
    ):
        measure("native.all_reduce @ gpu", small, 64)


def test_devices_become_ranks_and_none_may_be_missing():
    span = Span(6, "t", "", True, 0.0, 1.0, "a", "jit_f", 0)
    profile = Profile("f", (span, replace(span, device=3, end=2.0)), 0)
    found = measured._spans(profile, "jit_f", 1, 0, {3: 0, 6: 1})
    assert [(s.device, s.end) for s in found] == [(1, 1.0), (0, 2.0)]
    with pytest.raises(DataError, match="nothing of device 5 in run 0"):
        measured._spans(profile, "jit_f", 1, 0, {3: 0, 6: 1, 5: 2})
    with pytest.raises(DataError, match="noted 1 of 2 runs"):
        measured._spans(profile, "jit_f", 2, 0, {3: 0, 6: 1})


def test_a_folder_is_read_by_the_hlo_that_lies_in_it(recorded):
    """XLA's protobuf beside the trace and the program's text say the same."""
    folder, file, text = recorded
    found = read_profile(folder)
    assert found == read_profile(file) == read_profile(file, hlo=text)
    assert found == read_profile(file.parent) == read_profile(file.parent.parent)
    assert found.devices == (0, 1, 2, 3) and found.unnamed == 0
    assert list(found.runs) == [("jit_step", run) for run in range(3)]
    want = ["ring.reduce_scatter @ (host, gpu)"] * 3 + ["ring.all_gather @ (host, gpu)"] * 3
    for spans in found.runs.values():
        assert spans[0].start == 0
        for device in range(4):
            assert [t for t, _ in rounds(spans, device)] == want
    assert {s.plan for s in found.spans if s.title.startswith("mlp/")} == {False}
    assert not any(s.operation.startswith("while") for s in found.spans)


def test_without_names_there_are_no_scopes(recorded, tmp_path):
    _, file, text = recorded
    alone = tmp_path / "trace.json"
    alone.write_bytes(gzip.decompress(file.read_bytes()))
    assert read_profile(alone, hlo=[text]).spans == read_profile(file).spans
    with pytest.raises(DataError, match="operations of jit_step, but nothing says to which scopes"):
        read_profile(alone)
    other = text.replace("r0-2/ppermute", "r1-3/ppermute")
    with pytest.raises(DataError, match="several programs are called jit_step, and ppermute"):
        read_profile(alone, hlo=[text, other])


def test_the_newest_run_is_read(recorded, tmp_path):
    _, file, _ = recorded
    for name in ("2026_01_31_00_00_00", "2026_02_01_00_00_00"):
        run = tmp_path / "plugins" / "profile" / name
        run.mkdir(parents=True)
        for each in (file, file.with_name(file.name.replace(".trace.json.gz", ".xplane.pb"))):
            (run / each.name).write_bytes(each.read_bytes())
    assert "2026_02_01" in read_profile(tmp_path).file
    (run / "other.trace.json.gz").write_bytes(b"")
    with pytest.raises(DataError, match="the traces of 2 hosts, whose clocks differ"):
        read_profile(tmp_path)
    run.rename(run.with_name("mine"))
    with pytest.raises(
        DataError, match="the runs 2026_01_31_00_00_00, mine, whose names do not say"
    ):
        read_profile(tmp_path)


def test_a_damaged_protobuf_is_refused(recorded, tmp_path):
    """Cut anywhere it is noticed, or what is left says nothing of the program."""
    _, file, _ = recorded
    plane = tmp_path / "x.xplane.pb"
    whole = file.with_name(file.name.replace(".trace.json.gz", ".xplane.pb")).read_bytes()
    plane.write_bytes(whole)
    (known,) = [p[1] for p in names.of_xplane(plane) if p[0] == "jit_step"]
    assert any("/ppermute" in op_name for op_name in known.values())
    for content in (whole[:5000], b"\x0b\x00", b"\xff" * 20, b"\x0a\x7f"):
        plane.write_bytes(content)
        with pytest.raises(DataError, match=r"x\.xplane\.pb is no XSpace, or only the beginning"):
            names.of_xplane(plane)


def gpus(*more):
    """A trace of two GPUs. Handwritten, after what XLA's profiler documents and its source writes."""

    def meta(pid, tid, kind, name):
        return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}

    def kernel(pid, tid, ts, dur, op, name, **args):
        args = {"hlo_module": "jit_f", "hlo_op": op, "name": name, "tf_op": "XlaModule:"} | args
        return {"ph": "X", "pid": pid, "tid": tid, "ts": ts, "dur": dur, "name": "k", "args": args}

    scope = "jit(f)/collc/ring.all_gather/gpu/r0/ppermute"
    short = {"prefix": "jit(f)/collc/ring.all_gather/gpu"}
    found = [
        meta(701, 0, "process_name", "/host:CPU"),
        *(meta(pid, 0, "process_name", f"/device:GPU:{pid - 1}") for pid in (1, 2)),
        *(meta(pid, 14, "thread_name", "Stream #14(Compute,MemcpyD2D)") for pid in (1, 2)),
        meta(1, 99, "thread_name", "XLA Ops"),
        *(
            {
                "ph": "X",
                "pid": 701,
                "tid": 5,
                "ts": ts,
                "dur": 90,
                "name": "s",
                "args": {"step_num": n},
            }
            for n, ts in (("7", 100), ("8", 200))
        ),
        kernel(1, 14, 110.5, 10.25, "collective-permute-start.1", scope),
        kernel(2, 14, 111, 20, "collective-permute-start.1", "r0/ppermute", **short),
        kernel(2, 14, 131, 1, "fusion.2", "jit(f)/mlp/add"),
        kernel(1, 99, 110.5, 10.25, "collective-permute-start.1", scope),
        {"ph": "X", "pid": 1, "tid": 14, "ts": 121, "dur": 1, "name": "MemcpyD2D", "args": {}},
        kernel(1, 14, 210.5, 10, "collective-permute-start.1", scope),
        {},
    ]
    return {"displayTimeUnit": "ns", "traceEvents": [*more, *found]}


def test_gpus(tmp_path):
    """Streams, not the lines made of them; runs by steps; the prefix that XLA took off is put back."""
    file = tmp_path / "gpu.trace.json.gz"
    file.write_bytes(gzip.compress(json.dumps(gpus()).encode()))
    found = read_profile(file)
    here, op = "ring.all_gather @ gpu", "collective-permute-start.1"
    assert [(s.device, s.title, s.round, s.plan, s.operation, s.run) for s in found.spans] == [
        (0, here, "r0", True, op, 0),
        (1, here, "r0", True, op, 0),
        (1, "mlp/add", "", False, "fusion.2", 0),
        (0, here, "r0", True, op, 1),
    ]
    assert [s.start for s in found.spans] == pytest.approx([0, 0.5e-6, 20.5e-6, 100e-6], abs=1e-15)
    assert found.spans[0].seconds == pytest.approx(10.25e-6, abs=1e-15)
    assert found.unnamed == 1 and found.devices == (0, 1)
    assert [s.start for s in found.runs["jit_f", 1]] == [0]


def test_gpus_whose_names_are_cut(tmp_path):
    """The profiler splits names at commas, as between two axes; HLO has them whole."""
    args = {"hlo_module": "jit_f", "hlo_op": "a.1", "name": "jit(f)/collc/ring.all_gather/host"}
    cut = {"ph": "X", "pid": 1, "tid": 14, "ts": 120, "dur": 1, "name": "k", "args": args}
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps(gpus(cut)))
    with pytest.raises(
        DataError, match=r"a\.1 is of the scope .*/host, which the profiler may have cut"
    ):
        read_profile(file)
    twice = {"ph": "M", "pid": 9, "name": "process_name", "args": {"name": "/device:GPU:0"}}
    file.write_text(json.dumps(gpus(twice)))
    with pytest.raises(DataError, match="has GPU 0 twice: it is of several hosts"):
        read_profile(file)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is empty"),
        (gzip.compress(b" \n", mtime=0), "is empty"),
        (gzip.compress(json.dumps(gpus()).encode(), mtime=0)[:-30], "is truncated or damaged"),
        (b"\x1f\x8b" + b"x" * 50, "is truncated or damaged"),
        (json.dumps(gpus()).encode()[:-3], "is not JSON, or only the beginning of it"),
        (b"<xml/>", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"events": []}', "is JSON, but no trace: it has no list of traceEvents"),
        (b"3", "is JSON, but no trace"),
        (b'{"traceEvents": []}', "has 0 events, and none is an operation of XLA"),
        (b"[3]", "event 0 of traceEvents is no object: 3"),
        (
            b'[{"ph": "X", "name": "a", "dur": 1}]',
            "event 0 of traceEvents, a, has no time: ts is None",
        ),
        (b'[{"ph": "X", "ts": NaN}]', "has no time: ts is nan"),
        (b'[{"ph": "X", "ts": 1, "dur": -1}]', "ts is 1 and dur -1. Numbers of micro"),
        (
            b'[{"ph": "X", "ts": 1, "args": {"hlo_op": "a", "device_ordinal": "x"}}]',
            "a ran on device 'x', which is no number",
        ),
    ],
)
def test_files_that_are_no_profile(tmp_path, content, message):
    file = tmp_path / "some.json"
    file.write_bytes(content)
    with pytest.raises(DataError, match=f"some.json.*{message}"):
        read_profile(file)


def test_what_is_missing_or_too_much(tmp_path, monkeypatch):
    with pytest.raises(
        DataError, match=r"nowhere does not exist\. Record one with jax.profiler.trace"
    ):
        read_profile(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"holds no profile, plugins/profile/RUN/HOST\.trace"):
        read_profile(tmp_path)
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps(gpus()))
    monkeypatch.setattr(trace, "MOST_EVENTS", 8)
    with pytest.raises(
        DataError, match="has 8 events, to which XLA cuts a trace: its end is missing"
    ):
        read_profile(file)
    monkeypatch.setattr(trace, "MOST_BYTES", 1 << 10)
    with pytest.raises(DataError, match="more than 0 MiB unzipped"):
        read_profile(file)
