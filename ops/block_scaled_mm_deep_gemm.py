"""``block_scaled_mm`` through DeepGEMM's ``fp8_gemm_nt`` (kernel 1D2D) on Hopper.

What its asserts want is checked before: an assert has no shapes in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile_ext.ops import deep_gemm_support, device, tma_rows
from compile_ext.ops.checks import FP8, is_zero
from compile_ext.ops.triton_support import device_of

CAPABILITY = (9, 0)
N_MULTIPLE, K_MULTIPLE = 64, 128
_SCALE_ROWS = 4  # a column of scale_a begins at a multiple of 16 bytes


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
    if a.dtype != FP8:
        return "takes no bfloat16 activation: quantize_fp8_groups in the graph is fused"
    n, k = b.shape
    if n % N_MULTIPLE or k % K_MULTIPLE or not k:
        wanted = f"N in multiples of {N_MULTIPLE} and K in multiples of {K_MULTIPLE}"
        return f"needs {wanted}, found N={n}, K={k}"
    reason = tma_rows.why_not(a=a, b=b)
    if reason:
        return reason
    if not scale_b.is_contiguous():
        return "needs scale_b contiguous"
    if out_dtype != torch.bfloat16:
        return f"gives bfloat16 only, wanted {out_dtype}"
    if bias is not None:
        return "takes no bias"
    if is_zero(a.shape[0]):
        return "M is 0"
    return deep_gemm_support.why_not()


def run(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    import deep_gemm  # pyright: ignore[reportMissingImports]

    assert scale_a is not None  # why_not wants an FP8 a, which has one
    out = a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)
    with device_of(a):
        # One row of scales has no stride that matters, but DeepGEMM compares it.
        scale_b = scale_b.as_strided(scale_b.shape, (scale_b.shape[1], 1))
        deep_gemm.fp8_gemm_nt((a, _column_major(scale_a)), (b, scale_b), out)
    return out


def _column_major(scale: Tensor) -> Tensor:
    """``scale [m, groups]`` as TMA reads it: what quantize_fp8_groups gives is that already. Given
    another form, DeepGEMM would compile a kernel to transpose it."""
    m, groups = scale.shape
    strides = 1, -(-m // _SCALE_ROWS) * _SCALE_ROWS
    if scale.stride() == strides and tma_rows.why_not(scale=scale.t()) is None:
        return scale
    aligned = torch.empty_strided((m, groups), strides, dtype=scale.dtype, device=scale.device)
    return aligned.copy_(scale)
