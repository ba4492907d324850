"""FP8 GEMM of a mixture of experts whose rows lie one group behind the other.

    D[m, :] = block_scaled_mm(A[m, :], B[group of m])    0 for a row without a group

The layout of DeepGEMM's ``m_grouped_fp8_gemm_nt_contiguous``: prefill, where the number of rows of
each expert is known only on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile_ext.ops import (
    batch_invariant,
    block_scaled_reference,
    checks,
    grouped_block_scaled_mm_deep_gemm,
    triton_support,
)
from compile_ext.ops.contract import Gemm, OpContract
from compile_ext.ops.define import Kernel, define_op, never
from compile_ext.ops.quantize import dequantize_fp8_groups

NAME = "grouped_block_scaled_mm"


def grouped_block_scaled_mm_ref(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    m_indices: Tensor,
    out_dtype: torch.dtype,
    product: block_scaled_reference.Product = torch.mm,
) -> Tensor:
    """The specification: all rows with each weight, of which a row keeps that of its group.

    g times the work that is needed: to take only the rows of a group, their number would have to
    come to the host. An index without a group matches none, and is never used as an address.
    """
    x = dequantize_fp8_groups(a, scale_a)
    out = a.new_zeros(a.shape[0], b.shape[1], dtype=out_dtype)
    for group, (weight, scale) in enumerate(zip(b, scale_b, strict=True)):
        rows = block_scaled_reference.times_blocks(x, weight, scale, product).to(out_dtype)
        out = torch.where((m_indices == group).unsqueeze(1), rows, out)
    return out


def _check(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    m_indices: Tensor,
    out_dtype: torch.dtype,
) -> None:
    block_scaled_reference.check_operands(
        NAME, a, b, scale_a, scale_b, out_dtype, dims=("mk", "gnk")
    )
    checks.dtype_in(NAME, "m_indices", m_indices, (torch.int32,))
    checks.shape_is(NAME, "m_indices", m_indices, (a.shape[0],))
    checks.same_device(NAME, a=a, m_indices=m_indices)


def _fake(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    m_indices: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)


OP = define_op(
    f"{NAME}(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor m_indices,"
    " ScalarType out_dtype) -> Tensor",
    check=_check,
    fake=_fake,
    kernels=(
        Kernel(
            "deep_gemm",
            grouped_block_scaled_mm_deep_gemm.why_not,
            grouped_block_scaled_mm_deep_gemm.run,
        ),  # SM90
        Kernel(
            "triton",
            triton_support.why_not,
            triton_support.run_of("grouped_block_scaled_mm_triton"),
        ),
        Kernel("reference", why_not=never, run=grouped_block_scaled_mm_ref, compiles=False),
        batch_invariant.kernel(
            batch_invariant.tiled("grouped_block_scaled_mm_triton"), grouped_block_scaled_mm_ref
        ),
    ),
    contract=OpContract(
        gemm=Gemm(a="a", b="b", scale_a="scale_a", scale_b="scale_b"),
        # Not m_indices: a kernel before this one has just computed it.
        prewait_reads=("b", "scale_b"),
    ),
)


def grouped_block_scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    m_indices: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Each row of ``dequantize(a)`` times the transposed weight of its group, accumulated in
    float32.

    Fast kernels work on blocks of 128 rows, and read one group for each. They rely on this: of the
    rows ``[128 * i, 128 * i + 128)``, all that have a group have the same one, so each group starts
    at a multiple of 128. The reference honours each row.

    Args:
        a: ``[m, k]`` float8_e4m3fn, rows contiguous. m = 0 gives an empty result.
        b: ``[g, n, k]`` float8_e4m3fn, rows contiguous: one weight a group.
        scale_a: ``[m, ceil(k/128)]`` float32 or float8_e8m0fnu, any strides.
        scale_b: ``[g, ceil(n/128), ceil(k/128)]`` float32 or float8_e8m0fnu.
        m_indices: ``[m]`` int32, the group of each row. A negative one, or one >= g, is no group:
            the row of the result is 0, whatever the row of a holds. (One >= g is a mistake, but to
            refuse it the host would have to wait for the device.)
        out_dtype: bfloat16, float16 or float32.

    Returns:
        ``[m, n]`` of out_dtype, contiguous.

    Raises:
        DtypeError, RankError, ShapeError, LayoutError, DeviceError, GradError.
    """
    out: Tensor = OP(a, b, scale_a, scale_b, m_indices, out_dtype)
    return out
