"""FLOPs against counts by hand, and the largest values."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from collc.errors import HloError
from collc.receipts.hlo import parse
from collc.receipts.hlo.work import Buffer

from .written import computation, loop, module, while_

A, B = "%a = f32[5,3]{1,0} parameter(0)", "%b = f32[3,7]{1,0} parameter(1)"
DOT = "%d = f32[5,7]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
FLOPS = 2 * 5 * 3 * 7


def flops(*lines: str, before: str = "") -> tuple[int, bool]:
    found = parse(module(*lines, before=before))
    return found.flops, found.flops_exact


def config(**values: object) -> str:
    return f", backend_config={json.dumps(values, separators=(',', ':'))}"


def custom(target: str, type_: str, rest: str = "", operands: str = "%a, %b") -> str:
    return f'%x = {type_} custom-call({operands}), custom_call_target="{target}"{rest}'


def gemm(**dims: list[str]) -> str:
    return config(gemm_backend_config={"alpha_real": 1, "dot_dimension_numbers": dims})


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((A, B, DOT), FLOPS),
        ((A, B, DOT, DOT.replace("%d ", "%e ")), 2 * FLOPS),
        (
            (
                "%a = bf16[4,5,3]{2,1,0} parameter(0)",
                "%b = bf16[4,3,7]{2,1,0} parameter(1)",
                "%d = bf16[4,5,7]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2},"
                " rhs_batch_dims={0}, rhs_contracting_dims={1}",
            ),
            4 * FLOPS,
        ),
        (
            (
                "%a = f32[2,3]{1,0} parameter(0)",
                "%b = f32[2,3]{1,0} parameter(1)",
                "%d = f32[] dot(%a, %b), lhs_contracting_dims={0,1}, rhs_contracting_dims={0,1}",
            ),
            12,
        ),
        ((A, B, custom("__cublas$gemm", "(f32[5,7]{1,0}, s8[4194304]{0})",
                       gemm(lhs_contracting_dimensions=["1"], rhs_contracting_dimensions=["0"]))),
         FLOPS),
        ((A, B, custom("__cublas$lt$matmul$f8", "f32[5,7]{1,0}",
                       gemm(lhs_contracting_dimensions=["1"], rhs_contracting_dimensions=["0"]))),
         FLOPS),
        ((A, B, custom("__onednn$matmul", "f32[5,7]{1,0}", config(onednn_matmul_config={}))), FLOPS),
        ((A.replace("5,3", "3,5"), B, custom("__onednn$matmul", "f32[5,7]{1,0}",
          config(onednn_matmul_config={"transpose_a": True}))), FLOPS),
        ((A, B, custom("somebody's", "f32[5,7]{1,0}")), 0),
        ((A, B, custom("__cudnn$norm", "f32[5,7]{1,0}")), 0),
        (("%q = bf16[2,8,4,16]{3,2,1,0} parameter(0)",
          custom("__cudnn$fmhaSoftmax", "(bf16[2,8,4,16]{3,2,1,0}, u8[0]{0})",
                 config(cudnn_fmha_backend_config={
                     "intermediate_tensor_shape": {"dimensions": ["2", "4", "8", "8"]}}),
                 "%q, %q, %q")), 2 * 2 * (2 * 4 * 8 * 8 * 16)),
        (("%q = bf16[2,8,4,16]{3,2,1,0} parameter(0)",
          custom("__cudnn$fmhaSoftmaxBackward", "(bf16[2,8,4,16]{3,2,1,0}, u8[0]{0})",
                 config(cudnn_fmha_backend_config={
                     "intermediate_tensor_shape": {"dimensions": ["2", "4", "8", "8"]}}),
                 "%q, %q, %q, %q")), 5 * 2 * (2 * 4 * 8 * 8 * 16)),
    ],
)  # fmt: skip
def test_products(lines, expected):
    assert flops(*lines) == (expected, True)


IMAGE, KERNEL, OUT = (
    "%a = f32[8,32,30,4]{3,2,1,0} parameter(0)",
    "%b = f32[3,3,4,16]{3,2,1,0} parameter(1)",
    "f32[8,32,30,16]{3,2,1,0}",
)
ROWS, COLUMNS = 3 * 32 - 2, 3 * 30 - 2  # a row less at each end, where the kernel meets padding
CONV = 2 * 8 * 16 * 4 * ROWS * COLUMNS


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((IMAGE, KERNEL, f"%x = {OUT} convolution(%a, %b), window={{size=3x3 pad=1_1x1_1}},"
          " dim_labels=b01f_01io->b01f"), CONV),
        ((IMAGE, KERNEL, "%x = f32[8,10,14,16]{3,2,1,0} convolution(%a, %b),"
          " window={size=3x3 stride=3x2}, dim_labels=b01f_01io->b01f"),
         2 * 8 * 16 * 4 * (10 * 3) * (14 * 3)),
        (("%a = f32[8,4]{1,0} parameter(0)", "%b = f32[4,5]{1,0} parameter(1)",
          "%x = f32[8,5]{1,0} convolution(%a, %b), dim_labels=bf_io->bf"), 2 * 8 * 4 * 5),
        # transposed: every second position is between two elements of the input
        (("%a = f32[1,5,1]{2,1,0} parameter(0)", "%b = f32[2,1,1]{2,1,0} parameter(1)",
          "%x = f32[1,8,1]{2,1,0} convolution(%a, %b), window={size=2 lhs_dilate=2},"
          " dim_labels=b0f_0io->b0f"), 2 * 8),
        # depthwise, and a kernel with holes
        (("%a = f32[1,9,6]{2,1,0} parameter(0)", "%b = f32[3,1,6]{2,1,0} parameter(1)",
          "%x = f32[1,5,6]{2,1,0} convolution(%a, %b), window={size=3 rhs_dilate=2},"
          " dim_labels=b0f_0io->b0f, feature_group_count=6"), 2 * 6 * 5 * 3),
        ((IMAGE, KERNEL, custom("__cudnn$convForward", f"({OUT}, u8[0]{{0}})",
          ", window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f")), CONV),
        ((IMAGE, KERNEL, custom("__cudnn$convBiasActivationForward", f"({OUT}, u8[0]{{0}})",
          ", window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f", "%a, %b, %b")), CONV),
        ((IMAGE, KERNEL.replace("[3,3,4,16]", "[8,32,30,16]"),
          custom("__cudnn$convBackwardFilter", "(f32[3,3,4,16]{3,2,1,0}, u8[0]{0})",
          ", window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f")), CONV),
        ((IMAGE.replace("30,4", "30,16"), KERNEL,
          custom("__cudnn$convBackwardInput", "(f32[8,32,30,4]{3,2,1,0}, u8[0]{0})",
          ", window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f")), CONV),
    ],
)  # fmt: skip
def test_convolutions(lines, expected):
    assert flops(*lines) == (expected, True)


@pytest.mark.parametrize(
    "lines",
    [
        (A, B, custom("__cublas$gemm", "f32[5,7]{1,0}")),
        (A, B, custom("__cublas$gemm", "f32[5,7]{1,0}", gemm(lhs_contracting_dimensions=["4"]))),
        (A, B, custom("__cublas$tomorrow", "f32[5,7]{1,0}")),
        (A, B, custom("__cudnn$fmhaTomorrow", "f32[5,7]{1,0}")),
        (A, B, custom("__onednn$convolution", "f32[5,7]{1,0}")),
        (A, B, DOT.replace("lhs_contracting_dims={1}", "lhs_contracting_dims={2}")),
        (A, B, "%x = f32[5,7]{1,0} convolution(%a, %b), dim_labels=b01f_01io->b01f"),
        (A, "%x = f32[5,7]{1,0} dot(%a)"),
        ("%t = (f32[5]) parameter(0)", "%x = f32[5] dot(%t, %t), lhs_contracting_dims={0}"),
    ],
)
def test_products_that_cannot_be_read(lines):
    found = parse(module(*lines))
    assert found.collectives == ()
    with pytest.raises(HloError, match=r"HLO line \d+: "):
        _ = found.flops


def inside(name: str) -> str:
    return computation(name, A, B, f"ROOT {DOT}")


CARRY = "%carry = (s32[], f32[8]{0}) parameter(9)"


@pytest.mark.parametrize(
    ("lines", "before", "expected"),
    [
        (("%x = f32[5,7]{1,0} fusion(%p), kind=kOutput, calls=%f",), inside("f"), (FLOPS, True)),
        (("%s = ((f32[8]), f32[5,7]{1,0}, u32[]) fusion-start(%p), calls=%f",
          "%x = f32[5,7]{1,0} fusion-done(%s), calls=%f"), inside("f"), (FLOPS, True)),
        (("%x = f32[5,7]{1,0} call(%p), to_apply=%f", "%y = f32[5,7]{1,0} call(%p), to_apply=%f"),
         inside("f"), (2 * FLOPS, True)),
        ((CARRY, while_("w", 4)), loop("w", A, B, DOT), (4 * FLOPS, True)),
        ((CARRY, while_("w", 0)), loop("w", A, B, DOT), (0, True)),
        ((CARRY, while_("w", None)), loop("w", A, B, DOT), (FLOPS, False)),
        ((CARRY, while_("w", None)), loop("w"), (0, True)),
        ((CARRY, while_("w", 3)),
         inside("f") + loop("w", "%c = f32[5,7]{1,0} fusion(%x), calls=%f"), (3 * FLOPS, True)),
        (("%x = f32[5,7]{1,0} conditional(%i, %p, %p), branch_computations={%f, %g}",),
         inside("f") + inside("g"), (FLOPS, True)),
        (("%x = f32[5,7]{1,0} conditional(%i, %p, %p), branch_computations={%f, %g}",),
         inside("f") + computation("g", "ROOT %y = f32[8]{0} copy(%p)"), (0, False)),
    ],
)  # fmt: skip
def test_what_runs_is_counted_as_often_as_it_runs(lines, before, expected):
    assert flops(*lines, before=before) == expected


def compiled_flops(f, *args) -> int:
    return parse(jax.jit(f).lower(*args).compile().as_text()).flops


def test_live_products():
    a, b = jnp.ones((64, 48)), jnp.ones((48, 32))
    assert compiled_flops(jnp.dot, a, b) == 2 * 64 * 48 * 32

    def layers(x, w):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    x, w = jnp.ones((64, 128)), jnp.ones((5, 128, 128))
    assert compiled_flops(layers, x, w) == 5 * 2 * 64 * 128 * 128


def test_live_convolution_counts_what_xla_does():
    def conv(x, k):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, k, (2, 2), "SAME", dimension_numbers=numbers)

    compiled = jax.jit(conv).lower(jnp.ones((4, 32, 32, 8)), jnp.ones((3, 3, 8, 16))).compile()
    found = parse(compiled.as_text()).flops
    # XLA counts a window that ends outside: 16 positions of 3, one of which meets padding
    assert found == 2 * 4 * 16 * 8 * (16 * 3 - 1) ** 2 == compiled.cost_analysis()["flops"]


def test_buffers():
    fused = computation("f", "%b = f32[99]{0} constant({...})", "ROOT %y = f32[8]{0} copy(%x)")
    update = computation(
        "u",
        "%i = s32[] constant(0)",
        "%a = f32[70]{0} parameter(0)",
        "%d = f32[70]{0} dynamic-update-slice(%a, %x, %i)",
        "ROOT %y = f32[70]{0} bitcast(%d)",
    )
    found = parse(
        module(
            "%p = bf16[100]{0} parameter(0), metadata={op_name=\"x['w']\"}",
            "%q = f32[70]{0} parameter(1)",
            '%m = (f32[8]{0}, f32[60]{0}) fusion(%p), calls=%f, metadata={op_name="jit(f)/mul"}',
            "%t = (f32[8]{0}, f32[60]{0}, bf16[100]{0}) tuple(%m#0, %m#1, %p)",
            "%v = f32[70]{0} fusion(%q), calls=%u",
            "%s = ((f32[70]), f32[65], u32[]) fusion-start(%q), calls=%f",
            "%e = f32[65] fusion-done(%s)",
            CARRY,
            while_("w", 3),
            before=fused + update + loop("w", "%in = f32[67]{0} copy(%x)"),
        )
    )
    assert found.buffers(5) == (
        Buffer("q", "parameter", "", "f32", (70,), 280),
        Buffer("in", "copy", "", "f32", (67,), 268),
        Buffer("s", "fusion", "", "f32", (65,), 260),
        Buffer("m", "fusion", "jit(f)/mul", "f32", (60,), 240),
        Buffer("p", "parameter", "x['w']", "bf16", (100,), 200),
    )
    assert found.buffers(0) == ()
