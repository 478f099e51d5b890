"""What runs beside a collective, and how many are under way at once."""

import pytest

from collc.receipts.hlo import parse

from .written import computation, fixture, loop, module, while_

KERNEL = computation("k", "ROOT %y = f32[8]{0} negate(%x)")
SYNC = ', backend_config={"collective_backend_config":{"is_sync":true}}'
ALL = "channel_id=1, replica_groups={}, dimensions={0}, use_global_device_ids=true"
CARRY = "%carry = (s32[], f32[8]{0}) tuple(%i, %x)"


def kernel(name: str, operand: str = "p") -> str:
    return f"%{name} = f32[8]{{0}} fusion(%{operand}), kind=kLoop, calls=%k"


def start(name: str, operand: str = "p", config: str = "") -> str:
    return f"%{name} = ((f32[8]{{0}}), f32[8]{{0}}) all-gather-start(%{operand}), {ALL}{config}"


def done(name: str, config: str = "") -> str:
    return f"%{name}.done = f32[8]{{0}} all-gather-done(%{name}){config}"


def waits(name: str, operand: str = "p") -> str:
    return f"%{name} = f32[8]{{0}} all-gather(%{operand}), {ALL}"


def beside(*lines: str, before: str = "") -> list[list[str]]:
    found = parse(module(*lines, before=KERNEL + before))
    return [[w.name for w in c.beside] for c in found.collectives]


def in_flight(*lines: str, before: str = "") -> int:
    return parse(module(*lines, before=KERNEL + before)).in_flight


def test_only_launches_are_beside():
    lines = (
        start("s"),
        kernel("a"),
        "%t = (f32[8]{0}) tuple(%a)",
        "%g = f32[8]{0} get-tuple-element(%t), index=0",
        "%b = f32[8]{0} bitcast(%g)",
        "%c = f32[] constant(1)",
        "%copy = f32[8]{0} copy(%b)",
        "%fs = ((f32[8]{0}), f32[8]{0}, u32[]) fusion-start(%p), kind=kLoop, calls=%k",
        "%fd = f32[8]{0} fusion-done(%fs)",
        "%cs = (f32[8]{0}, f32[8]{0}, u32[]) copy-start(%p)",
        "%cd = f32[8]{0} copy-done(%cs)",
        '%custom = f32[8]{0} custom-call(%p), custom_call_target="x"',
        done("s"),
        kernel("after"),
    )
    assert beside(*lines) == [["a", "copy", "fs", "cs", "custom"]]
    (c,) = parse(module(*lines, before=KERNEL)).collectives
    assert [(w.opcode, w.bytes) for w in c.beside][2:4] == [("fusion", 32), ("copy", 32)]


def test_without_a_schedule_nothing_is_known_to_be_beside():
    text = module(start("s"), kernel("a"), done("s"), before=KERNEL)
    (c,) = parse(text.replace("is_scheduled=true, ", "")).collectives
    assert (c.asynchronous, c.beside) == (True, ())


def test_what_waits_has_nothing_beside():
    assert beside(start("s", config=SYNC), kernel("a"), done("s")) == [[]]
    assert beside(start("s"), done("s"), kernel("a")) == [[]]
    assert beside(waits("s"), kernel("a")) == [[]]


def test_other_collectives_are_not_work():
    lines = start("s"), kernel("a"), start("t"), kernel("b"), done("s"), kernel("c"), done("t")
    assert beside(*lines) == [["a", "b"], ["b", "c"]]
    assert beside(start("s"), waits("t"), done("s")) == [[], []]


def test_a_loop_is_one_work_with_all_its_trips():
    dot = "%d = f32[8]{0} dot(%x, %x), lhs_contracting_dims={}, rhs_contracting_dims={}"
    body = loop("w", dot.replace("f32[8]", "f32[8,8]", 1))
    lines = start("s"), "%carry = (s32[], f32[8]{0}) parameter(9)", while_("w", 7), done("s")
    (c,) = parse(module(*lines, before=body)).collectives
    (work,) = c.beside
    assert (work.opcode, work.op_name, work.flops) == ("while", "jit(f)/shard_map/while", 7 * 128)


def test_an_asynchronous_wrapper():
    before = computation("async", waits("inner"))
    type_ = "((f32[8]{0}), f32[8]{0}, u32[])"
    lines = (
        f"%s = {type_} async-start(%p), calls=%async",
        kernel("a"),
        f"%u = {type_} async-update(%s)",
        kernel("b"),
        "%d = f32[8]{0} async-done(%u)",
    )
    assert beside(*lines, before=before) == [["a", "b"]]
    assert in_flight(*lines, before=before) == 1
    assert in_flight(*lines[:-1], start("t"), lines[-1], done("t"), before=before) == 2


def pipelined(*body: str) -> str:
    """A loop whose body is handed what the last iteration started."""
    carry = "(s32[], ((f32[8]), f32[8]))"
    return f"""\
%w_body (c: {carry}) -> {carry} {{
  %c = {carry} parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = ((f32[8]), f32[8]) get-tuple-element(%c), index=1
{"".join(f"  {line}{chr(10)}" for line in body)}\
}}

%w_cond (c: {carry}) -> pred[] {{
  %c = {carry} parameter(0)
  ROOT %n = pred[] constant(true)
}}
"""


def test_a_start_that_a_loop_takes_along():
    before = pipelined(
        kernel("first", "x#1"),
        done("x"),
        start("inner", "x.done"),
        kernel("second", "x.done"),
        "ROOT %t = (s32[], ((f32[8]), f32[8])) tuple(%i, %inner)",
    )
    while_line = while_("w", 3).replace(
        "(s32[], f32[8]{0}) while", "(s32[], ((f32[8]), f32[8])) while"
    )
    lines = (
        start("s"),
        kernel("a"),
        "%zero = s32[] constant(0)",
        "%carry = (s32[], ((f32[8]), f32[8])) tuple(%zero, %s)",
        kernel("b"),
        while_line,
        "%out = ((f32[8]), f32[8]) get-tuple-element(%while_w), index=1",
        kernel("c"),
        done("out"),
    )
    found = parse(module(*lines, before=KERNEL + before))
    assert [([w.name for w in c.beside], c.count) for c in found.collectives] == [
        (["a", "b"], 1),
        (["second"], 3),
    ]
    assert found.in_flight == 1


@pytest.mark.parametrize(
    ("lines", "most"),
    [
        ([kernel("a")], 0),
        ([waits("s")], 1),
        ([waits("s"), waits("t")], 1),
        ([start("s"), done("s"), start("t"), done("t")], 1),
        ([start("s"), start("t"), done("s"), start("u"), done("t"), done("u")], 2),
        ([start("s"), start("t"), start("u"), done("s"), done("t"), done("u")], 3),
        ([start("s"), waits("t"), done("s")], 2),
        ([start("s", config=SYNC), start("t"), done("t"), done("s")], 1),
        ([start("s", config=SYNC), start("t"), waits("u"), done("s", SYNC), done("t")], 2),
    ],
)
def test_in_flight(lines, most):
    assert in_flight(*lines) == most


def test_in_flight_within_a_loop_adds_to_what_is_around_it():
    body = loop("w", start("inner", "x"), start("other", "x"), done("inner"), done("other"))
    carry = "%carry = (s32[], f32[8]{0}) parameter(9)"
    assert in_flight(carry, while_("w", 3), before=body) == 2
    assert in_flight(start("s"), carry, while_("w", 3), done("s"), before=body) == 3
    assert in_flight(start("s"), done("s"), carry, while_("w", 3), before=body) == 2


def test_in_flight_in_branches_and_calls():
    one = computation("one", waits("s"))
    two = computation("two", waits("s"))
    chosen = "%c = f32[8]{0} conditional(%i, %p, %p), branch_computations={%one, %two}"
    assert in_flight(start("s"), chosen, done("s"), before=one + two) == 2
    call = "%c = f32[8]{0} call(%p), to_apply=%one"
    assert in_flight(start("s"), call, done("s"), before=one) == 2


def test_printed_fsdp_step():
    """Backward, 0.10 gathers a layer's weights before and scatters its gradients after the rest."""
    old, new = (parse(fixture(f"fsdp-cuda-{v}")) for v in ("0.10", "0.12"))
    assert (old.in_flight, new.in_flight) == (1, 1)
    assert [w.name for w in old.collectives[3].beside] == [
        "gemm_fusion_dot.7",
        "loop_reduce_fusion.1",
    ]
    assert [w.name for w in new.collectives[0].beside] == ["loop_add_fusion"]
