"""FLOPs of one matrix product or convolution: a multiplication and an addition are two.

Products are found as dots and convolutions, which also stand inside fusions, and as custom calls of
libraries (cuBLAS, cuDNN, oneDNN), whose sizes stand partly in their configuration.
"""

import math
import re
from typing import NamedTuple

import numpy as np

from collc.receipts.hlo.instructions import REPORT, Computation, Instruction
from collc.receipts.hlo.types import Array

_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_LIBRARIES = ("__cublas$", "__cudnn$", "__onednn$")
_NO_PRODUCTS = ("__cudnn$norm", "__onednn$softmax", "__onednn$layernorm")


def product(computation: Computation, instruction: Instruction) -> int:
    """FLOPs of the instruction itself, without what it calls; 0 if it is no product.

    Raises:
      HloError: it is one, and its sizes cannot be read.
    """
    match instruction.base:
        case "dot" | "scaled-dot":
            contracted = _numbers(instruction, "lhs_contracting_dims")
            return _product(computation, instruction, contracted)
        case "convolution":
            return _convolution(computation, instruction, "")
        case "custom-call":
            found = _TARGET.search(instruction.line)
            target = found[1] if found else ""
            if target.startswith(_LIBRARIES) and not target.startswith(_NO_PRODUCTS):
                return _library(computation, instruction, target)
    return 0


def _library(computation: Computation, instruction: Instruction, target: str) -> int:
    if target.startswith("__cudnn$conv"):
        return _convolution(computation, instruction, target)
    try:
        if target.startswith("__cublas$"):
            dims = instruction.config["gemm_backend_config"]["dot_dimension_numbers"]
            contracted = [int(d) for d in dims["lhs_contracting_dimensions"]]
            return _product(computation, instruction, contracted)
        if target.startswith("__cudnn$fmha"):
            # q k^T and its product with v; backward five products of the same size
            scores = instruction.config["cudnn_fmha_backend_config"]["intermediate_tensor_shape"]
            size = math.prod(int(d) for d in scores["dimensions"])
            head = _array(computation, instruction, 0).shape[-1]
            return 2 * size * head * (5 if "Backward" in target else 2)
        if target == "__onednn$matmul":
            config = instruction.config["onednn_matmul_config"]
            return _product(computation, instruction, [-2 if config.get("transpose_a") else -1])
    except (KeyError, IndexError, TypeError, ValueError):
        pass
    raise instruction.error(f"{target}, a matrix product, has no sizes that collc reads. {REPORT}")


def _product(computation: Computation, instruction: Instruction, contracted: list[int]) -> int:
    """2 M N K: twice the result (its first array, of several) times the contracted sizes."""
    shape, _ = (_array(computation, instruction, k).shape for k in (0, 1))
    if not instruction.results or any(not -len(shape) <= d < len(shape) for d in contracted):
        raise instruction.error(f"the sizes of this product do not fit each other. {REPORT}")
    result = instruction.results[0]
    return 2 * math.prod(result.shape) * math.prod(shape[d] for d in contracted)


_LABELS = re.compile(r"(\w+)_(\w+)->(\w+)")


def _convolution(computation: Computation, instruction: Instruction, target: str) -> int:
    """2 FLOPs for each pair of an output and a kernel element that meet in the input.

    Positions in padding, and those between the elements of a dilated input, are not counted, as
    XLA's own cost analysis does not. The library's backward forms note the labels and the window of
    the forward convolution, so there one operand has the shape of the output.
    """
    first, second = (_array(computation, instruction, k).shape for k in (0, 1))
    result = instruction.results[0].shape
    if "BackwardFilter" in target:
        inputs, kernel, outputs = first, result, second
    elif "BackwardInput" in target:
        inputs, kernel, outputs = result, second, first
    else:
        inputs, kernel, outputs = first, second, result
    labels = _LABELS.match(instruction.attribute("dim_labels"))
    if not labels or [len(t) for t in labels.groups()] != [len(inputs), len(kernel), len(outputs)]:
        raise instruction.error(f"its dim_labels and shapes do not fit each other. {REPORT}")
    of_input, of_kernel, of_output = labels.groups()
    windows = _window(instruction, len(inputs) - 2)
    met = math.prod(
        _meetings(inputs[of_input.index(d)], outputs[of_output.index(d)], windows[int(d)])
        for d in map(str, range(len(windows)))
    )
    batch, features = outputs[of_output.index("b")], outputs[of_output.index("f")]
    return 2 * batch * features * kernel[of_kernel.index("i")] * met


class _Dimension(NamedTuple):
    size: int = 1
    stride: int = 1
    low: int = 0  # padding before the first element
    lhs_dilate: int = 1
    rhs_dilate: int = 1


def _window(instruction: Instruction, dimensions: int) -> list[_Dimension]:
    """``window={size=3x3 stride=2x2 pad=1_1x1_1 lhs_dilate=2x2 rhs_dilate=1x1}``, per dimension."""
    if not dimensions:
        return []
    written = instruction.attribute("window").partition("}")[0].strip("{")
    found = dict(part.split("=", 1) for part in written.split())
    wide = {key: value.split("x") for key, value in found.items()}
    lows = [pad.partition("_")[0] for pad in wide.pop("pad", [])]
    keys = ("size", "stride", "lhs_dilate", "rhs_dilate")
    columns = {key: wide[key] for key in keys if key in wide} | ({"low": lows} if lows else {})
    if any(len(column) != dimensions for column in columns.values()):
        raise instruction.error(f"its window does not fit its shapes. {REPORT}")
    return [_Dimension(**{k: int(c[d]) for k, c in columns.items()}) for d in range(dimensions)]


def _meetings(inputs: int, outputs: int, w: _Dimension) -> int:
    """How many pairs of an output and a kernel position meet an element of the input.

    >>> _meetings(4, 4, _Dimension(size=3, low=1))  # 4 * 3 less the two in the padding
    10
    """
    at = np.arange(outputs)[:, None] * w.stride + np.arange(w.size) * w.rhs_dilate - w.low
    inside = (at >= 0) & (at <= (inputs - 1) * w.lhs_dilate) & (at % w.lhs_dilate == 0)
    return int(inside.sum())


def _array(computation: Computation, instruction: Instruction, k: int) -> Array:
    found = computation.operand(instruction, k)
    if not isinstance(found, Array):
        raise instruction.error(f"its operand {k} has to be an array. {REPORT}")
    return found


def _numbers(instruction: Instruction, key: str) -> list[int]:
    """Of an attribute like ``lhs_contracting_dims={1,2}``; none if it is not there."""
    _, _, value = instruction.rest.partition(f", {key}={{")
    return [int(d) for d in re.findall(r"\d+", value.partition("}")[0])]
