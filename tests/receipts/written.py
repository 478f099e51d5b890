"""HLO text written for a test: what stands around the lines that it is about."""

import re
from pathlib import Path

ADD = """\
%add (psum.0: f32[], psum.1: f32[]) -> f32[] {
  %psum.0 = f32[] parameter(0), metadata={op_name="psum"}
  %psum.1 = f32[] parameter(1), metadata={op_name="psum"}
  ROOT %add.0 = f32[] add(%psum.0, %psum.1), metadata={op_name="add" stack_frame_id=4}
}
"""


def module(*lines: str, before: str = "", header: str = "num_partitions=8") -> str:
    """A scheduled module whose ENTRY has these lines; operands that none defines are parameters."""
    return (
        "HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}},"
        f' {header}\n\nFileNames\n1 "all-reduce.py"\n\n{ADD}\n{before}\n'
        "ENTRY %main.0_spmd (param.1: f32[8], all-reduce.1: f32[8]) -> f32[8] {\n"
        f"{_body(lines)}}}\n"
    )


def computation(name: str, *lines: str) -> str:
    return f"%{name} (p: f32[8]) -> f32[8] {{\n{_body(lines)}}}\n"


def _body(lines: tuple[str, ...]) -> str:
    defined = {found[1] for line in lines if (found := re.match(r"(?:ROOT )?%([\w.\-]+) = ", line))}
    used = [
        name
        for line in lines
        if (found := re.match(r".*? [a-z][\w\-]*\(((?:/\*.*?\*/|[^()])*)\)", line))
        for name in re.findall(r"%([\w.\-]+)", found[1])
        if name not in defined
    ]
    parameters = [
        f"%{name} = f32[8]{{0}} parameter({k})" for k, name in enumerate(dict.fromkeys(used))
    ]
    return "".join(f"  {line}\n" for line in (*parameters, *lines))


def loop(name: str, *inside: str) -> str:
    """The computations of `while_(name, ...)`."""
    return f"""\
%{name}_body (param.8: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %param.8 = (s32[], f32[8]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%param.8), index=0
  %x = f32[8]{{0}} get-tuple-element(%param.8), index=1
{"".join(f"  {line}{chr(10)}" for line in inside)}\
  ROOT %tuple.18 = (s32[], f32[8]{{0}}) tuple(%i, %x)
}}

%{name}_cond (param.7: (s32[], f32[8])) -> pred[] {{
  %param.7 = (s32[], f32[8]{{0}}) parameter(0)
  %x = f32[8]{{0}} get-tuple-element(%param.7), index=1
  %i = s32[] get-tuple-element(%param.7), index=0
  %n = s32[] constant(5)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}}
"""


def while_(name: str, trips: int | None, carry: str = "%carry") -> str:
    known = f',"known_trip_count":{{"n":"{trips}"}}' if trips is not None else ""
    return (
        f"%while_{name} = (s32[], f32[8]{{0}}) while({carry}), condition=%{name}_cond,"
        f' body=%{name}_body, metadata={{op_name="jit(f)/shard_map/while" stack_frame_id=8}},'
        f' backend_config={{"dynamic_variables":[]{known}}}'
    )


def fixture(name: str) -> str:
    """A text that XLA printed, from the files beside this one."""
    return (Path(__file__).parent / "hlo" / f"{name}.txt").read_text(encoding="utf-8")
