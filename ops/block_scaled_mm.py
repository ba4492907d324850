"""FP8 GEMM with one scale for 128 features of a token and one for each 128x128 block of the weight.

    D[m, n] = sum_g scale_a[m, g] * scale_b[n // 128, g] * P[m, n, g] + bias[n]
    P[m, n, g] = sum over the 128 k of group g of A[m, k] * B[n, k]

The format of DeepSeek-V3 checkpoints (DeepSeek-V3 technical report, arXiv 2412.19437, section
3.3.2).
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from compile_ext.ops import block_scaled_mm_spec
from compile_ext.ops.block_scaled_mm_m1 import OP as BLOCK_SCALED_MM_M1
from compile_ext.ops.define import define_op

NAME = "block_scaled_mm"

OP = define_op(
    f"{NAME}(Tensor a, Tensor b, Tensor? scale_a, Tensor scale_b, Tensor? bias,"
    " ScalarType out_dtype) -> Tensor",
    check=functools.partial(block_scaled_mm_spec.check, NAME),
    fake=block_scaled_mm_spec.fake,
    kernels=block_scaled_mm_spec.KERNELS,
    contract=dataclasses.replace(block_scaled_mm_spec.CONTRACT, m1_variant=BLOCK_SCALED_MM_M1),
)


def block_scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``dequantize(a) @ dequantize(b).T + bias``, accumulated in float32.

    Args:
        a: ``[m, k]`` float8_e4m3fn, or bfloat16: then the kernel quantizes it itself, as
            ``quantize_fp8_groups`` does (with use_ue8m0 where scale_b is float8_e8m0fnu), and does
            not read scale_a. Rows contiguous. m = 0 gives an empty result.
        b: ``[n, k]`` float8_e4m3fn, rows contiguous.
        scale_a: ``[m, ceil(k/128)]`` float32 or float8_e8m0fnu, any strides; None or anything where
            a is bfloat16.
        scale_b: ``[ceil(n/128), ceil(k/128)]`` float32 or float8_e8m0fnu.
        bias: ``[n]`` bfloat16, float16 or float32.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        ``[m, n]`` of out_dtype, contiguous.

    Raises:
        DtypeError, RankError, ShapeError, LayoutError, DeviceError, GradError.
    """
    out: Tensor = OP(a, b, scale_a, scale_b, bias, out_dtype)
    return out
