"""``grouped_block_scaled_mm_masked`` through DeepGEMM's ``fp8_m_grouped_gemm_nt_masked`` on Hopper.

DeepGEMM trusts masked_m: a negative one is a huge count, one above m_max writes into the next
group. So it is given them clamped, which costs one small kernel. It stores whole tiles of 64 or 128
rows, over the end of a group where m_max is no multiple of them: such an m_max is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile_ext.ops import deep_gemm_operands, deep_gemm_support
from compile_ext.ops.triton_support import device_of

M_MULTIPLE = 128


def why_not(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    masked_m: Tensor,
    expected_m: int | torch.SymInt,
    out_dtype: torch.dtype,
) -> str | None:
    reason = deep_gemm_operands.why_not(
        a, b, scale_a, scale_b, out_dtype
    ) or deep_gemm_operands.why_not_stacked(a=a, b=b)
    m_max = a.shape[1]
    # A symbol counts as what fits: it is a number when the kernel runs, and is asked again.
    if reason is None and type(m_max) is int and m_max % M_MULTIPLE:
        return f"needs m_max in multiples of {M_MULTIPLE}, found {m_max}"
    return reason


def run(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    masked_m: Tensor,
    expected_m: int,
    out_dtype: torch.dtype,
) -> Tensor:
    m_max = a.shape[1]
    out = a.new_empty(a.shape[0], m_max, b.shape[1], dtype=out_dtype)
    with device_of(a):
        activation = a, deep_gemm_operands.column_major(scale_a)
        weight = b, deep_gemm_operands.rows(scale_b)
        used = masked_m.clamp(0, m_max)
        deep_gemm_support.call(
            "fp8_m_grouped_gemm_nt_masked", activation, weight, out, used, min(expected_m, m_max)
        )
    return out
