"""``scaled_mm`` through ``torch._scaled_mm`` (cuBLASLt) on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from compile_ext.ops import device, tma_rows
from compile_ext.ops.checks import is_zero

MIN_CAPABILITY = (8, 9)  # FP8 tensor cores begin with Ada
ALIGNMENT = 16  # elements; cuBLASLt refuses other N and K


def why_not(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> str | None:
    reason = device.why_not(a, MIN_CAPABILITY)
    if reason:
        return reason
    n, k = b.shape
    if n % ALIGNMENT or k % ALIGNMENT:
        return f"needs N and K in multiples of {ALIGNMENT}, found N={n}, K={k}"
    reason = tma_rows.why_not(a=a, b=b)
    if reason:
        return reason
    if out_dtype != torch.bfloat16:
        return f"gives bfloat16 only, wanted {out_dtype}"
    if bias is not None and bias.dtype != torch.bfloat16:
        return f"takes a bfloat16 bias, found {bias.dtype}"
    if is_zero(a.shape[0]):
        return "M is 0"
    return None


def run(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    m, n = a.shape[0], b.shape[0]
    if scale_a.numel() == 1 and scale_b.numel() == 1:  # per tensor on both sides
        scale_a, scale_b = scale_a.reshape(()), scale_b.reshape(())
    else:  # row-wise wants a scale for every row and column, as contiguous [m, 1] and [1, n]
        scale_a = scale_a.reshape(-1, 1).expand(m, 1).contiguous()
        scale_b = scale_b.reshape(1, -1).expand(1, n).contiguous()
    bias = bias if bias is None else bias.contiguous()
    return torch._scaled_mm(
        a, b.t(), scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=out_dtype
    )
