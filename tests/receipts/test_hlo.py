"""Collectives in lines as jax 0.10.2 and 0.12.0.1 print them, for CPU and (deviceless) H100."""

import contextlib
import json
import re
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collc.errors import HloError
from collc.receipts.hlo import AllReduce, Collective, ReduceScatter, count, parse_hlo

from .written import computation, loop, module, while_

RING = tuple((r, (r + 1) % 8) for r in range(8))
ALL = (tuple(range(8)),)
ROWS = ((0, 1, 2, 3), (4, 5, 6, 7))
COLUMNS = ((0, 4), (1, 5), (2, 6), (3, 7))


def one(line: str, **kw: str) -> Collective:
    """The collective of one line, with its done if it is a start."""
    start = re.match(r"%(\S+) = .* ([a-z-]+)-start\(", line)
    done = [f"%done = f32[8]{{0}} {start[2]}-done(%{start[1]})"] if start else []
    (found,) = parse_hlo(module(line, *done, **kw))
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
    assert found == AllReduce(
        name="psum.7",
        dtypes=("f32",),
        shapes=((8,),),
        operands=(("f32", (8,)),),
        count=1,
        asynchronous=False,
        kernel="",
        op_name="jit(<lambda>)/shard_map/psum",
        beside=(),
        groups=groups,
        reduction="add",
    )
    assert found.bytes == 32


AMONG = "channel_id=1, replica_groups={}, use_global_device_ids=true"
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
            "%r = (f8e4m3fn[3]{0}, c128[2]{0}, bf16[0]{0}) all-reduce(%q), channel_id=1,"
            f" {OLD}, use_global_device_ids=true, to_apply=%add",
            "all-reduce", [("f8e4m3fn", (3,)), ("c128", (2,)), ("bf16", (0,))], 35, False,
        ),
    ],
)  # fmt: skip
def test_kinds_and_results(line, kind, results, bytes_, asynchronous):
    found = one(line)
    assert (found.kind, list(zip(found.dtypes, found.shapes, strict=True))) == (kind, results)
    assert (found.bytes, found.asynchronous, found.count) == (bytes_, asynchronous, 1)
    permute = kind == "collective-permute"
    assert found.partners == (RING if permute else found.partners)
    own = {f.name for f in fields(found)} - {f.name for f in fields(Collective)}
    reducing = isinstance(found, AllReduce | ReduceScatter)
    assert own == ({"pairs"} if permute else {"groups"} | ({"reduction"} if reducing else set()))


PERMUTE = f"%ppermute.5 = f32[8]{{0}} collective-permute(%x), channel_id=1, {PAIRS}"


CARRY = "%carry = (s32[], f32[8]{0}) tuple(%i, %x)"


def test_loops_multiply():
    outer = loop("outer", CARRY, while_("wide.inner", 5))
    inner = loop("wide.inner", PERMUTE)
    text = module(PERMUTE, while_("outer", 3), before=inner + "\n" + outer)
    assert [c.count for c in parse_hlo(text)] == [1, 15]
    assert count(parse_hlo(text)) == {"collective-permute": 16}


def test_loop_of_unknown_length_is_refused_only_with_a_collective():
    with pytest.raises(HloError, match=r"runs collective-permute(.|\n)*%while_w = "):
        parse_hlo(module(while_("w", None), before=loop("w", PERMUTE)))
    assert parse_hlo(module(while_("w", None), before=loop("w", "%c = s32[] constant(1)"))) == ()


def test_condition_runs_once_more():
    asked = loop("w").replace("  ROOT %lt", f"  {PERMUTE}\n  ROOT %lt")
    assert count(parse_hlo(module(while_("w", 4), before=asked))) == {"collective-permute": 5}


def test_calls_are_followed_as_often_as_they_occur():
    before = computation("f", PERMUTE) + computation("unreachable", PERMUTE)
    call, fusion = "%a = f32[8]{0} call(%p), to_apply=%f", "%b = f32[8]{0} fusion(%a), calls=%f"
    assert count(parse_hlo(module(call, fusion, before=before))) == {"collective-permute": 2}


def test_start_and_done_count_once():
    start = f"%s = (f32[8]{{0}}, f32[8]{{0}}) collective-permute-start(%p), channel_id=1, {PAIRS}"
    (found,) = parse_hlo(module(start, "ROOT %d = f32[8]{0} collective-permute-done(%s)"))
    assert (found.name, found.asynchronous) == ("s", True)


def test_async_wrapper_counts_once():
    wrapped = computation("async", PERMUTE).rstrip() + ', execution_thread="main"\n'
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
        (module(while_("w", 3).replace("body=", "boody="), before=loop("w")), "one body="),
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
        (module(PERMUTE).replace("(%x", " %x"), "cannot read this"),
        (module(PERMUTE + ", slice_sizes={{8}}"), "a permute of slices"),
        (module(f"%r = f32[8]{{0}} all-reduce(%q), {NEW.replace('8', '9', 1)}x"), "known forms"),
        (module("%r = f32[8]{0} all-reduce(%q), replica_groups=mesh['x'=8] {'y'}"), "no axis 'y'"),
        (module("%r = f32[8]{0} all-reduce(%q), replica_groups=[3,4]<=[8]"), "cannot be read"),
        (module("%r = f32[8]{0} all-reduce(%q), replica_groups=mesh['x'=8] {'x':(3)2}"), "divide"),
        (module("%r = f32[8]{0} all-reduce(%q), replica_groups={}",
                header="replica_count=2, num_partitions=4"), "both replicas and partitions"),
        (module("%r = f32[8]{0} all-gather-start(%q), replica_groups={}",
                "%d = f32[8]{0} all-gather-done(%r)"), "has to have the type"),
        (module("%r = (f32[8]{0}, f32[8]{0}) all-gather-start(%q), replica_groups={}"),
         "nothing waits for it"),
        (module("%r = f32[8]{0} all-gather(%q), replica_groups={{0,8}}"), "names device 8"),
        (module(PERMUTE.replace("{0,1}", "{9,1}")), "names device 9, and the module has 8"),
        (module("%r = f32[8]{0} all-gather(%q), replica_groups={}"), "among replicas alone"),
        (module(PERMUTE.replace("channel_id=1, ", "")), "among replicas alone"),
        (module("%r = f32[8]{0} all-gather(%q), channel_id=1, replica_groups={}"), "of replicas"),
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


@given(st.lists(st.integers(0, 50), min_size=1, max_size=5), st.integers(1, 3))
def test_trips_of_nested_loops_multiply(trips, rounds):
    lines = [PERMUTE.replace(".5", f".{k}") for k in range(rounds)]
    computations = [loop("w0", *lines)]
    for k, n in enumerate(trips[:-1]):
        computations.append(loop(f"w{k + 1}", CARRY, while_(f"w{k}", n)))
    text = module(while_(f"w{len(trips) - 1}", trips[-1]), before="\n".join(computations))
    assert count(parse_hlo(text)) == {"collective-permute": rounds * int(np.prod(trips))}


START = (
    "%s = ((f32[8]{0}), f32[8]{0}) all-reduce-start(%p), channel_id=1, replica_groups={},"
    " use_global_device_ids=true, to_apply=%add"
)
DONE = "ROOT %d = f32[8]{0} all-reduce-done(%s)"


def configured(**config: object) -> str:
    compact = json.dumps({"collective_backend_config": config}, separators=(",", ":"))
    return f", backend_config={compact}"  # which only XLA:GPU writes


@pytest.mark.parametrize(
    ("config", "asynchronous", "kernel"),
    [
        ("", True, ""),
        (configured(is_sync=True), False, ""),
        (configured(is_sync=False), True, ""),
        (configured(kernel_strategy="KERNEL_STRATEGY_TRITON_ONE_SHOT"), True, "one-shot"),
        (configured(kernel_strategy="KERNEL_STRATEGY_TRITON_TWO_SHOT"), True, "two-shot"),
        (configured(kernel_strategy="KERNEL_STRATEGY_SOMETHING_NEW"), True, "something-new"),
        (configured(kernel_strategy="KERNEL_STRATEGY_DEFAULT", backend="DEFAULT"), True, "nccl"),
        (configured(kernel_strategy="KERNEL_STRATEGY_DEFAULT", backend="NVSHMEM"), True, "nvshmem"),
    ],
)
def test_configuration(config, asynchronous, kernel):
    (c,) = parse_hlo(module(START + config, DONE))
    assert (c.asynchronous, c.kernel) == (asynchronous, kernel)


@pytest.mark.parametrize(
    ("root", "reduction"),
    [
        ("add(%a, %b)", "add"),
        ("maximum(%a, %b)", "max"),
        ("minimum(%a, %b)", "min"),
        ("multiply(%a, %b)", "multiply"),
        ("and(%a, %b)", "and"),
        ("subtract(%a, %b)", "other"),
    ],
)
def test_reductions(root, reduction):
    parameters = "%a = f32[] parameter(0)", "%b = f32[] parameter(1)"
    promoted = (*parameters, f"%r = f32[] {root}", "ROOT %c = bf16[] convert(%r)")
    for lines in ((*parameters, f"ROOT %r = f32[] {root}"), promoted):
        line = f"%x = f32[8]{{0}} all-reduce(%p), {AMONG}, to_apply=%f"
        found = one(line, before=computation("f", *lines))
        assert found.reduction == reduction


def test_reduction_is_required():
    with pytest.raises(HloError, match="all-reduce has to have one to_apply="):
        one(f"%x = f32[8]{{0}} all-reduce(%p), {AMONG}")


@pytest.mark.parametrize(
    "line",
    [
        "%x = f32[8]{0} all-broadcast(%p), replica_groups={{0,1}}",
        "%x = f32[8]{0} exchange(%p), source_target_pairs={{0,1}}",
        "%x = f32[8]{0} all-gather-of-tomorrow(%p)",
    ],
)
def test_unknown_collectives_are_refused(line):
    with pytest.raises(HloError, match="not one of the collectives"):
        parse_hlo(module(line))
