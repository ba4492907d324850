"""FP8 GEMM of a mixture of experts with one matrix of m_max rows a group, of which some are in use.

    D[g, m, :] = block_scaled_mm(A[g, m, :], B[g])    for m < masked_m[g]

The layout of DeepGEMM's ``fp8_m_grouped_gemm_nt_masked``: decode in a CUDA graph, where no size may
depend on how many tokens an expert gets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile_ext.ops import (
    batch_invariant,
    block_scaled_reference,
    checks,
    grouped_block_scaled_mm_masked_deep_gemm,
    triton_support,
)
from compile_ext.ops.contract import Gemm, OpContract
from compile_ext.ops.define import Kernel, define_op, never
from compile_ext.ops.errors import ShapeError
from compile_ext.ops.quantize import dequantize_fp8_groups

NAME = "grouped_block_scaled_mm_masked"


def grouped_block_scaled_mm_masked_ref(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    masked_m: Tensor,
    expected_m: int,
    out_dtype: torch.dtype,
    product: block_scaled_reference.Product = torch.mm,
) -> Tensor:
    """The specification: all rows of each group, then 0 for those that are not in use."""
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[1], dtype=out_dtype)
    rows = torch.arange(a.shape[1], device=a.device)
    for group in range(b.shape[0]):
        x = dequantize_fp8_groups(a[group], scale_a[group])
        all_rows = block_scaled_reference.times_blocks(x, b[group], scale_b[group], product)
        out[group] = all_rows.masked_fill((rows >= masked_m[group]).unsqueeze(1), 0)
    return out


def _check(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    masked_m: Tensor,
    expected_m: int | torch.SymInt,
    out_dtype: torch.dtype,
) -> None:
    block_scaled_reference.check_operands(
        NAME, a, b, scale_a, scale_b, out_dtype, dims=("gmk", "gnk")
    )
    checks.dtype_in(NAME, "masked_m", masked_m, (torch.int32,))
    checks.shape_is(NAME, "masked_m", masked_m, (b.shape[0],))
    checks.same_device(NAME, a=a, masked_m=masked_m)
    # A symbol is a number by the time that a kernel runs, and is checked then.
    if isinstance(expected_m, int) and expected_m < 1:
        raise ShapeError(
            NAME,
            f"expected_m = {expected_m}",
            "at least 1",
            "pass the rows that a group has on average, or m_max",
        )


def _fake(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    masked_m: Tensor,
    expected_m: int | torch.SymInt,
    out_dtype: torch.dtype,
) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[1], b.shape[1], dtype=out_dtype)


OP = define_op(
    # SymInt: a hint that is computed from the number of tokens must not fix that number.
    f"{NAME}(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor masked_m,"
    " SymInt expected_m, ScalarType out_dtype) -> Tensor",
    check=_check,
    fake=_fake,
    kernels=(
        Kernel(
            "deep_gemm",
            grouped_block_scaled_mm_masked_deep_gemm.why_not,
            grouped_block_scaled_mm_masked_deep_gemm.run,
        ),  # SM90
        Kernel(
            "triton",
            triton_support.why_not,
            triton_support.run_of("batched_block_scaled_mm_triton", "run_masked"),
        ),
        Kernel("reference", why_not=never, run=grouped_block_scaled_mm_masked_ref, compiles=False),
        batch_invariant.kernel(
            batch_invariant.tiled("batched_block_scaled_mm_triton", "run_masked"),
            grouped_block_scaled_mm_masked_ref,
        ),
    ),
    contract=OpContract(
        gemm=Gemm(a="a", b="b", scale_a="scale_a", scale_b="scale_b", m_axis=1),
        # Not masked_m: a kernel before this one has just computed it.
        prewait_reads=("b", "scale_b"),
    ),
)


def grouped_block_scaled_mm_masked(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    masked_m: Tensor,
    expected_m: int,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``dequantize(a[g]) @ dequantize(b[g]).T`` for the first ``masked_m[g]`` rows of each group,
    accumulated in float32.

    Args:
        a: ``[g, m_max, k]`` float8_e4m3fn, rows contiguous.
        b: ``[g, n, k]`` float8_e4m3fn, rows contiguous: one weight a group.
        scale_a: ``[g, m_max, ceil(k/128)]`` float32 or float8_e8m0fnu, any strides.
        scale_b: ``[g, ceil(n/128), ceil(k/128)]`` float32 or float8_e8m0fnu.
        masked_m: ``[g]`` int32, the rows in use of each group; a value outside 0..m_max counts as
            the nearest inside.
        expected_m: at least 1, the rows that a group is expected to use. A hint for the choice of a
            kernel, which never changes the result.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        ``[g, m_max, n]`` of out_dtype, contiguous. Rows at or beyond ``masked_m[g]`` may hold
        anything, NaN as well: never read them.

    Raises:
        DtypeError, RankError, ShapeError, LayoutError, DeviceError, GradError.
    """
    out: Tensor = OP(a, b, scale_a, scale_b, masked_m, expected_m, out_dtype)
    return out
