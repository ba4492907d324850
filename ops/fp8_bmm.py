"""FP8 GEMM with a weight for each head: ``einsum("bhr,hdr->bhd")``.

    D[b, h, :] = block_scaled_mm(A[b, h, :], B[h])

The absorbed projections of multi-head latent attention (DeepSeek-V2 technical report, arXiv
2405.04434, section 2.1.2), DeepGEMM's ``fp8_einsum``. M is b, the tokens; N is d, K is r.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile_ext.ops import (
    batch_invariant,
    block_scaled_reference,
    fp8_bmm_deep_gemm,
    triton_support,
)
from compile_ext.ops.contract import Gemm, OpContract
from compile_ext.ops.define import Kernel, define_op, never
from compile_ext.ops.quantize import dequantize_fp8_groups

NAME = "fp8_bmm"


def fp8_bmm_ref(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    product: block_scaled_reference.Product = torch.mm,
) -> Tensor:
    """The specification: one product for each head."""
    x = dequantize_fp8_groups(a, scale_a)
    out = a.new_empty(*a.shape[:2], b.shape[1], dtype=out_dtype)
    for head in range(b.shape[0]):
        out[:, head] = block_scaled_reference.times_blocks(
            x[:, head], b[head], scale_b[head], product
        )
    return out


def _check(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> None:
    block_scaled_reference.check_operands(
        NAME, a, b, scale_a, scale_b, out_dtype, dims=("bhr", "hdr")
    )


def _fake(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[1], b.shape[1], dtype=out_dtype)


OP = define_op(
    f"{NAME}(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, ScalarType out_dtype) -> Tensor",
    check=_check,
    fake=_fake,
    kernels=(
        Kernel("deep_gemm", fp8_bmm_deep_gemm.why_not, fp8_bmm_deep_gemm.run),  # SM90
        Kernel(
            "triton",
            triton_support.why_not,
            triton_support.run_of("batched_block_scaled_mm_triton", "run_bmm"),
        ),
        Kernel("reference", why_not=never, run=fp8_bmm_ref, compiles=False),
        batch_invariant.kernel(
            batch_invariant.tiled("batched_block_scaled_mm_triton", "run_bmm"), fp8_bmm_ref
        ),
    ),
    contract=OpContract(
        gemm=Gemm(a="a", b="b", scale_a="scale_a", scale_b="scale_b", m_axis=0),
        prewait_reads=("b", "scale_b"),
    ),
)


def fp8_bmm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``einsum("bhr,hdr->bhd", dequantize(a), dequantize(b))``, accumulated in float32.

    Args:
        a: ``[b, h, r]`` float8_e4m3fn, rows contiguous: b tokens of h heads. b = 0 gives an empty
            result.
        b: ``[h, d, r]`` float8_e4m3fn, rows contiguous: one weight a head.
        scale_a: ``[b, h, ceil(r/128)]`` float32 or float8_e8m0fnu, any strides.
        scale_b: ``[h, ceil(d/128), ceil(r/128)]`` float32 or float8_e8m0fnu.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        ``[b, h, d]`` of out_dtype, contiguous.

    Raises:
        DtypeError, RankError, ShapeError, LayoutError, DeviceError, GradError.
    """
    out: Tensor = OP(a, b, scale_a, scale_b, out_dtype)
    return out
