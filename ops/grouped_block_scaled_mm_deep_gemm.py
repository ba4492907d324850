"""``grouped_block_scaled_mm`` through DeepGEMM's ``m_grouped_fp8_gemm_nt_contiguous`` on Hopper.

DeepGEMM reads the group of 128 rows off the first one and of 64 rows whether there is one, and
trusts what it reads as an address. So it is given the group of each 128 rows in every one of them,
and the rows without a group, for which it computes what a and that group give, are zeroed behind
it: two small kernels, and no answer that the host waits for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile_ext.ops import deep_gemm_operands, deep_gemm_support, triton_support
from compile_ext.ops.triton_support import device_of

ROWS = 128  # of one group
_group_of_each_block = triton_support.run_of("group_rows_triton", "group_of_each_block")
_zero_idle_rows = triton_support.run_of("group_rows_triton", "zero_idle_rows")


def why_not(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    m_indices: Tensor,
    out_dtype: torch.dtype,
) -> str | None:
    return (
        deep_gemm_operands.why_not(a, b, scale_a, scale_b, out_dtype)
        or deep_gemm_operands.why_not_stacked(b=b)
        or triton_support.why_not(a)
        or _why_not_rows()
    )


def _why_not_rows() -> str | None:
    """The library has one number of rows for the whole process, which others may set."""
    import deep_gemm  # pyright: ignore[reportMissingImports]

    found = deep_gemm.get_mk_alignment_for_contiguous_layout()
    if ROWS % found:
        setter = "set_mk_alignment_for_contiguous_layout"
        return f"reads one group for {found} rows, as {setter} wants; the op has {ROWS}"
    return None


def run(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    m_indices: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    groups = b.shape[0]
    out = a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)
    with device_of(a):
        activation = a, deep_gemm_operands.column_major(scale_a)
        weight = b, deep_gemm_operands.rows(scale_b)
        each = _group_of_each_block(m_indices, groups, ROWS)
        deep_gemm_support.call("m_grouped_fp8_gemm_nt_contiguous", activation, weight, out, each)
        _zero_idle_rows(out, m_indices, groups)
    return out
