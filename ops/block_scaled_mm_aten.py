"""``block_scaled_mm`` through ``torch.nn.functional.scaled_mm`` (cuBLASLt's 1x128 by 128x128
scaling) on Hopper.

What cuBLASLt takes was found by running it (H200, torch 2.11, CUDA 13.0): N and K in multiples of
16 with any partial block, M in multiples of 4, scale_a with strides (1, M), and rows of scale_b in
multiples of 4 elements. ``torch._scaled_mm`` does not know of the last one: for a number of K
blocks that is no multiple of 4 it returns wrong numbers without an error (a thousand times too
large for K = 640).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from compile_ext.ops import device, tma_rows, ue8m0
from compile_ext.ops.checks import FP8, is_zero
from compile_ext.ops.quantize import quantize_fp8_groups

CAPABILITY = (9, 0)
ALIGNMENT = 16  # of N, K and row strides, in elements
SCALE_STRIDE = 4  # of a row of scale_b, in elements
_M_MULTIPLE = 4  # M must be a multiple of it
_OUT = (torch.bfloat16, torch.float32)


def why_not(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> str | None:
    reason = device.why_not(a, CAPABILITY, exactly=True)
    if reason:
        return reason
    n, k = b.shape
    if n % ALIGNMENT or k % ALIGNMENT:
        return f"needs N and K in multiples of {ALIGNMENT}, found N={n}, K={k}"
    reason = tma_rows.why_not(b=b) if a.dtype != FP8 else tma_rows.why_not(a=a, b=b)
    if reason:
        return reason
    reason = ue8m0.why_not(scale_b=scale_b)  # run copies another scale_a into float32
    if reason:
        return reason
    if out_dtype not in _OUT:
        return f"gives bfloat16 or float32, wanted {out_dtype}"
    if bias is not None:
        return "takes no bias"
    if is_zero(a.shape[0]):
        return "M is 0"
    return None


def run(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    if a.dtype == torch.bfloat16:
        a, scale_a = quantize_fp8_groups(a)
    assert scale_a is not None
    m, extra = a.shape[0], -a.shape[0] % _M_MULTIPLE
    if extra:
        a = F.pad(a, (0, 0, 0, extra))
    out = F.scaled_mm(
        a,
        b.t(),
        _whole_columns(scale_a, m + extra),
        ScalingType.BlockWise1x128,
        _whole_rows(scale_b).t(),
        ScalingType.BlockWise128x128,
        output_dtype=out_dtype,
    )
    return out[:m].contiguous() if extra else out


def _whole_columns(scale: Tensor, rows: int) -> Tensor:
    """``scale [m, groups]`` in float32 with strides (1, rows): itself where it lies so, which saves
    a kernel (mostly 1.2 to 1.8 us, H200). Rows behind m are cut off again: they may hold anything.
    """
    lies_so = scale.shape[0] == rows and scale.stride() == (1, rows)
    if lies_so and scale.dtype == torch.float32 and tma_rows.why_not(scale=scale.t()) is None:
        return scale
    columns = scale.new_empty(scale.shape[1], rows, dtype=torch.float32).t()
    columns[: scale.shape[0]].copy_(scale)
    return columns


def _whole_rows(scale: Tensor) -> Tensor:
    """``scale [n, k]`` with rows of a multiple of SCALE_STRIDE elements; what is behind k is not
    used."""
    n, k = scale.shape
    width = -(-k // SCALE_STRIDE) * SCALE_STRIDE
    if scale.stride() == (width, 1):
        left = scale.untyped_storage().nbytes() // scale.element_size() - scale.storage_offset()
        if left >= n * width:
            return scale.as_strided((n, width), (width, 1))
    return F.pad(scale, (0, width - k)).contiguous()
