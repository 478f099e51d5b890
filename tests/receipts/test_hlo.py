"""The texts are cut from real compilations: jax 0.10.2 and 0.12.0.1, CPU and (deviceless) H100."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collc.errors import HloError
from collc.receipts.hlo import Collective, count, parse_hlo

RING = tuple((r, (r + 1) % 8) for r in range(8))
ALL = (tuple(range(8)),)
ROWS = ((0, 1, 2, 3), (4, 5, 6, 7))
COLUMNS = ((0, 4), (1, 5), (2, 6), (3, 7))

ADD = """\
%add (psum.0: f32[], psum.1: f32[]) -> f32[] {
  %psum.0 = f32[] parameter(0), metadata={op_name="psum"}
  %psum.1 = f32[] parameter(1), metadata={op_name="psum"}
  ROOT %add.0 = f32[] add(%psum.0, %psum.1), metadata={op_name="add" stack_frame_id=4}
}
"""


def module(*lines: str, before: str = "", header: str = "num_partitions=8") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return (
        "HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}},"
        f' {header}\n\nFileNames\n1 "all-reduce.py"\n\n{ADD}\n{before}\n'
        f"ENTRY %main.0_spmd (param.1: f32[8], all-reduce.1: f32[8]) -> f32[8] {{\n{body}\n}}\n"
    )


def one(line: str, **kw: str) -> Collective:
    (found,) = parse_hlo(module(line, **kw))
    return found


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ROWS),
        ("{{0,3},{1,2},{4,5},{6,7}}", ((0, 3), (1, 2), (4, 5), (6, 7))),
        ("{}", ALL),
        ("[2,4]<=[8]", ROWS),
        ("[4,2]<=[2,4]T(1,0)", COLUMNS),
        ("mesh['h'=2,'g'=4] {'g'}", ROWS),
        ("mesh['h'=2,'g'=4] {'h'}", COLUMNS),
        ("mesh['h'=2,'g'=4] {'h','g'}", ALL),
        ("mesh['a'=2,'b'=2,'c'=2] {'c','a'}", ((0, 4, 1, 5), (2, 6, 3, 7))),
        ("mesh['h'=2,'g'=4] {'g':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['h'=2,'g'=4] {'g':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['we,ird {a} x'=8] {'we,ird {a} x'}", ALL),
        ("mesh['all-reduce'=8] {'all-reduce'}", ALL),
        ("mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'b'}", ROWS),
        (
            "mesh['a'=4,'b'=2], device_ids=([2,2,2]T(0,2,1)) {'a':(2)2}",
            ((0, 1), (2, 3), (4, 5), (6, 7)),
        ),
        (
            "mesh['h'=2,'g'=4], device_ids=(0,3,1,2,7,5,6,4) {'h'}",
            ((0, 7), (3, 5), (1, 6), (2, 4)),
        ),
    ],
)
def test_groups(written, groups):
    found = one(
        f"ROOT %psum.7 = f32[8]{{0}} all-reduce(%param.1), channel_id=1, replica_groups={written},"
        " use_global_device_ids=true, to_apply=%add,"
        ' metadata={op_name="jit(<lambda>)/shard_map/psum" stack_frame_id=5}'
    )
    assert found == Collective(
        "psum.7", "all-reduce", ("f32",), ((8,),), groups, None, 1, False,
        "jit(<lambda>)/shard_map/psum",
    )  # fmt: skip
    assert found.bytes == 32


OLD, NEW = "replica_groups={{0,1,2,3,4,5,6,7}}", "replica_groups=mesh['x'=8] {'x'}"
PAIRS = "source_target_pairs={{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}"


@pytest.mark.parametrize(
    ("line", "kind", "results", "bytes_", "asynchronous"),
    [
        # CPU, both versions
        (
            "%all-reduce = (f32[8]{0}, f32[3]{0}) all-reduce(%param.1, %broadcast_multiply_fusion),"
            f" channel_id=1, {NEW}, use_global_device_ids=true, to_apply=%add",
            "all-reduce", [("f32", (8,)), ("f32", (3,))], 44, False,
        ),
        (
            f"ROOT %psum.7 = f32[] all-reduce(%slice_bitcast_fusion), channel_id=1, {OLD},"
            " use_global_device_ids=true, to_apply=%add",
            "all-reduce", [("f32", ())], 4, False,
        ),
        (
            "%all-to-all = (f32[1]{0}, f32[1]{0}, f32[1]{0}, f32[1]{0}, f32[1]{0},"
            " /*index=5*/f32[1]{0}, f32[1]{0}, f32[1]{0}) all-to-all(%s, %s.1, %s.2, %s.3, %s.4,"
            " /*index=5*/%s.5, %s.6, %s.7),"
            f" channel_id=1, {OLD}",
            "all-to-all", [("f32", (1,))] * 8, 32, False,
        ),
        (
            f"ROOT %all_gather.3 = f32[64]{{0}} all-gather(%param.1), channel_id=1, {NEW},"
            " dimensions={0}, use_global_device_ids=true",
            "all-gather", [("f32", (64,))], 256, False,
        ),
        (
            f"ROOT %reduce_scatter.7 = f32[1]{{0}} reduce-scatter(%param.1), channel_id=1, {NEW},"
            " use_global_device_ids=true, dimensions={0}, to_apply=%add",
            "reduce-scatter", [("f32", (1,))], 4, False,
        ),
        (
            f"ROOT %ppermute.3 = pred[8]{{0}} collective-permute(%fusion), channel_id=1, {PAIRS}",
            "collective-permute", [("pred", (8,))], 8, False,
        ),
        # H100, jax 0.10.2
        (
            f"%all-reduce-start = f32[1024]{{0}} all-reduce-start(%copy.7), channel_id=1, {OLD},"
            " use_global_device_ids=true, to_apply=%add",
            "all-reduce", [("f32", (1024,))], 4096, True,
        ),
        (
            "%all-gather-start = (f32[1024]{0}, f32[8192]{0}) all-gather-start(%copy.7),"
            f" channel_id=1, {OLD}, dimensions={{0}}, use_global_device_ids=true",
            "all-gather", [("f32", (8192,))], 32768, True,
        ),
        (
            "%collective-permute-start = (bf16[1024]{0}, bf16[1024]{0})"
            f" collective-permute-start(%copy.4), channel_id=1, {PAIRS}",
            "collective-permute", [("bf16", (1024,))], 2048, True,
        ),
        (
            "%all-to-all-start = ((f32[1024]{0}), f32[1024]{0}) all-to-all-start(%g), channel_id=1,"
            f" {OLD}, dimensions={{0}}",
            "all-to-all", [("f32", (1024,))], 4096, True,
        ),
        (
            "%collective-broadcast-start = ((f32[1024]{0}), f32[1024]{0})"
            " collective-broadcast-start(%p), channel_id=1, replica_groups={{2,0,1,3,4,5,6,7}}",
            "collective-broadcast", [("f32", (1024,))], 4096, True,
        ),
        # H100, jax 0.12.0.1
        (
            "%all-reduce-start = ((f32[1024]{0}), f32[1024]{0}) all-reduce-start(%g), channel_id=1,"
            f" {NEW}, use_global_device_ids=true, to_apply=%add,"
            " output_to_operand_aliasing={{1}: (0, {})}",
            "all-reduce", [("f32", (1024,))], 4096, True,
        ),
        (
            "%collective-permute-start = ((f32[1024]{0}, f32[7]{0}), (f32[1024]{0}, f32[7]{0}))"
            f" collective-permute-start(%param.1, %loop_multiply_fusion.1), channel_id=1, {PAIRS}",
            "collective-permute", [("f32", (1024,)), ("f32", (7,))], 4124, True,
        ),
        # grammar only: contexts, tiled layouts, small types
        (
            "%p = (s4[7,2]{1,0:T(8,128)(2,1)S(5)}, s4[7,3]{1,0}, u32[], u32[])"
            f" collective-permute-start(%q), channel_id=1, {PAIRS}",
            "collective-permute", [("s4", (7, 3))], 11, True,
        ),
        (
            f"%r = (f8e4m3fn[3]{{0}}, c128[2]{{0}}, bf16[0]{{0}}) all-reduce(%q), {OLD}",
            "all-reduce", [("f8e4m3fn", (3,)), ("c128", (2,)), ("bf16", (0,))], 35, False,
        ),
    ],
)  # fmt: skip
def test_kinds_and_results(line, kind, results, bytes_, asynchronous):
    found = one(line)
    assert (found.kind, list(zip(found.dtypes, found.shapes, strict=True))) == (kind, results)
    assert (found.bytes, found.asynchronous, found.count) == (bytes_, asynchronous, 1)
    assert (found.pairs, found.groups is None) == (
        (RING, True) if kind == "collective-permute" else (None, False)
    )


PERMUTE = (
    f"%ppermute.5 = f32[8]{{0}} collective-permute(%get-tuple-element.56), channel_id=1, {PAIRS}"
)


def loop(name: str, inside: str) -> str:
    return f"""\
%{name}_body (param.8: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %param.8 = (s32[], f32[8]{{0}}) parameter(0)
  {inside}
  ROOT %tuple.18 = (s32[], f32[8]{{0}}) tuple(%wrapped_add, %broadcast_add_fusion)
}}

%{name}_cond (param.7: (s32[], f32[8])) -> pred[] {{
  %param.7 = (s32[], f32[8]{{0}}) parameter(0)
  ROOT %lt = pred[] compare(%get-tuple-element.46, %constant.2), direction=LT
}}
"""


def while_(name: str, trips: int | None) -> str:
    known = f',"known_trip_count":{{"n":"{trips}"}}' if trips is not None else ""
    return (
        f"%while_{name} = (s32[], f32[8]{{0}}) while(%tuple.16), condition=%{name}_cond,"
        f' body=%{name}_body, metadata={{op_name="jit(f)/shard_map/while" stack_frame_id=8}},'
        f' backend_config={{"dynamic_variables":[]{known}}}'
    )


def test_loops_multiply():
    inner, outer = loop("wide.inner", PERMUTE), loop("outer", while_("wide.inner", 5))
    text = module(PERMUTE, while_("outer", 3), before=inner + "\n" + outer)
    assert [c.count for c in parse_hlo(text)] == [1, 15]
    assert count(parse_hlo(text)) == {"collective-permute": 16}


def test_loop_of_unknown_length_is_refused_only_with_a_collective():
    with pytest.raises(HloError, match=r"runs collective-permute(.|\n)*%while_w = "):
        parse_hlo(module(while_("w", None), before=loop("w", PERMUTE)))
    assert parse_hlo(module(while_("w", None), before=loop("w", "%c = s32[] constant(1)"))) == ()


def test_condition_runs_once_more():
    asked = loop("w", "%c = s32[] constant(1)").replace("  ROOT %lt", f"  {PERMUTE}\n  ROOT %lt")
    assert count(parse_hlo(module(while_("w", 4), before=asked))) == {"collective-permute": 5}


def computation(name: str, *lines: str) -> str:
    return f"%{name} (p: f32[8]) -> f32[8] {{\n" + "\n".join(f"  {x}" for x in lines) + "\n}\n"


def test_calls_are_followed_as_often_as_they_occur():
    before = computation("f", PERMUTE) + computation("unreachable", PERMUTE)
    call, fusion = "%a = f32[8]{0} call(%p), to_apply=%f", "%b = f32[8]{0} fusion(%a), calls=%f"
    assert count(parse_hlo(module(call, fusion, before=before))) == {"collective-permute": 2}


def test_start_and_done_count_once():
    start = f"%s = (f32[8]{{0}}, f32[8]{{0}}) collective-permute-start(%p), channel_id=1, {PAIRS}"
    (found,) = parse_hlo(module(start, "ROOT %d = f32[8]{0} collective-permute-done(%s)"))
    assert (found.name, found.asynchronous) == ("s", True)


def test_async_wrapper_counts_once():
    wrapped = f'%async (p: f32[8]) -> f32[8] {{\n  {PERMUTE}\n}}, execution_thread="main"\n'
    type_ = "((f32[8]{0}), f32[8]{0}, u32[])"
    (found,) = parse_hlo(
        module(
            f"%s = {type_} async-start(%p), calls=%async",
            f"%u = {type_} async-update(%s), calls=%async",
            "%d = f32[8]{0} async-done(%u), calls=%async",
            before=wrapped,
        )
    )
    assert (found.count, found.asynchronous, found.bytes) == (1, True, 32)


def branches(first: str, second: str, how: str = "branch_computations={%one, %two}") -> str:
    line = f"%conditional.1 = (f32[8]{{0}}) conditional(%i, %t, %t), {how}"
    return module(line, before=computation("one", first) + computation("two", second))


def test_conditionals():
    other = PERMUTE.replace("%ppermute.5", "%ppermute.6")
    assert count(parse_hlo(branches(PERMUTE, other))) == {"collective-permute": 1}
    pred = "true_computation=%one, false_computation=%two"
    assert count(parse_hlo(branches(PERMUTE, other, pred))) == {"collective-permute": 1}
    for differs in ("%c = f32[8]{0} copy(%p)", PERMUTE.replace("f32[8]", "f32[4]")):
        with pytest.raises(HloError, match="branches of a conditional hold different"):
            parse_hlo(branches(PERMUTE, differs))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "No ENTRY"),
        (module(PERMUTE).replace("ENTRY ", ""), "No ENTRY"),
        (module(PERMUTE) + module(PERMUTE), "Pass one module"),
        (module("%a = f32[8]{0} call(%p), to_apply=%gone"), "calls gone, which is not there"),
        (module("%a = f32[8]{0} call(%p)"), "one to_apply=%computation"),
        (module(while_("w", 3).replace("body=", "boody="), before=loop("w", "")), "one body="),
        (branches(PERMUTE, PERMUTE, "branches={%one, %two}"), "name its branches"),
        (module("%a = f32[8]{0} call(%p), to_apply=%f",
                before=computation("f", "%b = f32[8]{0} call(%p), to_apply=%f")), "part of"),
        (module("%m = f32[8]{0} map(%p), to_apply=%f",
                before=computation("f", PERMUTE)), "nobody knows how often"),
        (module("%s = (f32[8]{0}, u32[], token[]) send(%p, %t), channel_id=2"), "send and recv"),
        (module(PERMUTE.replace("-permute(", "-permeate(")), "not one of the collectives"),
        (module(PERMUTE.replace("f32[8]", "f99[8]")), "no known size"),
        (module(PERMUTE.replace("f32[8]", "f32[<=8]")), "cannot be read"),
        (module(PERMUTE.replace("{0,1},", "{0,1,2},")), "not a list of pairs"),
        (module(PERMUTE.replace("(%get", " %get")), "not where an opcode belongs|cannot read this"),
        (module(PERMUTE + ", slice_sizes={{8}}"), "slices in place"),
        (module(f"%r = f32[8]{{0}} all-reduce(%q), {NEW.replace('8', '9', 1)}x"), "known forms"),
        (module("%r = f32[8]{0} all-reduce(%q), replica_groups=mesh['x'=8] {'y'}"), "no axis 'y'"),
        (module("%r = f32[8]{0} all-reduce(%q), replica_groups=[3,4]<=[8]"), "cannot be read"),
        (module("%r = f32[8]{0} all-reduce(%q), replica_groups=mesh['x'=8] {'x':(3)2}"), "divide"),
        (module("%r = f32[8]{0} all-reduce(%q), replica_groups={}",
                header="replica_count=2, num_partitions=4"), "both replicas and partitions"),
        (module("%r = f32[8]{0} all-gather-start(%q), replica_groups={}"), "has to have the type"),
        (module("%r = f32[8]{0} all-reduce(%q), channel_id=1"), "has to have replica_groups"),
    ],
)  # fmt: skip
def test_refusals(text, message):
    with pytest.raises(HloError, match=message):
        parse_hlo(text)


def test_no_truncation_loses_a_collective():
    """Cut anywhere, a text is refused or says the same: cut lines, and lines that are missing."""
    line = f'{PERMUTE}, metadata={{op_name="jit(f)/ppermute"}}'
    text = module(while_("w", 7), before=loop("w", line))
    whole = {"collective-permute": 7}
    assert count(parse_hlo(text)) == whole
    for target in (line, while_("w", 7)):
        for end in range(1, len(target)):
            with contextlib.suppress(HloError):
                assert count(parse_hlo(text.replace(target, target[:end]))) == whole, target[:end]
    lines = text.splitlines(keepends=True)
    for end in range(len(lines)):
        with pytest.raises(HloError):
            parse_hlo("".join(lines[:end]))


# ---- what this machine's jax and XLA:CPU print -------------------------------------------------


def mesh(*shape: int) -> Mesh:
    devices = jax.devices()[:8]
    assert len(devices) == 8, "run with XLA_FLAGS=--xla_force_host_platform_device_count=8"
    names = {1: ("x",), 2: ("h", "g")}[len(shape)]
    return Mesh(np.array(devices).reshape(shape), names, axis_types=(AxisType.Auto,) * len(shape))


def read(f, *args) -> tuple[Collective, ...]:
    return parse_hlo(f.lower(*args).compile().as_text())


def compiled(f, *shape: int, dtype=jnp.float32) -> tuple[Collective, ...]:
    m = mesh(*(shape or (8,)))
    spec = P(m.axis_names)
    g = jax.shard_map(f, mesh=m, in_specs=spec, out_specs=spec, check_vma=False)
    return read(jax.jit(g), jnp.zeros(64, dtype))


@pytest.mark.parametrize(
    ("f", "kind", "bytes_"),
    [
        (lambda v: lax.psum(v, "x"), "all-reduce", 32),
        (lambda v: lax.psum_scatter(v, "x", tiled=True), "reduce-scatter", 4),
        (lambda v: lax.all_gather(v, "x", tiled=True), "all-gather", 256),
        (lambda v: lax.all_to_all(v, "x", 0, 0, tiled=True), "all-to-all", 32),
    ],
)
def test_live_grouped(f, kind, bytes_):
    (found,) = compiled(f)
    assert (found.kind, found.bytes, found.groups, found.count) == (kind, bytes_, ALL, 1)
    assert (found.pairs, found.asynchronous) == (None, False)
    assert "shard_map" in found.op_name


def test_live_axes():
    (g,) = compiled(lambda v: lax.psum(v, "g"), 2, 4)
    (h,) = compiled(lambda v: lax.all_gather(v, "h", tiled=True), 2, 4)
    assert (g.groups, h.groups) == (ROWS, COLUMNS)


def permute(v):
    return lax.ppermute(v, "x", RING)


def test_live_permutes():
    (found,) = compiled(permute, dtype=jnp.int8)
    assert (found.kind, found.pairs, found.groups) == ("collective-permute", RING, None)
    assert (found.dtypes, found.shapes, found.bytes) == (("s8",), ((8,),), 8)


@pytest.mark.parametrize("trips", [1, 2, 7, 40])
def test_live_loop(trips):
    (found,) = compiled(lambda v: lax.fori_loop(0, trips, lambda i, c: permute(c) * 1.5 + i, v))
    assert (found.count, found.pairs, found.bytes) == (trips, RING, 32)


def test_live_unrolled_loop_and_nested_scan():
    f = lambda v: lax.fori_loop(0, 7, lambda i, c: permute(c) + i, v, unroll=2)  # noqa: E731
    assert count(compiled(f)) == {"collective-permute": 7}

    def nested(v):
        def outer(c, _):
            c = lax.scan(lambda c, _: (permute(c) * 2, None), c, None, length=5)[0]
            return lax.psum(c, "x"), None

        return lax.scan(outer, v, None, length=3)[0]

    assert count(compiled(nested)) == {"collective-permute": 15, "all-reduce": 3}


def test_live_gradient_of_a_scan():
    """The backward loop, which XLA rebuilds ("wide."), permutes the other way round."""

    def loss(v):
        step = lambda c, y: (jnp.sin(permute(c) * y), None)  # noqa: E731
        return lax.scan(step, v, jnp.arange(7.0))[0].sum()

    forward, backward = compiled(jax.grad(loss))
    assert (forward.count, forward.pairs) == (7, RING)
    assert backward.count == 7 and backward.pairs is not None
    assert sorted(backward.pairs) == sorted((t, s) for s, t in RING)


def test_live_data_dependent_loop_and_branch_are_refused():
    with pytest.raises(HloError, match="does not know how often"):
        compiled(lambda v: lax.while_loop(lambda c: c.sum() < 9, lambda c: permute(c) + 1, v))
    with pytest.raises(HloError, match="different collectives"):
        compiled(lambda v: lax.cond(v[0] > 3, lambda u: lax.psum(u, "x"), lambda u: u * 2, v))


def test_live_automatic_partitioning():
    m = mesh(2, 4)
    f = jax.jit(
        lambda a, b: a @ b,
        in_shardings=(NamedSharding(m, P(None, "g")), NamedSharding(m, P("g", None))),
        out_shardings=NamedSharding(m, P()),
    )
    ones = jnp.ones((16, 16))
    (found,) = read(f, ones, ones)
    assert (found.kind, found.groups, found.bytes) == ("all-reduce", ROWS, 1024)
