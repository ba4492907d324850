"""``block_scaled_mm`` through DeepGEMM's ``fp8_gemm_nt`` on Hopper."""

from __future__ import annotations

import torch
from torch import Tensor

from compile_ext.ops import deep_gemm_operands, deep_gemm_support
from compile_ext.ops.triton_support import device_of


def why_not(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> str | None:
    reason = deep_gemm_operands.why_not(a, b, scale_a, scale_b, out_dtype)
    return "takes no bias" if reason is None and bias is not None else reason


def run(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    assert scale_a is not None  # why_not wants an FP8 a, which has one
    out = a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)
    with device_of(a):
        activation = a, deep_gemm_operands.column_major(scale_a)
        deep_gemm_support.call(
            "fp8_gemm_nt", activation, (b, deep_gemm_operands.rows(scale_b)), out
        )
    return out
