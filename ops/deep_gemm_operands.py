"""What DeepGEMM's FP8 GEMMs on Hopper (kernel 1D2D) want of their operands, whatever the op.

What its asserts want is checked before: an assert has no shapes in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile_ext.ops import deep_gemm_support, device, tma_rows, ue8m0
from compile_ext.ops.checks import FP8, WANTS_FP8, is_zero, same

CAPABILITY = (9, 0)
N_MULTIPLE, K_MULTIPLE = 64, 128
_SCALE_ROWS = 4  # a column of scale_a begins at a multiple of 16 bytes


def why_not(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor, out_dtype: torch.dtype
) -> str | None:
    """Why DeepGEMM cannot multiply ``a [..., k]`` with ``b [..., n, k]`` here, or None."""
    reason = device.why_not(a, CAPABILITY, exactly=True)
    if reason:
        return reason
    if a.dtype != FP8:
        return WANTS_FP8
    n, k = b.shape[-2:]
    if n % N_MULTIPLE or k % K_MULTIPLE or not k:
        wanted = f"N in multiples of {N_MULTIPLE} and K in multiples of {K_MULTIPLE}"
        return f"needs {wanted}, found N={n}, K={k}"
    reason = tma_rows.why_not(a=a, b=b)
    if reason:
        return reason
    reason = ue8m0.why_not(scale_a=scale_a, scale_b=scale_b)  # packed ones are for SM100
    if reason:
        return reason
    if not scale_b.is_contiguous():
        return "needs scale_b contiguous"
    if out_dtype != torch.bfloat16:
        return f"gives bfloat16 only, wanted {out_dtype}"
    if any(is_zero(size) for size in (*a.shape, *b.shape)):
        return "the product is empty"
    return deep_gemm_support.why_not()


def why_not_stacked(**stacks: Tensor) -> str | None:
    """Why DeepGEMM cannot address these ``[g, rows, k]`` as one matrix ``[g * rows, k]``, as its
    grouped kernels do, or None."""
    for name, x in stacks.items():
        if not same(x.stride(0), x.shape[1] * x.stride(1)):
            return f"needs the groups of {name} one behind the other, at a distance of their rows"
    return None


def column_major(scale: Tensor) -> Tensor:
    """``scale [..., m, groups]`` as TMA reads it: what quantize_fp8_groups gives is that already.
    Given another form, DeepGEMM would compile a kernel to transpose it."""
    m, groups = scale.shape[-2:]
    column = -(-m // _SCALE_ROWS) * _SCALE_ROWS
    strides = (groups * column, 1, column)[-scale.dim() :]
    if scale.stride() == strides and tma_rows.why_not(scale=scale.mT) is None:
        return scale
    aligned = torch.empty_strided(scale.shape, strides, dtype=scale.dtype, device=scale.device)
    return aligned.copy_(scale)


def rows(scale: Tensor) -> Tensor:
    """A contiguous ``scale`` with its strides spelt out: that of a dimension of one element does
    not matter, but DeepGEMM compares it."""
    return scale.view(-1).view(scale.shape)
